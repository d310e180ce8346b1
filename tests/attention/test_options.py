"""Every mechanism declares its modes, documents its options, and rejects unknown options."""

import re
from typing import Any

import pytest
import yaml

from protlm.attention import create, mechanism, names
from protlm.system.errors import UserError
from protlm.system.paths import conf_dir


def test_an_unknown_option_names_the_allowed_ones(case: Any) -> None:
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
    with pytest.raises(UserError, match=f"attention.color is not a setting of {case.name}") as e:
        create(case.name, {**case.options, "color": 1}, **sizes)
    assert all(option in str(e.value) for option in case.options)


@pytest.mark.parametrize("name", ["sotfmax", "../softmax", "base", "performer.base", ""])
def test_an_unknown_mechanism_names_the_existing_ones(name: str) -> None:
    with pytest.raises(UserError, match="does not exist") as error:
        create(name, {}, num_heads=2, head_dim=8, model_dim=16, max_length=64)
    assert all(known in str(error.value) for known in names())


@pytest.mark.parametrize("name", names())
def test_every_option_is_explained(name: str) -> None:
    lines = (conf_dir() / "attention" / f"{name}.yaml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert line.startswith("#") or above.startswith("#"), f"{line!r} has no comment"


@pytest.mark.parametrize("name", names())
def test_a_class_declares_its_modes(name: str) -> None:
    cls = mechanism(name)
    assert cls.supports_bidirectional or cls.supports_causal
    assert cls.cost and cls.advice and cls.map_meaning


@pytest.mark.parametrize("name", names())
def test_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    config = yaml.safe_load((conf_dir() / "attention" / f"{name}.yaml").read_text())
    del config["name"]
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
    for option, value in config.items():
        other = {} if isinstance(value, list) else [1]
        message = rf"attention\.{option}={re.escape(str(other))} must be (a|true) "
        with pytest.raises(UserError, match=message):
            create(name, {**config, option: other}, **sizes)
