"""Mechanisms declare modes, document options and their table row, and refuse unknown options."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

import protlm.attention
from docs import tables
from protlm.attention import create, names
from protlm.system.errors import UserError
from protlm.system.paths import shipped
from tests.attention.cases import SIZES, shipped_options

SINES = {"estimator": "trigonometric"}
FLOOR = {"denominator_floor": 1.0}
MIRRORED = {"antithetic": True, "num_features": 15}
ALONE = {"window_blocks": 1, "global_blocks": 0, "random_blocks": 0}

# What options must be, values that they do not allow, and the options.
OUT_OF_RANGE: list[tuple[str, list[Any], str]] = [
    (
        "at least 1",
        [0, -2],
        "aft_full.rank aft_local.rank aft_local.window bigbird.block_size long_short.window "
        "linformer.projected_length long_short.chunk long_short.memory longformer.dilation "
        "nystromformer.num_landmarks nystromformer.num_iterations reformer.chunk "
        "performer_generalized.num_features performer_generalized.redraw_every "
        "performer_relu.num_features performer_relu.redraw_every performer_softmax.num_features "
        "performer_softmax.redraw_every reformer.num_hashes reformer.redraw_every "
        "rfa.num_features rfa.redraw_every",
    ),
    (
        "at least 0",
        [-1],
        "bigbird.global_blocks bigbird.num_global bigbird.random_blocks long_short.rank "
        "longformer.dilated_heads longformer.num_global performer_generalized.kernel_epsilon "
        "performer_relu.kernel_epsilon window.relatives_window",
    ),
    ("odd and at least 3", [1, 8], "aft_conv.kernel_size"),
    ("odd and at least 1", [2, -1], "bigbird.window_blocks nystromformer.conv_kernel"),
    ("even and at least 2", [-1, 0, 1, 7], "hybrid.window longformer.window window.window"),
    ("above 0", [0.0, -1.0], "performer_generalized.denominator_floor rfa.denominator_floor"),
    (
        "above 0 and at most 200 (the mean |q̂ + k̂|² of the queries and keys)",
        [0.0, 201.0],
        "performer_softmax.optimal_for",
    ),
    ("1 or an even number", [0, -2, 7], "reformer.num_buckets"),
    ("below 2^63", [math.inf], "rfa.denominator_floor"),
]

# What else is refused, with how the sentence begins.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bigbird", {"global_positions": [0]}, "global_positions contains 0, but residues are"),
    ("bigbird", ALONE, "window_blocks=1 without global positions and random blocks leaves every"),
    ("hybrid", {"local_heads": 0}, "local_heads=0 must leave a head of either kind: between 1 and"),
    *(
        ("hybrid", {"mechanism": name}, f"mechanism={name} is not a linear mechanism")
        for name in ("hybrid", "long_short", "longformer", "softmax", "window")
    ),
    ("hybrid", {"mechanism": "linaer"}, "mechanism=linaer is not a linear mechanism"),
    ("hybrid", {"options": {"color": 1}}, "options.color is not a setting of performer_relu; it"),
    ("hybrid", {"options": {"num_features": "x"}}, "options.num_features=x must be a whole number"),
    (
        "hybrid",
        {"options": {"num_features": -4}},
        "options.num_features=-4 must be at least 1; type options.num_features=null",
    ),
    ("linformer", {"sharing": "all"}, "sharing=all does not exist; there are: heads, key_value"),
    ("longformer", {"dilated_heads": 3, "dilation": 2}, "dilated_heads=3 must be at most the 2 "),
    ("longformer", {"dilation": 2}, "dilation=2 with dilated_heads=0 dilates nothing"),
    ("longformer", {"global_positions": [5, 2.5]}, "global_positions contains 2.5"),
    ("longformer", {"global_positions": ["GXSXG"]}, "global_positions contains 'GXSXG'"),
    ("longformer", {"global_positions": [True]}, "global_positions contains True"),
    ("performer_generalized", {"kernel": "sine"}, "kernel=sine does not exist; there are: abs, c"),
    ("performer_generalized", {"row_norms": "one"}, "row_norms=one does not exist; there are: chi"),
    ("performer_softmax", {"projection": "normal"}, "projection=normal does not exist; there are"),
    ("performer_relu", {"redraw_every": 5}, "redraw_every=5 needs a projection"),
    ("performer_softmax", {"num_features": None}, "num_features=null must be a whole number"),
    ("performer_softmax", {"num_features": "many"}, "num_features=many must be a whole number"),
    ("performer_softmax", MIRRORED, "num_features=15 must be even where features come in mirror"),
    ("performer_softmax", {**SINES, **FLOOR, "num_features": 7}, "num_features=7 must be an even"),
    ("performer_softmax", SINES, "denominator_floor=null allows division"),
    ("performer_softmax", FLOOR, "denominator_floor=1.0 has no use"),
    ("performer_softmax", {**SINES, **FLOOR, "antithetic": True}, "antithetic=true has no effect"),
    (
        "performer_softmax",
        {"estimator": "regularized", "optimal_for": 2.0},
        "optimal_for=2.0 is fo",
    ),
    ("performer_generalized", {"kernel": "tanh"}, "denominator_floor=null allows division"),
    ("performer_generalized", {**FLOOR, "kernel": "cos", "antithetic": True}, "antithetic=true ha"),
    ("performer_generalized", {"num_features": None, "projection": "iid"}, "projection=iid needs"),
    ("rfa", {"kernel": "cosine"}, "kernel=cosine does not exist; there are: arccos, gaussian"),
    ("rfa", {"denominator_floor": None}, "denominator_floor=null allows division"),
    ("rfa", {"gate": "yes"}, "gate=yes must be true or false"),
]


@pytest.mark.parametrize(("allowed", "values", "options"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused(allowed, values, options):
    for name, option in (place.split(".") for place in options.split()):
        default = shipped_options(name)[option]
        hint = f"type {option}={'null' if default is None else default}"
        for value in values:
            with pytest.raises(UserError) as error:
                create(name, {option: value}, **SIZES)
            assert str(error.value) == f"{option}={value} must be {allowed}; {hint}"


@pytest.mark.parametrize(("name", "options", "sentence"), REFUSED)
def test_impossible_settings_are_refused(name, options, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        create(name, options, **SIZES)


def test_an_unknown_option_names_the_allowed_ones(case):
    with pytest.raises(UserError, match=f"^color is not a setting of {case.name}") as e:
        create(case.name, {**case.options, "color": 1}, **SIZES)
    assert all(option in str(e.value) for option in case.options)


@pytest.mark.parametrize("name", ["sotfmax", "../softmax", "base", "performer.base", ""])
def test_an_unknown_mechanism_names_the_existing_ones(name):
    with pytest.raises(UserError, match="does not exist") as error:
        create(name, {}, **SIZES)
    assert all(known in str(error.value) for known in names())


@pytest.mark.parametrize("name", names())
def test_every_option_is_explained(name):
    lines = (shipped("conf") / "attention" / f"{name}.yaml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert line.startswith("#") or above.startswith("#"), f"{line!r} has no comment"


def test_no_shared_part_and_no_other_mechanism_imports_a_mechanism():
    folder = Path(protlm.attention.__file__).parent
    imported = re.compile(rf"^\s*(from|import) protlm\.attention\.({'|'.join(names())})\b", re.M)
    assert [path for path in folder.rglob("*.py") if imported.search(path.read_text())] == []


@pytest.mark.parametrize("name", names())
def test_a_value_of_another_type_is_refused_by_name(name):
    config = shipped_options(name)
    for option, value in config.items():
        other = {} if isinstance(value, list) else [1]
        message = rf"^{option}={re.escape(str(other))} must be (a|true) "
        with pytest.raises(UserError, match=message):
            create(name, {**config, option: other}, **SIZES)


PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"


def cells(name: str) -> list[str]:
    """The cells of the row of a mechanism."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(tables.MECHANISMS[0])[2].partition(tables.MECHANISMS[1])[0]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.slow
def test_the_page_agrees_with_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert tables.within(page, tables.MECHANISMS, tables.mechanisms()) == page, "type: make docs"


def test_the_measured_cells_are_correct():
    _, idea, modes, cost, longest, state, parameters, *_ = cells("performer_softmax")
    # The sums of [v | 1] by feature, and a reference for each.
    assert (modes, cost, state, parameters) == ("both", "L R K", f"{66 * 256:,}", "0")
    assert idea and not idea.endswith(".")
    assert (longest, cells("linformer")[4]) == ("any", "`model.max_length`")
    assert (cells("softmax")[5], cells("bigbird")[5]) == ("grows with L", "none")


def test_a_page_without_the_markers_is_refused_and_left_unchanged():
    with pytest.raises(UserError, match="no place for the table"):
        tables.within(f"# Page\n{tables.MECHANISMS[1]}\n", tables.MECHANISMS, "")
