"""`protlm train`: continues a run with its own settings, and refuses other ones."""

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.commands.run_settings import compose_run, refuse_another_run
from protlm.commands.train import train
from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.loading import load_model
from protlm.system.errors import UserError
from protlm.training.optimization import rate_factor

TRICKY_NAMES = [
    "run (1)",
    "a, b",
    "x=y",
    "it's [here] {1}",
    "back\\slash\\",
    "half'quoted\"",
    " #$: ",
]


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a run of the `tiny` model, four steps long."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def test_the_run_directory_is_checked_before_data_are_prepared(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    told = "protlm.data_prep.prepare.prepare"
    monkeypatch.setattr(told, lambda *_, **__: pytest.fail("data are prepared"))
    with pytest.raises(UserError, match="run contains a run with"):
        train(compose(TrainConfig, ["run_dir=run", "data=sample"]))
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_the_most_telling_differences_come_first(run: Path) -> None:
    typed = [f"run_dir={run}", "attention=performer_relu", "attention.kernel_epsilon=0.5"]
    typed.append("experiment=swissprot_medium")
    with pytest.raises(UserError) as refused:
        compose_run(typed)
    message = str(refused.value)
    first = "model.convolution=None, not 5; model.feedforward_dim=128, not 512"
    assert message.startswith(f"{run} contains a run with {first}; model.")
    assert "attention" not in message
    assert message.count(", not ") == 5
    assert "more; to continue it" in message
    with pytest.raises(
        UserError, match=r"with attention\.name=performer_relu, not softmax; to cont"
    ):
        compose_run([f"run_dir={run}", "attention=softmax"])
    with pytest.raises(UserError) as refused:
        compose_run([f"run_dir={run}", "attention.kernel_epsilon=0.5", "optimizer.beta1=0.5"])
    assert "optimizer.beta1=0.9, not 0.5; attention.kernel_epsilon=" in str(refused.value)


def test_a_run_continues_with_its_stored_settings(run: Path, tiny_data: Path) -> None:
    config = compose_run([f"run_dir={run}", "trainer.max_steps=6", "trainer.devices=2"])
    assert (config.trainer.max_steps, config.trainer.devices) == (6, 2)
    assert (config.model.model_dim, config.data.dir) == (64, str(tiny_data))
    before = compose_run([f"run_dir={run}"])
    config.trainer.max_steps, config.trainer.devices = 4, 1
    assert to_plain(config) == to_plain(before)
    train(compose_run([f"run_dir={run}", "trainer.max_steps=6"]))
    assert (run / "checkpoints" / "step-00000006.ckpt").is_file()


@pytest.mark.parametrize(
    "typed, difference",
    [
        # The default, which differs from what is stored.
        ("data.max_length=512", "data.max_length=128, not 512"),
        ("model=small", "model.feedforward_dim=128, not 344"),
        ("schedule=cosine", "schedule.name=constant, not cosine"),
        ("experiment=demo", "model.feedforward_dim=128, not 344"),
        ("seed=1", "seed=0, not 1"),
    ],
)
def test_typed_settings_must_agree(typed: str, difference: str, run: Path) -> None:
    with pytest.raises(UserError) as refused:
        compose_run([f"run_dir={run}", typed])
    assert difference in str(refused.value)


def test_settings_that_agree_can_be_typed(run: Path) -> None:
    compose_run([f"run_dir={run}", "model=tiny", "data.max_length=128", "seed=0"])


def test_options_of_the_stored_mechanism_can_be_typed(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("attention=nystromformer", "attention.num_landmarks=8", "trainer.max_steps=1")
    run = train_tiny(tmp_path / "run", *settings, "schedule.warmup_steps=0")
    config = compose_run([f"run_dir={run}", "attention.num_landmarks=8"])
    assert config.attention["name"] == "nystromformer"
    with pytest.raises(UserError, match=r"attention\.num_landmarks=8, not 16"):
        compose_run([f"run_dir={run}", "attention.num_landmarks=16"])


def test_a_warmup_that_was_not_typed_is_shortened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"run_dir={tmp_path / 'run'}"
    assert compose_run([new, "trainer.max_steps=30"]).schedule.warmup_steps == 20
    assert capsys.readouterr().err == ""
    assert compose_run([new, "trainer.max_steps=20"]).schedule.warmup_steps == 2
    message = "schedule.warmup_steps=20 does not fit into trainer.max_steps=20; using "
    assert capsys.readouterr().err == f"{message}schedule.warmup_steps=2\n"
    schedule = compose_run([new, "schedule=wsd", "trainer.max_steps=50"]).schedule
    assert (schedule.warmup_steps, schedule.decay_fraction) == (5, 0.2)
    typed = compose_run([new, "schedule.warmup_steps=20", "trainer.max_steps=20"])
    with pytest.raises(UserError, match=r"schedule\.warmup_steps=20 must be at least 0 and below"):
        train(typed)
    assert not (tmp_path / "run").exists()


def test_the_same_command_continues_a_run_with_a_shortened_warmup(
    tiny_data: Path, tmp_path: Path
) -> None:
    settings = ["experiment=demo", "model=tiny", f"data.dir={tiny_data}", "trainer.max_steps=2"]
    settings += [f"run_dir={tmp_path / 'run'}", "trainer.accelerator=cpu", "data.max_length=128"]
    train(compose_run(settings))
    again = compose_run(settings)
    assert again.schedule.warmup_steps == 0
    refuse_another_run(tmp_path / "run", again)


def test_what_is_typed_again_is_compared_beside_the_settings_of_the_run(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    narrowing = ["objective.mask_fraction_range=[0.1,0.3]", "objective.mask_fraction_decays=true"]
    run = train_tiny(tmp_path / "run", "schedule=wsd_linear", *narrowing)
    for typed in (narrowing, narrowing[:1], narrowing[1:], ["trainer.max_steps=9"]):
        config = compose_run([f"run_dir={run}", *typed])
        assert config.objective.mask_fraction_range == [0.1, 0.3]
        assert config.objective.mask_fraction_decays
    with pytest.raises(UserError, match=r"mask_fraction_range=\[0\.1, 0\.3\], not \[0\.1, 0\.5\]"):
        compose_run([f"run_dir={run}", "objective.mask_fraction_range=[0.1,0.5]"])
    with pytest.raises(UserError, match=r"trainer\.valid_every=0 must be"):
        compose_run([f"run_dir={run}", "trainer.valid_every=0"])


def test_another_length_keeps_the_warmup_of_a_run(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["experiment=demo", "model=tiny", f"data.dir={tiny_data}", "schedule=wsd_linear"]
    settings += [f"run_dir={tmp_path / 'run'}", "trainer.accelerator=cpu", "data.max_length=128"]
    train(compose_run([*settings, "trainer.max_steps=20"]))
    longer = compose_run([*settings, "trainer.max_steps=2000"])
    assert longer.schedule.warmup_steps == 2
    refuse_another_run(tmp_path / "run", longer)
    with pytest.raises(UserError, match=r"has 2 steps; type more, such as trainer\.max_steps=20"):
        compose_run([*settings, "trainer.max_steps=2"])
    with pytest.raises(UserError, match=r"schedule\.warmup_steps=2, not 20"):
        compose_run([*settings, "trainer.max_steps=2000", "schedule.warmup_steps=20"])
    # Without a checkpoint nothing was learned under the shortened warm-up.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match=r"schedule\.warmup_steps=2, not 100"):
        compose_run([*settings, "trainer.max_steps=2000"])


def test_a_run_cannot_end_before_its_checkpoint(run: Path, train_tiny: Callable[..., Path]) -> None:
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"is at step 4, after trainer\.max_steps=3; type .*=4 or"):
        train_tiny(run, "trainer.max_steps=3")
    assert (run / "config.yaml").read_bytes() == before


def test_another_length_has_its_own_rates_from_the_next_step_on(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("schedule=wsd_linear", "schedule.warmup_steps=0", "trainer.log_every=1")
    run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=6")
    told = r"after step 6 the learning rate goes from 0 to 0\.001, because trainer\.max_steps is"
    with pytest.warns(UserWarning, match=told):
        train_tiny(run, *settings, "trainer.max_steps=10")
    rates = [row["learning_rate"] for row in read_metrics(run / METRICS) if "samples" in row]
    config = compose(TrainConfig, ["schedule=wsd_linear", "schedule.warmup_steps=0"])
    peak, schedule = config.optimizer.learning_rate, config.schedule
    expected = [rate_factor(step, schedule, max_steps=6) for step in range(6)]
    expected += [rate_factor(step, schedule, max_steps=10) for step in range(6, 10)]
    assert rates == pytest.approx([peak * factor for factor in expected])


def test_a_length_that_changes_no_rate_is_not_worth_a_word(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("schedule=constant", "schedule.warmup_steps=0")
    run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=1")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train_tiny(run, *settings, "trainer.max_steps=2")
    assert not [one for one in told if "learning rate goes" in str(one.message)]


def test_the_last_weights_are_validated(
    train_tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("trainer.valid_every=2", "trainer.accumulate_grad_batches=2")
    run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=5")
    rows = read_metrics(run / METRICS)
    assert [row["step"] for row in rows if "valid_loss" in row] == [2, 4, 5]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 5")]
    assert f"loss {rows[-1]['valid_loss']:.3f}, perplexity" in line
    assert f"accuracy {100 * rows[-1]['valid_accuracy']:.1f} % (unigram: loss" in line


@pytest.mark.parametrize("name", TRICKY_NAMES)
def test_paths_are_taken_literally(name: str) -> None:
    overrides = [f"run_dir={name}", f"data.dir={name}", f"data.valid_dir={name}"]
    config = compose(TrainConfig, overrides)
    assert config.run_dir == config.data.dir == config.data.valid_dir == name
    evaluated = compose(EvaluateConfig, [f"checkpoint={name}", f"output={name}"])
    assert evaluated.checkpoint == evaluated.output == name


def test_quoted_and_interpolated_paths_are_still_read() -> None:
    config = compose(TrainConfig, ["run_dir='a b'", "data.dir=null", "data.valid_dir=runs/${seed}"])
    assert (config.run_dir, config.data.dir, config.data.valid_dir) == ("a b", None, "runs/0")


@pytest.mark.slow
def test_a_run_in_a_folder_with_an_awkward_name(
    tiny_data: Path, tmp_path: Path, protlm_command: Callable
) -> None:
    data = tmp_path / "data (1), x=y"
    data.symlink_to(tiny_data)
    settings = ["model=tiny", f"data.dir={data}", "run_dir=run (1)", "data.max_length=128"]
    settings += ["data.tokens_per_batch=1024", "trainer.accelerator=cpu", "trainer.max_steps=1"]
    done = protlm_command("train", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run (1)" / "checkpoints" / "step-00000001.ckpt").is_file()
    shown = protlm_command("train", "run_dir=run (1)", "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "run_dir: run (1)\n" in shown.stdout


def test_the_backend_of_the_attention_may_change(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "attention=performer_relu", "attention.backend=torch")
    arguments = [f"run_dir={run}", "trainer.max_steps=5", "attention.backend=auto"]
    assert compose_run(arguments).attention["backend"] == "auto"
    assert "backend" not in load_model(run).description.attention_options


def test_few_validation_sequences_cause_a_warning(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(compose_run([f"run_dir={run}"]))
    told = capfd.readouterr().err
    assert re.search(r"protlm: warning: few sequences \(\d+\) .* --valid-fraction", told)
    monkeypatch.setattr("protlm.commands.train._FEW_SEQUENCES", 1)
    train(compose_run([f"run_dir={run}"]))
    assert "warning" not in capfd.readouterr().err


def test_the_backend_of_the_linear_heads_of_a_hybrid_may_change(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    epsilon, backend = "+attention.options.kernel_epsilon=0.01", "+attention.options.backend="
    run = train_tiny(tmp_path / "run", "attention=hybrid", epsilon, f"{backend}torch")
    arguments = [f"run_dir={run}", "trainer.max_steps=5", f"{backend}auto"]
    assert compose_run([*arguments, epsilon]).attention["options"]["backend"] == "auto"
    assert load_model(run).description.attention_options["options"] == {"kernel_epsilon": 0.01}
    with pytest.raises(UserError, match=r"attention\.options="):
        compose_run([*arguments, epsilon.replace("0.01", "0.02")])
