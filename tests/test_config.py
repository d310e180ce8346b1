"""Configs: every shipped one composes; errors of keys, choices and types list alternatives."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from protlm.attention import mechanism
from protlm.build import describe
from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.choices import added, choices
from protlm.config.composition import PATHS, compose, to_plain
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from protlm.system.paths import shipped
from tests.fixtures.commands import ROOT
from tests.marks import slow_but

GROUPS = ("model", "attention", "objective", "data", "optimizer", "schedule", "trainer", "logger")
CHOICES = [(group, choice) for group in GROUPS for choice in choices(group)]


@pytest.mark.parametrize("group, choice", slow_but(CHOICES, *CHOICES[::8]))
def test_every_choice_composes(group, choice):
    assert to_plain(compose(TrainConfig, [f"{group}={choice}"]))["seed"] == 0


@pytest.mark.parametrize("evaluation", choices("evaluation"))
def test_every_evaluation_composes(evaluation):
    config = compose(EvaluateConfig, ["checkpoint=x", f"evaluation=[{evaluation}]"])
    assert set(config.evaluation) == {evaluation}


def test_a_missing_evaluation_names_the_existing_ones():
    with pytest.raises(UserError, match=r"^evaluation=head does not exist \(did you mean") as e:
        compose(EvaluateConfig, ["checkpoint=x", "evaluation=[head]"])
    assert all(name in str(e.value) for name in choices("evaluation"))


@pytest.fixture
def adds(monkeypatch, tmp_path):
    """Makes modules of a package add names, as if it were installed: `adds("name=a.b")`."""
    package = tmp_path / "added_package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def install(entries: str, yaml: str = "name: mine\nscale: 2", code: str = "") -> None:
        names = [entry.split("=") for entry in entries.split()]
        for name, module in names:
            (package / f"{module.split('.')[1]}.py").write_text(code)
            (package / f"{name}.yaml").write_text(yaml)
        found = [EntryPoint(*one, "protlm.attention") for one in names]
        monkeypatch.setattr("protlm.config.choices.entry_points", lambda group: found)
        added.cache_clear()

    yield install
    added.cache_clear()
    sys.modules.pop("added_package", None)


def test_what_a_package_adds_is_not_imported_before_it_is_built(adds, tmp_path):
    adds("mine=added_package.one", code="raise RuntimeError('of the package')")
    assert "mine" in choices("attention") and "mine" not in choices("model")
    config = compose(TrainConfig, ["attention=mine", "attention.scale=3"])
    assert config.attention == {"name": "mine", "scale": 3}
    with pytest.raises(UserError, match=r"scales is not a setting .*mean attention\.scale"):
        compose(TrainConfig, ["attention=mine", "attention.scales=3"])
    assert "added_package" not in sys.modules
    with pytest.raises(UserError, match=r"one must be importable .* one Attention: of the package"):
        mechanism("mine")
    (tmp_path / "added_package" / "mine.yaml").unlink()
    with pytest.raises(UserError, match=r"mine\.yaml: no such file"):
        compose(TrainConfig, ["attention=mine"])


@pytest.mark.parametrize(
    ("entries", "yaml", "message"),
    [
        ("mine=added_package.a mine=added_package.b", "name: mine", r"\.a adds attention=mine, a"),
        ("softmax=added_package.a", "", "adds attention=softmax, a name that protlm or another"),
        ("mine=added_package.a", "", r"mine\.yaml cannot be read: it is empty"),
        ("mine=added_package.a", "name: [", r"mine\.yaml cannot be read: line 1: expected"),
        ("mine=nowhere.a", "", r"there is no package nowhere with an __init__\.py"),
    ],
)
def test_a_package_that_adds_nothing_usable_is_refused(adds, entries, yaml, message):
    adds(entries, yaml)
    with pytest.raises(UserError, match=message):
        compose(TrainConfig, ["attention=mine"])


CAUSAL_EXPERIMENTS = {"trembl_performer_relu_36_causal", "trembl_reformer_36"}


@pytest.mark.parametrize("experiment", slow_but(choices("experiment"), *CAUSAL_EXPERIMENTS))
def test_every_experiment_composes(experiment):
    config = compose(TrainConfig, [f"experiment={experiment}"])
    assert config.run_dir == f"runs/{experiment}"
    is_causal = experiment in CAUSAL_EXPERIMENTS
    assert describe(config).objective == ("causal" if is_causal else "masked")
    assert config.model.max_length >= config.data.max_length
    typed = [f"experiment={experiment}", "run_dir=mine", "model.num_layers=1"]
    layer = compose(TrainConfig, typed)
    assert layer.run_dir == "mine"
    mechanism = build_network(layer.model, layer.attention, seed=0).mechanism(1)
    assert mechanism.supports_causal if is_causal else mechanism.supports_bidirectional
    header = (shipped("conf") / "experiment" / f"{experiment}.yaml").read_text()
    assert f"protlm train experiment={experiment}" in header


def test_a_model_may_choose_its_attention():
    modern, hybrid = (compose(TrainConfig, [f"model={name}_36"]) for name in ("modern", "hybrid"))
    assert hybrid.model == modern.model
    assert (modern.attention["name"], hybrid.attention["name"]) == ("performer_relu", "hybrid")


def test_the_experiments_have_the_settings_of_the_paper():
    config = compose(TrainConfig, ["experiment=trembl_performer_softmax_36"])
    model, optimizer = config.model, config.optimizer
    assert (model.num_heads, model.num_layers) == (8, 36)
    assert (model.feedforward_dim, model.model_dim) == (1024, 512)
    assert (model.max_length, model.dropout, model.activation.value) == (1024, 0.1, "relu")
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.98, 1e-9)
    assert (optimizer.learning_rate, optimizer.weight_decay) == (1e-3, 0.1)
    assert config.trainer.gradient_clip == 0.5
    assert (config.schedule.name.value, config.schedule.warmup_steps) == ("constant", 0)
    assert config.attention["num_features"] == 256
    # Long rows are joined proteins.
    for name in ("performer_relu", "softmax"):
        data = compose(TrainConfig, [f"experiment=trembl_{name}_8192"]).data
        assert (data.mode.value, data.max_length) == ("concatenated", 8192)


def test_the_paper_s_baselines_differ_in_attention_alone():
    def plain(experiment: str) -> dict[str, object]:
        return to_plain(compose(TrainConfig, [f"experiment={experiment}", "run_dir=run"]))

    performer = plain("trembl_performer_relu_36")
    softmax, linformer, causal = (
        plain(f"trembl_{name}")
        for name in ("softmax_36", "linformer_36", "performer_relu_36_causal")
    )
    for other in (softmax, linformer):
        assert other | {"attention": None} == performer | {"attention": None}
    assert causal | {"objective": None} == performer | {"objective": None}
    # The paper trained its Reformer without clipping.
    assert compose(TrainConfig, ["experiment=trembl_reformer_36"]).trainer.gradient_clip == 0


# What is typed, and the words of the sentence.
WRONG = """
model.num_layer=3 -> model.num_layer & num_layers
modle=tiny -> modle & model
model=tinny -> tinny & tiny & paper_36
attention=perfomer -> perfomer & performer_relu
attention=my_own -> there are: aft_conv & when its package is installed (docs/extend.md)
attention=performer -> mean attention=performer_relu or attention=performer_softmax or
attention=[window,hybrid] -> is a list; type one of: aft_conv & alternating
attention=former -> (did you mean attention=reformer or attention=linformer or
trainer.max_steps=1.5e0 -> trainer.max_steps=1.5e0 must be a whole number, e.g. 8
optimizer.learning_rate=0,0001 -> optimizer.learning_rate=0,0001 has a comma & write 0.0001; for
schedule.warmup_steps=1,000 -> write 1.000 or 1000; for a run with each value, add --multirun
trainer.max_steps=soon -> trainer.max_steps=soon must be a whole number, e.g. 8
model.positions=circular -> circular & rotary
trainer.max_steps -> trainer.max_steps
experiment=nothing -> nothing & trembl_performer_relu_36
objective.mask_fraction_range=[0.1] -> objective.mask_fraction_range=[0.1] & [0.1,0.5]
objective.mask_fraction_decays=true -> objective.mask_fraction_range=[0.1,0.5]
objective.mask_fraction_range=[0.1,0.5] objective.mask_fraction_decays=true -> type schedule=wsd
objective=causal objective.mask_fraction_range=[0.1,0.5] -> [0.1, 0.5] & objective=masked
schedule=wsd schedule.decay_fraction=1.5 -> schedule.decay_fraction=1.5 must be
objective.teacher=run -> used with a stage only; type objective=distillation
optimizer=muon optimizer.beta2_half_life=0 -> optimizer.beta2_half_life=0 & above 0
trainer.max_bad_steps=0 -> trainer.max_bad_steps=0
trainer.max_gradient_norm_ratio=0.5 -> trainer.max_gradient_norm_ratio=0.5
+model.new=1 -> model.new & num_layers
run_dir=??? -> run_dir has no value; type: run_dir=VALUE
attention.name=??? -> attention.name has no value; type: attention.name=VALUE
~model -> model has no value; type: model=VALUE
~attention -> attention has no value; type: attention=VALUE
run_dir=a/${SLURM_ID} -> run_dir: & double quotes & or ${oc.env:NAME}
seed=${SLURM_ID} -> seed: & double quotes & or ${oc.env:NAME}
attention=alternating attention.layers=[rfa] attention.options.rfa.x=1 -> +attention.options.rfa.x=
seed=${oc.x:1} -> seed & double quotes & or ${oc.env:NAME}
seed=${oc.env:HOME} -> seed: what it stands for is not a whole number, e.g. 8;
trainer.max_steps=[1 -> trainer.max_steps=[1 cannot be read & 'KEY="VALUE"'
data.mixture=[{dirr:a}] -> data.mixture=[{dirr:a}] must be a list of {dir, weight, split}
~trainer.max_steps -> type trainer.max_steps=VALUE
trainer.compile=maybe -> trainer.compile=maybe must be true or false
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_the_error_of_a_wrong_setting_lists_alternatives(line):
    typed, words = line.split(" -> ")
    with pytest.raises(UserError) as raised:
        compose(TrainConfig, typed.split())
    message = str(raised.value)
    assert "\n" not in message and "?;" not in message and os.environ["HOME"] not in message
    for word in words.split(" & "):
        assert word in message


def test_networks_are_a_function_of_the_seed():
    config = compose(TrainConfig, ["model=tiny", "attention=performer_softmax"])
    first, again, other = (
        build_network(config.model, config.attention, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["embedding.weight"].equal(other["embedding.weight"])
    projection = "blocks.{}.attention.mechanism.projection"
    assert not first[projection.format(0)].equal(first[projection.format(1)])
    assert not first[projection.format(0)].equal(other[projection.format(0)])


def test_a_home_folder_is_that_of_the_user(monkeypatch):
    """In every setting that is a path, but only at its start."""
    monkeypatch.setenv("HOME", "/home/me")
    mixture = "data.mixture=[{dir: ~/a, weight: 1}, {dir: 'b/~', weight: 1}]"
    paths = PATHS - {"checkpoint", "output", "data.dir"}
    typed = ["objective=distillation", "data.dir=null", mixture, "trainer.measure_every=1"]
    plain = to_plain(compose(TrainConfig, [*typed, *(f"{name}=~/x" for name in paths)]))
    for name in paths:
        section, _, key = name.partition(".")
        assert (plain[section][key] if key else plain[section]) == "/home/me/x"
    assert [part["dir"] for part in plain["data"]["mixture"]] == ["/home/me/a", "b/~"]
    assert compose(EvaluateConfig, ["checkpoint=~/r", "output=o/~/x"]).checkpoint == "/home/me/r"
    assert compose(EvaluateConfig, ["output=o/~/x"]).output == "o/~/x"
    with pytest.raises(UserError, match=r"no user absent-user; type \./~absent-user/x"):
        compose(TrainConfig, ["run_dir=~absent-user/x"])


@pytest.mark.parametrize("setting", ["data.mixture=" + "[" * 30_000, "run_dir=" + "${" * 30_000])
def test_values_that_are_nested_without_end_are_refused(setting):
    with pytest.raises(UserError, match="nested more than 32 deep"):
        compose(TrainConfig, [setting])


# The exit code, what is typed, and the words of the sentence.
WITHOUT_TORCH = """
0 train --help -> model.num_layers
2 train attention=performr -> attention=performr does not exist
2 train trainer.max_stepz=3 -> trainer.max_stepz is not a setting (did you mean trainer.max_steps?)
2 train --max-steps 5 -> --max-steps is not a flag of protlm train; settings are written key=value
3 train --config none.yaml -> none.yaml: no such file
3 train --config typo.yaml -> typo.yaml cannot be read as settings: trainer.maxsteps is not a
3 train --config tab.yaml -> tab.yaml cannot be read as settings: line 2: a tab; indent with blanks
3 train data.dir=none run_dir=new -> none has no manifest.json
2 train optimizer.learning_rate=fast -> optimizer.learning_rate=fast must be a number, e.g. 1e-3
2 train run_dir=run optimizer.learning_rate=3e-4 -> learning_rate=0.001, not 0.0003
2 train run_dir=run model=small -> model.num_layers=2, not 4
2 train run_dir=run trainer.max_steps=1 -> type a larger trainer.max_steps, above 1
2 train run_dir=run --cfg job --package trainer -> --package is not a flag of protlm train
2 embed x.fasta -m run -o o.h5 --shard 3/2 -> --shard 3/2 is not I/N
0 evaluate -h -> checkpoint
2 evaluate -m run -o -> output= has no value; type one
2 evaluate -m run split=tset -o o.json -> has no split 'tset'; it has:
"""
PROGRAM = """
import sys
from protlm.cli.main import main
for number, line in enumerate(sys.stdin):
    sys.argv = ["protlm", *line.split(" -> ")[0].split()[1:]]
    try:
        main()
    except SystemExit as end:
        print("code", int(end.code), file=sys.stderr, flush=True)
    assert not {"torch", *["numpy", "pydantic"][: 2 * (number < 4)]} & {*sys.modules}
"""


def test_names_values_and_help_need_no_torch(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "x.fasta").write_text(">P1\nMKV\n")
    (tmp_path / "typo.yaml").write_text("trainer: {maxsteps: 3}")
    (tmp_path / "tab.yaml").write_text("data:\n\tdir: x")
    lines = WITHOUT_TORCH.strip().splitlines()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(lines),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100 and "model.num_layers" in done.stdout
    told = re.findall(r"(?s)(.*?)code (\d)\n", done.stderr)
    for line, (text, code) in zip(lines, told, strict=True):
        expected, _, words = line.partition(" -> ")
        assert code == expected[0] and (code == "0" or words in text), (line, text)
