"""Settings that were typed, but have no effect beside the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.commands.run_settings import compose_run
from protlm.commands.unused_settings import _USED_WITH, refuse_unused
from protlm.config import TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.system.errors import UserError

MIXTURE = "data.mixture=[{dir: a, weight: 1}, {dir: b, weight: 1, split: test}]"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["optimizer=adamw", "optimizer.momentum=0.5"], "type optimizer.name=muon$"),
        (["schedule=cosine", "schedule.decay_fraction=0.5"], "type schedule.name=wsd$"),
        (["schedule=cosine", "schedule.decay_shape=sqrt"], "with schedule.name=cosine"),
        (["schedule=constant", "schedule.min_lr_ratio=0"], "type schedule.name=cosine, wsd$"),
        (["objective=causal", "objective.mask_prob=0.3"], "with objective.name=causal"),
        (["objective=causal", "objective.random_prob=0.3"], "with objective.name=causal"),
        (["objective=causal", "objective.mask_fraction=0.3"], "with objective.name=causal"),
        (["objective.teacher_weight=3"], "type objective.stage=logits$"),
        (["logger.wandb_project=x"], "type logger.wandb=offline, online$"),
        (["data=concatenated", "data.crop=random"], "type data.mode=sequences$"),
        (["data.dir=null", MIXTURE, "data.train_split=test"], "type split: in the data sets$"),
    ],
)
def test_a_setting_without_effect_is_refused(typed: list[str], message: str) -> None:
    *others, last = typed
    compose_run(["run_dir=new", *others])
    with pytest.raises(UserError, match=message):
        compose_run(["run_dir=new", last, *others])


@pytest.mark.parametrize("name", _USED_WITH)
def test_every_name_is_a_setting(name: str) -> None:
    config = to_plain(compose(TrainConfig, []))
    for one in (name, _USED_WITH[name][0]):
        section, _, key = one.partition(".")
        assert key in config[section]


def test_a_setting_without_effect_is_refused_in_every_run_of_a_sweep(
    protlm_in_process: Callable, tmp_path: Path
) -> None:
    swept = ["--multirun", "optimizer.momentum=0.9,0.95", "run_dir=run-${optimizer.momentum}"]
    done = protlm_in_process("train", *swept, cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.momentum has no effect with optimizer.name=adamw" in done.stderr
    assert not list(tmp_path.glob("run-*"))


def test_a_sweep_may_decide_whether_a_setting_is_used() -> None:
    typed = ["optimizer.momentum=0.9"]
    config = to_plain(compose(TrainConfig, ["optimizer=adamw"]))
    for swept in ({"optimizer"}, {"optimizer.name"}):
        refuse_unused(typed, config, swept=swept)
    with pytest.raises(UserError, match="has no effect"):
        refuse_unused(typed, config, swept={"optimizer.momentum", "seed"})


def test_groups_may_set_what_is_not_used() -> None:
    compose_run(["run_dir=new", "objective=causal", "objective.stage=null", "schedule=constant"])
