"""What every kind of run must do: continue after a kill as if nothing had happened."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.checkpoints.format import all_checkpoints, latest, load_training
from protlm.system.errors import UserError

JOINED = "data.mode=concatenated data.tokens_per_batch=512"
MIXTURE = (
    "data.dir=null "
    "data.mixture=[{{dir:{tiny_data},weight:2}},{{dir:{other_data},weight:1,split:test}}]"
)
CLUSTERS = "data.sampling=cluster data.dir={tiny_clusters}"
TAUGHT = (
    "objective=distillation attention=hedgehog objective.teacher={teacher} "
    "model.init_from={swapped} model.dropout=0.1 trainer.max_steps=6"
)
LOGITS = f"{TAUGHT} objective.stage=logits optimizer.learning_rate=5e-3"
DECAYING = (
    "objective.mask_fraction_range=[0.1,0.6] objective.mask_fraction_decays=true schedule=wsd "
    "schedule.decay_fraction=0.5 trainer.accumulate_grad_batches=2 trainer.valid_every=4 "
    "data.crop=random trainer.max_steps=8"
)
# The settings, and the steps after which the run is killed. Names in braces are fixtures.
RUNS = {
    "joined": (f"{JOINED} trainer.max_steps=8", [5]),
    "joined, causal": (f"{JOINED} objective=causal trainer.max_steps=8", [5]),
    "growing": ("data.curriculum=[[0,32],[100,64]] data.crop=random trainer.max_steps=8", [5]),
    "mixture": (f"data.crop=random {MIXTURE} trainer.max_steps=8", [5]),
    "mixture, joined": (f"{JOINED} {MIXTURE} trainer.max_steps=8", [5]),
    "clusters": (f"{CLUSTERS} data.crop=random trainer.max_steps=8", [5]),
    "clusters, joined": (f"{CLUSTERS} {JOINED} trainer.max_steps=8", [5]),
    "average": ("trainer.ema_decay=0.5 trainer.valid_every=2", [3]),
    "estimates": (
        "attention=performer_softmax model.qk_norm=true model.dropout=0.1 trainer.max_steps=6 "
        "trainer.accumulate_grad_batches=2",
        [3],
    ),
    "taught attention": (f"{TAUGHT} optimizer.learning_rate=1e-2", [3]),
    "taught logits": (LOGITS, [3]),
    "taught adapters": (f"{LOGITS} objective.lora_rank=2", [3]),
    # Killed before the decay, and twice in it.
    "mask fractions": (DECAYING, [3, 5, 6]),
    "mask fractions, one worker": (f"{DECAYING} data.num_workers=1", [6]),
    "mask fractions, two workers": (f"{DECAYING} data.num_workers=2", [6]),
}
# The others repeat what these do, with other values.
FAST = ("growing", "mixture", "clusters, joined", "average", "estimates", "taught logits")
FAST += ("taught adapters",)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_killed_run_is_continued_exactly(
    name: str,
    train_tiny: Callable[..., Path],
    killed_after: Callable[[int], Any],
    state_of: Callable[[Path], dict[str, Any]],
    log_of: Callable[[Path], list[dict[str, float]]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Everything in all checkpoints and in the log is that of an undisturbed run."""
    text, kills = RUNS[name]
    fixtures = {name: request.getfixturevalue(name) for name in re.findall(r"(?<!{){(\w+)}", text)}
    settings = text.format(**fixtures).split()
    settings += ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=100"]
    # Without workers, whose number changes nothing.
    plain = [setting for setting in settings if not setting.startswith("data.num_workers")]
    whole, run = train_tiny(tmp_path / "whole", *plain), tmp_path / "run"
    for step in kills:
        with killed_after(step):
            train_tiny(run, *settings)
    train_tiny(run, *settings)
    assert [path.name for path in all_checkpoints(run)] == [p.name for p in all_checkpoints(whole)]
    for path in all_checkpoints(whole):
        expected, found = state_of(path), state_of(run / "checkpoints" / path.name)
        # As text, in which NaN is equal to itself.
        assert [key for key in expected if repr(found[key]) != repr(expected[key])] == [], path
    assert repr(log_of(run)) == repr(log_of(whole))
    newest = latest(run)
    assert newest is not None
    place = load_training(newest)["SequenceData"]
    assert (place["tokens"] > 0) == ("concatenated" in text)


def test_settings_that_are_newer_than_a_run_have_their_defaults(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.strip().startswith("token_dropout:")]
    assert len(older) == len(lines) - 1
    config.write_text("".join(older))
    newest = latest(train_tiny(run, "trainer.max_steps=3"))
    assert newest is not None and newest.name == "step-00000003.ckpt"
    message = r"a run with model\.token_dropout=false, not true; .* protlm train run_dir="
    with pytest.raises(UserError, match=message):
        train_tiny(run, "model.token_dropout=true", "trainer.max_steps=4")
    message = (
        r"model\.token_dropout=false, not true; model\.dropout=0\.0, not 0\.1; seed=0, not 7; to"
    )
    with pytest.raises(UserError, match=message):
        train_tiny(run, "seed=7", "model.token_dropout=true", "model.dropout=0.1")


@pytest.mark.parametrize(
    "setting",
    [
        "data.mode=concatenated",
        "data.curriculum=[[0,32]]",
        "data.max_length=64",
        "objective.mask_fraction_range=[0.1,0.5]",
        "trainer.tokens_per_step=4096",
    ],
)
def test_a_run_is_not_continued_with_another_recipe(
    setting: str, train_tiny: Callable[..., Path], tiny_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=re.escape(setting.partition("=")[0])):
        train_tiny(run, setting, "trainer.max_steps=5")
    assert (run / "config.yaml").read_bytes() == before


REFUSED = [
    ("data.dir=null", "neither data.dir nor data.mixture"),
    ("data.mixture=[{dir:x,weight:1}]", "data.dir=null"),
    ("data.dir=null data.mixture=[{dir:x,weight:0}]", "weight=0.0 must be above 0"),
    ("data.dir=null data.mixture=[{dir:x}]", "weight"),
    ("data.dir=null data.mixture=[{dir:x,wieght:1}]", "data.mixture=[{dir:x,wieght"),
    ("data.mode=joined", "concatenated"),
    ("data.curriculum=[[0,9999]]", "data.max_length=9999"),
    ("data.curriculum=[[10,64]]", "[[0,256],[1000000,1024]]"),
    ("data.curriculum=[[0,many]]", "many"),
    ("data.sampling=clusters", "expected one of [uniform, cluster]"),
    ("data.sampling=cluster", "prepare it again with --cluster-table"),
    *(
        (f"objective.mask_fraction_range={bounds}", "0 < low <= high <= 1")
        for bounds in ("[0,0.5]", "[0.5,0.1]", "[0.5,1.5]", "[-0.1,0.5]")
    ),
    ("trainer.checkpoint_minutes=0", "trainer.checkpoint_minutes"),
    ("trainer.keep_best=-1", "trainer.keep_best"),
    ("trainer.best_metric=train_loss", "trainer.best_metric"),
    ("trainer.on_save_error=ignore", "trainer.on_save_error"),
    (
        "trainer.tokens_per_step=2048 trainer.accumulate_grad_batches=2",
        "leave trainer.accumulate_grad_batches=2 out",
    ),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[settings for settings, _ in REFUSED])
def test_impossible_settings_are_refused_before_anything_is_written(
    settings: str, words: str, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        train_tiny(tmp_path / "run", *settings.split())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
