"""`protlm train`: continues a run with its own settings, and refuses other ones."""

import os
import re
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import hydra
import pytest
import yaml

from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.commands.train import train
from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.config.settings import may_change, used_with
from protlm.config.settings_file import settings_of
from protlm.data.shards.manifest import read_manifest
from protlm.loading import load_model
from protlm.system.errors import InputDataError, UserError
from protlm.training import run_config
from protlm.training.run_config import (
    check_run,
    compose_run,
    refuse_another_run,
    refuse_unused,
    write_config,
)
from protlm.training.schedule import rate_factor
from tests.fixtures.commands import Command
from tests.fixtures.runs import Train
from tests.marks import slow_but

TRICKY_NAMES = ["run (1)", "a, b", "x=y", " #$: "]
TRICKY_NAMES += ["it's [here] {1}", "back\\slash\\", "half'quoted\""]
NEW = Path("run")
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def run(tiny_run: Path) -> Path:
    """A copy of a run of the `tiny` model, four steps long."""
    return shutil.copytree(tiny_run, NEW)


def test_the_run_directory_is_checked_before_data_are_prepared(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "protlm.data_prep.prepare.prepare"
    monkeypatch.setattr(told, lambda *_, **__: pytest.fail("data are prepared"))
    with pytest.raises(UserError, match="run contains a run with"):
        train(compose(TrainConfig, ["run_dir=run", "data=sample"]))
    assert [*Path().iterdir()] == [run]


TYPED = [
    # The default, which differs from what is stored.
    ("data.max_length=512", "with data.max_length=128, not 512; to"),
    ("model=small", "with model.num_layers=2, not 4; model."),
    ("schedule=cosine", "with schedule.name=constant, not cosine; to"),
    ("experiment=demo", "optimizer.name=adamw, not muon"),
    ("seed=1", "with seed=0, not 1; to"),
    ("attention=softmax", "with attention.name=performer_relu, not softmax; to"),
    ("objective=causal", "with objective.name=masked, not causal; to"),
    # The most telling ones first, and five of them.
    (
        "optimizer.beta1=0.5 attention.kernel_epsilon=0.5",
        "with optimizer.beta1=0.9, not 0.5; attention.kernel_epsilon=0.001, not 0.5; to",
    ),
    (
        "attention=performer_relu attention.kernel_epsilon=0.5 experiment=swissprot_medium",
        "with optimizer.name=adamw, not muon; schedule.name=constant, not wsd; ",
    ),
    ("experiment=swissprot_medium", " more; to continue it with its own settings type protlm"),
]


@pytest.mark.parametrize(("typed", "difference"), slow_but(TYPED, TYPED[0], TYPED[-1]))
def test_typed_settings_must_agree(typed: str, difference: str, run: Path) -> None:
    with pytest.raises(UserError) as refused:
        check_run([f"run_dir={run}", *typed.split()])
    assert str(refused.value).startswith(f"{run} contains a run with ")
    assert difference in str(refused.value)
    assert str(refused.value).count(", not ") <= 5
    assert str(refused.value).endswith(f"another run_dir= and add model.init_from={run}")


def test_settings_that_decide_are_those_of_what_is_learned() -> None:
    free = may_change()
    assert {"run_dir", "data.dir", "objective.teacher", "trainer.devices", "logger.wandb"} <= free
    assert {name.partition(".")[0] for name in free} == {
        *("run_dir", "data", "objective", "trainer", "logger")
    }
    decides = {"precision", "tokens_per_step", "ema_decay", "gradient_clip"}
    assert not free & {"data.tokens_per_batch", *(f"trainer.{one}" for one in decides)}


def test_settings_are_composed_and_compared_once_in_each_process(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composing, comparing = Mock(wraps=hydra.compose), Mock(wraps=run_config._differences)
    monkeypatch.setattr(hydra, "compose", composing)
    monkeypatch.setattr(run_config, "_differences", comparing)
    check_run([f"run_dir={run}"])
    assert (composing.call_count, comparing.call_count) == (1, 1)
    train(compose_run([f"run_dir={run}"]))
    assert (composing.call_count, comparing.call_count) == (2, 2)


@pytest.mark.slow
def test_a_run_continues_with_its_stored_settings(run: Path, tiny_data: Path) -> None:
    compose_run([f"run_dir={run}", "model=tiny", "data.max_length=128", "seed=0"])
    config = compose_run([f"run_dir={run}", "trainer.max_steps=6", "trainer.devices=2"])
    assert (config.trainer.max_steps, config.trainer.devices) == (6, 2)
    assert (config.model.model_dim, config.data.dir) == (64, str(tiny_data))
    before = compose_run([f"run_dir={run}"])
    config.trainer.max_steps, config.trainer.devices = 4, 1
    assert to_plain(config) == to_plain(before)
    train(compose_run([f"run_dir={run}", "trainer.max_steps=6"]))
    assert (run / "checkpoints" / "step-00000006.ckpt").is_file()


def test_a_run_in_a_directory_that_was_not_typed_continues_with_its_settings_alone(
    tiny_run: Path, tiny_data: Path
) -> None:
    shutil.copytree(tiny_run, "runs/small")
    same = ["model=tiny", f"data.dir={tiny_data}", "data.max_length=128", "schedule.warmup_steps=1"]
    with pytest.raises(UserError, match=r"a run with model\.num_layers=2, not 4; .* type protlm"):
        compose_run(same[1:])
    stored = to_plain(compose_run(["run_dir=runs/small"]))
    changed = {one: value for one, value in stored.items() if one not in ("model", "run_dir")}
    Path("mine.yaml").write_text(yaml.safe_dump(changed))
    assert to_plain(compose_run(same, settings_of(Path("mine.yaml"), same))) == stored


def test_a_directory_without_a_run_is_not_continued(run: Path) -> None:
    assert compose_run([f"run_dir={run}"])
    with pytest.raises(UserError, match="typo contains no run to continue; to start one there"):
        compose_run(["run_dir=typo"])
    assert compose_run(["run_dir=typo", "data=sample"]).run_dir == "typo"


def test_a_run_names_its_data_for_other_folders(tiny_data: Path) -> None:
    Path("data").symlink_to(tiny_data)
    typed = ["model=tiny", "data.dir=data", "data.valid_dir=data", "run_dir=run"]
    write_config(compose(TrainConfig, typed), None)
    with pytest.raises(UserError, match="another process has trained in run since"):
        write_config(compose(TrainConfig, typed), None)
    found = compose_run(["run_dir=run"]).data
    assert found.dir == found.valid_dir == str(Path("data").absolute())
    with pytest.raises(InputDataError, match=rf"there is no {Path.cwd()}/gone/"):
        read_manifest(Path("gone"))


def test_a_file_of_settings_is_as_if_typed() -> None:
    Path("mine.yaml").write_text(
        "defaults: [override /model: tiny, override /attention: hybrid, _self_]\n"
        "attention: {window: 64, options: {kernel_epsilon: 0.01}}\n"
        "data: {dir: null, mixture: [{dir: it's a, weight: 2.0},\n"
        " {dir: '${oc.env:HOME}/b', weight: 1.0, split: x}]}\n"
        "model: {dropout: 0.0}\nseed: 3\noptimizer: {eps: 1e-9}\nrun_dir: new (1)\n"
    )
    config = compose_run(["seed=4"], settings_of(Path("mine.yaml"), ["seed=4"]))
    assert (config.model.num_layers, config.model.dropout, config.seed) == (2, 0.0, 4)
    assert config.attention["options"] == {"kernel_epsilon": 0.01}
    assert (config.attention["name"], config.attention["window"]) == ("hybrid", 64)
    dirs = [(part.dir, part.weight, part.split) for part in config.data.mixture]
    assert dirs == [("it's a", 2.0, "train"), (f"{os.environ['HOME']}/b", 1.0, "x")]
    assert (config.optimizer.eps, config.run_dir) == (1e-9, "new (1)")
    typed = ["model=small", "attention=softmax"]
    config = compose_run(typed, settings_of(Path("mine.yaml"), typed))
    assert (config.model.num_layers, config.attention) == (4, compose(TrainConfig, typed).attention)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1\nb: *x", "cannot be read as settings: it contains YAML aliases"),
        ("- 1", "it has no settings of the form name: value"),
        ("5", "it has no settings of the form name: value"),
        ("defaults: [model]", "defaults has model, and not an entry such as override /model"),
        ("defaults: [{model: tiny, data: sample}]", "defaults has .* and not an entry such as"),
        ("", "it is empty"),
        ("seed: 1\nseed: 2", "line 2: found duplicate key seed"),
        ("trainer: [1, 2]", "trainer must be settings of the form name: value"),
        ("data: null", "data must be settings of the form name: value"),
        ("attention: {name: hybrid, options: 5}", "attention.options must be settings of the"),
        ("attention: {name: hybrid, windw: 5}", r"windw is not .* \(did you mean attention.window"),
        ("model: tinny", r"model=tinny does not exist \(did you mean model=tiny\?\)"),
        ("trainer.max_steps: 5", "trainer.max_steps has to be written as a setting in its section"),
        ("trainer: {steps: 5}", "trainer.steps is not a setting .*max_steps"),
        ("trainer: {max_steps: null}", "trainer.max_steps must be a whole number, e.g. 8$"),
        ("trainer: {compile: 'it''s'}", "trainer.compile must be true or false$"),
        ("seed: ${oc.env:HOME}", "seed must be a whole number, e.g. 8$"),
        ("model: {positions: round}", "model.positions must be one of: learned, relative, rotary"),
        ("data: {mixture: {dir: a}}", r"data.mixture must be a list of {dir, weight, split}$"),
        ("hydra: {verbose: true}", "settings of hydra are not read from a file"),
    ],
)
def test_a_file_that_is_not_one_of_settings(text: str, message: str) -> None:
    Path("bad.yaml").write_text(text)
    with pytest.raises(InputDataError, match=message) as refused:
        compose_run(["run_dir=run"], settings_of(Path("bad.yaml"), []))
    assert str(refused.value).startswith("bad.yaml cannot be ")


@pytest.mark.parametrize(
    ("code", "typed", "message"),
    [
        (2, "--config", "--config needs a file"),
        (3, "--config=none.yaml", "none.yaml: no such file"),
        (2, "--config-dir .", "the flags are: --help, .*, --config"),
        (2, "hydra.searchpath=[x]", "no effect without --multirun; .* --config FILE"),
        (2, "--multirun seed=1,2", r"needs its own folder, .* run_dir='runs/\$\{seed\}'"),
        (2, "-m model=tiny,small", r"type run_dir='runs/\$\{hydra:runtime\.choices\.model\}'"),
    ],
)
def test_what_train_refuses(
    code: int, typed: str, message: str, protlm_in_process: Command
) -> None:
    done = protlm_in_process("train", *typed.split(), cwd=Path(), code=code)
    assert re.search(message, done.stderr), done.stderr
    assert [*Path().iterdir()] == []


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_and_a_run_says_how_it_begins(
    tiny_settings: list[str], protlm_in_process: Command
) -> None:
    Path("mine.yaml").write_text("trainer: {max_steps: 2}")
    settings = [one for one in tiny_settings if "_steps" not in one]
    swept = ["--config=mine.yaml", "--multirun", *settings, "seed=1,2", "run_dir=m-${seed}"]
    done = protlm_in_process("train", *swept, cwd=Path())
    started = r"m-\d: new run; data .*; cpu, 1 threads, precision .*, steps of [\d,]+ tokens"
    assert len(re.findall(started, done.stderr)) == 2
    assert re.findall(r"\nprotlm: warning: (.*) does not fit", done.stderr) == [
        "schedule.warmup_steps=20"
    ]
    assert re.search(r"m-1 +2 +\d\.\d{4} .*\n +m-2 +2 ", done.stdout), done.stdout
    shown = protlm_in_process("train", "run_dir=m-2", "--cfg", "job", cwd=Path())
    assert yaml.safe_load(shown.stdout) == yaml.safe_load(Path("m-2/config.yaml").read_text())
    again = protlm_in_process("train", "run_dir=m-2", "trainer.max_steps=3", cwd=Path())
    assert "m-2: continuing at step 2; data" in again.stderr


LAYERS, NESTED = "attention.layers=", "attention.options.performer_relu.backend="
BACKEND, EPSILON = "attention.options.backend=", "+attention.options.kernel_epsilon=0.01"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "again", "other"),
    [
        (["attention=nystromformer", "attention.num_landmarks=8"], [], "attention.num_landmarks=9"),
        (["attention=performer_relu", "attention.backend=torch"], ["attention.backend=auto"], ""),
        (
            ["attention=hybrid", EPSILON, f"+{BACKEND}torch"],
            [EPSILON, f"+{BACKEND}auto"],
            EPSILON.replace("0.01", "0.02"),
        ),
        (
            ["attention=alternating", f"{LAYERS}[window,performer_relu]", f"+{NESTED}torch"],
            [f"+{NESTED}auto"],
            f"{LAYERS}[performer_relu,window]",
        ),
    ],
)
def test_options_of_the_stored_mechanism_may_be_typed_alone(
    chosen: list[str], again: list[str], other: str, train_tiny: Train
) -> None:
    run = train_tiny(NEW, *chosen, "trainer.max_steps=1", "schedule.warmup_steps=0")
    config = compose_run([f"run_dir={run}", *(again or chosen[1:])])
    assert f"attention={config.attention['name']}" == chosen[0]
    options = config.attention.get("options") or config.attention
    assert options.get("backend", "auto") == "auto"
    saved = load_model(run).description.attention_options
    assert "backend" not in saved and "backend" not in saved.get("options", {})
    if other:
        with pytest.raises(UserError, match=rf"{other.strip('+').split('=')[0]}=.*, not "):
            check_run([f"run_dir={run}", other])


@pytest.mark.slow
def test_a_warmup_that_was_not_typed_is_shortened() -> None:
    new = "run_dir=run"
    schedule = compose_run([new, "trainer.max_steps=30"]).schedule
    assert (schedule.warmup_steps, schedule.notice) == (20, "")
    schedule = compose_run([new, "trainer.max_steps=20"]).schedule
    message = "schedule.warmup_steps=20 does not fit into trainer.max_steps=20; using "
    assert (schedule.warmup_steps, schedule.notice) == (2, f"{message}schedule.warmup_steps=2")
    schedule = compose_run([new, "schedule=wsd", "trainer.max_steps=50"]).schedule
    assert (schedule.warmup_steps, schedule.decay_fraction) == (5, 0.2)
    typed = compose_run([new, "schedule.warmup_steps=20", "trainer.max_steps=20"])
    with pytest.raises(UserError, match=r"schedule\.warmup_steps=20 must be at least 0 and below"):
        train(typed)
    assert not NEW.exists()


@pytest.mark.slow
def test_what_is_typed_again_is_compared_beside_the_settings_of_the_run(train_tiny: Train) -> None:
    narrowing = ["objective.mask_fraction_range=[0.1,0.3]", "objective.mask_fraction_decays=true"]
    run = train_tiny(NEW, "schedule=wsd_linear", *narrowing)
    for typed in (narrowing, narrowing[:1], narrowing[1:], ["trainer.max_steps=9"]):
        config = compose_run([f"run_dir={run}", *typed])
        assert config.objective.mask_fraction_range == [0.1, 0.3]
        assert config.objective.mask_fraction_decays
    with pytest.raises(UserError, match=r"mask_fraction_range=\[0\.1, 0\.3\], not \[0\.1, 0\.5\]"):
        check_run([f"run_dir={run}", "objective.mask_fraction_range=[0.1,0.5]"])
    with pytest.raises(UserError, match=r"trainer\.valid_every=0 must be"):
        compose_run([f"run_dir={run}", "trainer.valid_every=0"])


@pytest.mark.slow
def test_another_length_keeps_the_warmup_of_a_run(tiny_data: Path) -> None:
    settings = ["experiment=demo", "model=tiny", f"data.dir={tiny_data}"]
    settings += ["run_dir=run", "trainer.accelerator=cpu", "data.max_length=128"]
    train(compose_run([*settings, "trainer.max_steps=20"]))
    for steps in (20, 2000):
        longer = compose_run([*settings, f"trainer.max_steps={steps}"])
        assert longer.schedule.warmup_steps == 2
        refuse_another_run(longer)
    with pytest.raises(UserError, match=r"warmup_steps=2 must be .* larger trainer\.max_steps"):
        train(compose_run([*settings, "trainer.max_steps=2"]))
    with pytest.raises(UserError, match=r"schedule\.warmup_steps=2, not 20"):
        check_run([*settings, "trainer.max_steps=2000", "schedule.warmup_steps=20"])


def test_a_run_cannot_end_before_its_checkpoint(run: Path, train_tiny: Train) -> None:
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"is at step 4, after trainer\.max_steps=3; type .*=4 or"):
        train_tiny(run, "trainer.max_steps=3")
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_another_length_has_its_own_rates_from_the_next_step_on(train_tiny: Train) -> None:
    settings = ("schedule=wsd_linear", "schedule.warmup_steps=0", "trainer.log_every=1")
    run = train_tiny(NEW, *settings, "trainer.max_steps=6")
    told = r"after step 6 the learning rate goes from 0 to 0\.001, because trainer\.max_steps is"
    with pytest.warns(UserWarning, match=told):
        train_tiny(run, *settings, "trainer.max_steps=10")
    rates = [row["learning_rate"] for row in read_metrics(run / METRICS) if "samples" in row]
    config = compose(TrainConfig, ["schedule=wsd_linear", "schedule.warmup_steps=0"])
    peak, schedule = config.optimizer.learning_rate, config.schedule
    expected = [rate_factor(step, schedule, max_steps=6) for step in range(6)]
    expected += [rate_factor(step, schedule, max_steps=10) for step in range(6, 10)]
    assert rates == pytest.approx([peak * factor for factor in expected])


def test_a_length_that_changes_no_rate_is_not_worth_a_word(train_tiny: Train) -> None:
    settings = ("schedule=constant", "schedule.warmup_steps=0")
    run = train_tiny(NEW, *settings, "trainer.max_steps=1")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train_tiny(run, *settings, "trainer.max_steps=2")
    assert not [one for one in told if "learning rate goes" in str(one.message)]


def test_the_last_weights_are_validated(
    train_tiny: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("trainer.valid_every=2", "trainer.accumulate_grad_batches=2")
    rows = read_metrics(train_tiny(NEW, *settings, "trainer.max_steps=5") / METRICS)
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


@pytest.mark.slow
def test_quoted_and_interpolated_paths_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB", "7")
    typed = ["run_dir='a b'", "data.dir=null", "data.valid_dir=r/${oc.env:JOB}-${seed}"]
    config = compose(TrainConfig, typed)
    assert (config.run_dir, config.data.dir, config.data.valid_dir) == ("a b", None, "r/7-0")


@pytest.mark.slow
def test_a_run_in_a_folder_with_an_awkward_name(tiny_data: Path, protlm_command: Command) -> None:
    data = Path("data (1), x=y")
    data.symlink_to(tiny_data)
    settings = ["model=tiny", f"data.dir={data}", "run_dir=run (1)", "data.max_length=128"]
    settings += ["data.tokens_per_batch=1024", "trainer.accelerator=cpu", "trainer.max_steps=1"]
    protlm_command("train", *settings, cwd=Path())
    assert Path("run (1)/checkpoints/step-00000001.ckpt").is_file()
    shown = protlm_command("train", "run_dir=run (1)", "--cfg", "job", cwd=Path())
    assert "run_dir: run (1)\n" in shown.stdout


@pytest.mark.slow
def test_few_validation_sequences_cause_a_warning(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(compose_run([f"run_dir={run}"]))
    told = capfd.readouterr().err
    assert re.search(r"protlm: warning: few sequences \(\d+\) .* --valid-fraction", told)
    monkeypatch.setattr("protlm.commands.train._FEW_SEQUENCES", 1)
    train(compose_run([f"run_dir={run}"]))
    assert "warning" not in capfd.readouterr().err


MIXTURE = "data.mixture=[{dir:a,weight:1},{dir:b,weight:1,split:test}]"


UNUSED = [
    ("optimizer=adamw optimizer.momentum=0.5", "type optimizer.name=muon$"),
    ("schedule=cosine schedule.decay_fraction=0.5", "type schedule.name=wsd$"),
    ("schedule=cosine schedule.decay_shape=sqrt", "with schedule.name=cosine"),
    ("schedule=constant schedule.min_lr_ratio=0", "type schedule.name=cosine, wsd$"),
    ("objective=causal objective.mask_prob=0.3", "with objective.name=causal"),
    ("objective=causal objective.random_prob=0.3", "with objective.name=causal"),
    ("objective=causal objective.mask_fraction=0.3", "with objective.name=causal"),
    ("objective.teacher_weight=3", "type objective.stage=logits$"),
    ("logger.wandb_project=x", "type logger.wandb=offline, online$"),
    ("data=concatenated data.crop=random", "type data.mode=sequences$"),
    ("data.batching=relatives data.crop=random", "type data.batching=packed, padded$"),
    ("data.relatives_last=0.5", "type data.batching=relatives$"),
    ("data.tokens_per_row=512", "type data.batching=packed, relatives$"),
    (f"data.dir=null {MIXTURE} data.train_split=test", "type split: in the data sets$"),
]


@pytest.mark.parametrize(("typed", "message"), slow_but(UNUSED, UNUSED[0], UNUSED[-1]))
def test_a_setting_without_effect_is_refused(typed: str, message: str) -> None:
    *others, last = typed.split()
    compose_run(["run_dir=new", "seed=0", *others])
    with pytest.raises(UserError, match=message):
        compose_run(["run_dir=new", last, *others])


def test_every_name_is_a_setting() -> None:
    config = to_plain(compose(TrainConfig, []))
    conditions = [condition for several in used_with().values() for condition in several]
    for name in {condition.partition("=")[0] for condition in conditions}:
        section, _, key = name.partition(".")
        assert key in config[section]


@pytest.mark.slow
def test_a_setting_without_effect_is_refused_in_every_run_of_a_sweep(
    protlm_in_process: Command,
) -> None:
    swept = ["--multirun", "optimizer.momentum=0.9,0.95", "run_dir=run-${optimizer.momentum}"]
    done = protlm_in_process("train", *swept, cwd=Path(), code=2)
    assert "optimizer.momentum has no effect with optimizer.name=adamw" in done.stderr
    assert not list(Path().glob("run-*"))


def test_a_sweep_may_decide_whether_a_setting_is_used() -> None:
    typed = ["optimizer.momentum=0.9"]
    config = to_plain(compose(TrainConfig, ["optimizer=adamw"]))
    for swept in ({"optimizer"}, {"optimizer.name"}):
        refuse_unused(typed, config, swept=swept)
    with pytest.raises(UserError, match="has no effect"):
        refuse_unused(typed, config, swept={"optimizer.momentum", "seed"})


def test_groups_may_set_what_is_not_used() -> None:
    compose_run(["run_dir=new", "objective=causal", "objective.stage=null", "schedule=constant"])
