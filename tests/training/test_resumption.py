"""Runs continue after a kill as if nothing had happened, or start from the weights of a model."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm.build import describe, load_initial_weights
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import Activation, NormOrder, Positions, TrainConfig
from protlm.config.composition import compose
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import UserError
from tests.fixtures.data_sets import prepare_tiny
from tests.fixtures.ranks import assert_same_run
from tests.fixtures.runs import saved
from tests.interop.families import ESM
from tests.marks import slow_but

JOINED = "data.mode=concatenated data.tokens_per_batch=512"
MIXTURE = (
    "data.dir=null "
    "data.mixture=[{{dir:{tiny_data},weight:2}},{{dir:{other_data},weight:1,split:test}}]"
)
CLUSTERS = "data.sampling=cluster data.dir={tiny_clusters}"
FAMILIES = (
    "data.batching=relatives data.dir={tiny_clusters} data.tokens_per_row=512 data.max_length=512"
)
HEADS = (
    "model.relatives_heads=1 optimizer.only_relatives=true model.init_from={swapped} "
    "attention=hedgehog"
)
TAUGHT = (
    "objective=distillation attention=hedgehog objective.teacher={teacher} "
    "model.init_from={swapped} model.dropout=0.1 trainer.max_steps=6"
)
LOGITS = f"{TAUGHT} objective.stage=logits optimizer.learning_rate=5e-3"
DECAYING = (
    "objective.mask_fraction_range=[0.1,0.6] objective.mask_fraction_decays=true schedule=wsd "
    "schedule.decay_fraction=0.5 trainer.accumulate_grad_batches=2 trainer.valid_every=9 "
    "data.crop=random trainer.max_steps=8"
)
# The settings, and the step after which the run is killed. Names in braces are fixtures.
RUNS = {
    "packed": ("data.batching=packed data.tokens_per_row=300 data.crop=random", 3),
    "packed, clusters": (
        f"{CLUSTERS} data.batching=packed data.tokens_per_row=256 "
        "attention=hybrid objective=causal trainer.max_steps=12",
        8,
    ),
    "mixture": (f"data.crop=random {MIXTURE} trainer.max_steps=8", 5),
    "clusters, joined": (f"{CLUSTERS} {JOINED} trainer.max_steps=8", 5),
    "clusters, over epochs": (f"{CLUSTERS} data.crop=random trainer.max_steps=12", 8),
    "muon, causal": (f"optimizer=muon objective=causal {JOINED} trainer.max_steps=8", 5),
    "redrawn features": (
        "attention=rfa trainer.tokens_per_step=2048 model.dropout=0.1 trainer.max_steps=6",
        3,
    ),
    "average": ("trainer.ema_decay=0.5 trainer.valid_every=2", 3),
    "estimates": (
        "attention=performer_softmax model.qk_norm=true model.dropout=0.1 trainer.max_steps=6 "
        "trainer.accumulate_grad_batches=2",
        3,
    ),
    "taught attention": (f"{TAUGHT} optimizer.learning_rate=1e-2", 3),
    "taught logits": (LOGITS, 3),
    "taught adapters": (f"{LOGITS} objective.lora_rank=2", 3),
    "relatives": (f"{FAMILIES} trainer.accumulate_grad_batches=2", 3),
    "heads of relatives": (f"{FAMILIES} {HEADS} trainer.max_steps=12", 8),
    # Killed in the decay, for which a worker has prepared batches.
    "mask fractions": (f"{DECAYING} data.num_workers=1", 5),
}


def filled(text: str, request: pytest.FixtureRequest) -> list[str]:
    """The settings, with fixtures for their names in braces."""
    named = {name: request.getfixturevalue(name) for name in re.findall(r"(?<!{){(\w+)}", text)}
    return text.format(**named).split()


@pytest.mark.parametrize("name", slow_but(RUNS, "average", "packed"))
def test_a_killed_run_is_continued_exactly(name, train, killed_after, request, tmp_path):
    """Everything in all checkpoints and in the log is that of an undisturbed run."""
    text, kill = RUNS[name]
    settings = filled(text, request)
    settings += ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=100"]
    # Without workers, whose number changes nothing.
    plain = [setting for setting in settings if not setting.startswith("data.num_workers")]
    whole, run = train("whole", *plain), tmp_path / "run"
    with killed_after(kill):
        train(run, *settings)
    train(run, *settings)
    assert_same_run(run, whole)
    assert (saved(run)["SequenceData"]["tokens"] > 0) == ("concatenated" in text)


@pytest.mark.slow
def test_settings_that_are_newer_than_a_run_have_their_defaults(train):
    run = train("run", "trainer.max_steps=2")
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    newer = ("token_dropout:", "decay: none")
    older = [line for line in lines if not line.strip().startswith(newer)]
    assert len(older) == len(lines) - 2
    config.write_text("".join(older))
    train(run, "attention=performer_relu", "trainer.max_steps=3")
    with pytest.raises(UserError, match=r"a run with model\.token_dropout=false, not true; to"):
        train(run, "model.token_dropout=true", "trainer.max_steps=4")


CHANGED = "model.token_dropout=false, not true; model.dropout=0.0, not 0.1; seed=0, not 7; to"
OTHER_DATA = "the run was trained on other data"
# Settings of a run of four steps, those of a later command, and words of its message. A complete
# run is also compared with the data that it was trained on.
LATER = [
    ("", "data.mode=concatenated", "data.mode"),
    ("", "data.max_length=64", "data.max_length"),
    ("", "data.batching=packed", "data.batching=padded, not packed"),
    (FAMILIES, f"{FAMILIES} data.relatives_last=0", "data.relatives_last=0.25, not 0.0"),
    # Which rows are in a batch depends on the padded lengths.
    ("", "trainer.compile=true", "trainer.compile=false, not true"),
    ("", "objective.mask_fraction_range=[0.1,0.5]", "objective.mask_fraction_range"),
    ("", "trainer.tokens_per_step=4096", "trainer.tokens_per_step"),
    ("", "seed=7 model.token_dropout=true model.dropout=0.1", CHANGED),
    ("", "data.dir={tiny_clusters}", "{tiny_clusters}: " + OTHER_DATA),
    ("", "data.dir={tiny_clusters} trainer.max_steps=4", "{tiny_clusters}: " + OTHER_DATA),
    (CLUSTERS, "data.dir={tiny_clusters}", "data.sampling=cluster, not uniform"),
    ("data.dir={tiny_clusters}", CLUSTERS, "data.sampling=uniform, not cluster"),
    (CLUSTERS, "data.sampling=cluster", "{tiny_data} was prepared without clusters"),
    # The same sequences in other clusters: the position in the data would be another.
    (CLUSTERS, "data.sampling=cluster data.dir={other_clusters}", OTHER_DATA),
    (MIXTURE, MIXTURE.replace("weight:2", "weight:1"), "data.mixture: " + OTHER_DATA),
    (MIXTURE, "data.dir=null data.mixture=[{{dir:{other_data},weight:1}}]", OTHER_DATA),
]


@pytest.fixture(scope="session")
def other_clusters(tiny_fasta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data, in other clusters."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "others.tsv").write_text("A\tA\n")
    return prepare_tiny(tiny_fasta, folder / "others", folder / "others.tsv")


@pytest.mark.parametrize(("first", "later", "words"), slow_but(LATER, LATER[5], LATER[6]))
def test_a_run_is_not_continued_with_another_recipe_or_other_data(
    first, later, words, train, tiny_run, request, tmp_path
):
    run = tmp_path / "run"
    if first:
        train(run, *filled(first, request))
    else:
        shutil.copytree(tiny_run, run)
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError) as raised:
        train(run, "trainer.max_steps=5", *filled(later, request))
    assert " ".join(filled(words, request)) in str(raised.value)
    assert (run / "config.yaml").read_bytes() == before


REFUSED = [
    ("data.dir=null", "neither data.dir nor data.mixture"),
    ("data.mixture=[{dir:x,weight:1}]", "data.dir=null"),
    ("data.dir=null data.mixture=[{dir:x,weight:0}]", "weight=0.0 must be above 0"),
    ("data.dir=null data.mixture=[{dir:x}]", "weight"),
    ("data.dir=null data.mixture=[{dir:x,wieght:1}]", "data.mixture=[{dir:x,wieght"),
    ("data.mode=joined", "concatenated"),
    ("data.sampling=clusters", "must be one of: cluster, uniform"),
    ("data.sampling=cluster", "prepare it again with the option cluster"),
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
    settings, words, train, tmp_path
):
    with pytest.raises(UserError) as raised:
        train("run", *settings.split())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def initialized(
    described: ModelDescription, path: Path, attention: str | None = None, **model: Any
) -> dict[str, torch.Tensor]:
    """The weights of a new network, with other settings if given, that starts from a model."""
    config = replace(described.model, **model)
    options = described.attention_config if attention is None else {"name": attention}
    network = build_network(config, options, seed=7)
    load_initial_weights(network, config, options, path)
    return network.state_dict()


@pytest.fixture
def esm(tmp_path: Path) -> Path:
    """An ESM-2 with the frequencies of the formula."""
    return ESM.save(tmp_path / "esm", {n: v for n, v in ESM.tensors().items() if "inv_" not in n})


@pytest.mark.parametrize("foreign", [True, False])
def test_the_weights_are_those_of_the_model(foreign, tiny_run, esm):
    """Settings of training and of the use of memory may differ, and those without effect."""
    path = esm if foreign else tiny_run
    model = protlm.load(path)
    others: dict[str, Any] = {"dropout": 0.1, "feedforward_chunk": 8}
    others |= {"max_length": 64, "norm_epsilon": None} if foreign else {}
    found = initialized(model.description, path, **others)
    expected = model.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_init_from_is_not_part_of_the_architecture(tiny_run):
    asked = compose(TrainConfig, ["model=tiny", "run_dir=run", f"model.init_from={tiny_run}"])
    assert "init_from" not in describe(asked).to_plain()["model"]


@pytest.mark.parametrize(
    "source, changes, message",
    [
        ("tiny_run", {"model_dim": 32}, r"another architecture .*model_dim="),
        ("tiny_run", {"model_dim": 32}, r"type: attention=performer_relu model\.model_dim=64$"),
        ("tiny_run", {}, r"type attention=performer_relu, or .* convert .* --attention softmax "),
        ("esm", {"activation": Activation.relu}, r"\(model.activation=gelu, .* this run is relu\)"),
        ("esm", {"token_dropout": False}, r"\(model.token_dropout=true, .* this run is false\)"),
        ("esm", {"norm_epsilon": 1e-3}, r"\(model.norm_epsilon=1e-05, .* this run is 0.001\)"),
        ("esm", {"norm_order": NormOrder.post}, r"\(model.norm_order=pre, .* this run is post\)"),
        ("esm", {"positions": Positions.sinusoidal}, r"\(model.positions=rotary, .* is sinusoidal"),
    ],
)
def test_settings_and_the_attention_that_fit_are_named(source, changes, message, request):
    path = request.getfixturevalue(source)
    attention = "softmax" if source == "tiny_run" else None
    with pytest.raises(UserError, match=message) as raised:
        initialized(protlm.load(path).description, path, attention, **changes)
    assert source == "tiny_run" or f"; type: model.{next(iter(changes))}=" in str(raised.value)


def test_options_of_the_same_attention_are_compared(tmp_path):
    asked = ["model=tiny", "run_dir=run", "attention=performer_softmax", "attention.num_features=8"]
    own = describe(compose(TrainConfig, asked))
    for stored in ("redraw_every=null", "backend=torch"):
        other = compose(TrainConfig, [*asked, f"attention.{stored}"])
        weights = build_network(other.model, other.attention, seed=0).state_dict()
        export(Checkpoint(tmp_path, describe(other), weights), tmp_path / stored)
    # The backend may be another.
    initialized(own, tmp_path / "backend=torch")
    message = r"\(attention.redraw_every=null, .* is 1000\); type: attention.red"
    with pytest.raises(UserError, match=message):
        initialized(own, tmp_path / "redraw_every=null")


def test_what_to_type_for_options_within_options_can_be_typed(tmp_path):
    asked = ["model=tiny", "run_dir=run", "attention=hybrid"]
    made = compose(TrainConfig, [*asked, "attention.window=8", "+attention.options.decay=learned"])
    weights = build_network(made.model, made.attention, seed=0).state_dict()
    export(Checkpoint(tmp_path, describe(made), weights), tmp_path / "hybrid")
    with pytest.raises(UserError) as error:
        initialized(describe(compose(TrainConfig, asked)), tmp_path / "hybrid")
    typed = shlex.split(str(error.value).partition("; type: ")[2].partition(", or give")[0])
    assert describe(compose(TrainConfig, [*asked, *typed])) == describe(made)


def test_a_model_of_single_proteins_starts_to_see_relatives_but_not_the_reverse(tmp_path):
    of_rows = ["data.batching=relatives", "model.relatives=full", "model.relatives_numbers=40"]
    typed = {
        "alone": [],
        "related": ["attention.relatives_window=8", "model.relatives_sum=apart", *of_rows],
        "heads": ["model.relatives_heads=2", *of_rows[:2], "seed=1"],
    }
    made, both = dict[str, TrainConfig](), dict[str, ProteinLM]()
    for name, settings in typed.items():
        asked = ["model=tiny", "run_dir=run", "attention=hybrid", *settings]
        config = made[name] = compose(TrainConfig, asked)
        both[name] = build_network(config.model, config.attention, seed=config.seed)
        weights = both[name].state_dict()
        export(Checkpoint(tmp_path, describe(config), weights), tmp_path / name)

    def start(name: str, other: str) -> dict[str, Tensor]:
        config = made[name]
        load_initial_weights(both[name], config.model, config.attention, tmp_path / other)
        return both[name].state_dict()

    assert not start("related", "alone")["family_numbers"].any()
    with pytest.raises(UserError, match=r"was trained with relatives.* data\.batching=relatives"):
        start("alone", "related")
    # Heads of relatives are beside a model of single proteins, which is one without them.
    alone, heads = start("alone", "heads"), start("heads", "heads")
    assert alone and all(torch.equal(heads[name], x) for name, x in alone.items())
    # Where they alone are trained, they are new, and may be others.
    fresh = build_network(made["heads"].model, made["heads"].attention, seed=7)
    first = {name: x.clone() for name, x in fresh.state_dict().items()}
    described = made["heads"].model, made["heads"].attention, tmp_path / "heads"
    load_initial_weights(fresh, *described, new_heads=True)
    own = {name: alone.get(name, first[name]) for name in first}
    assert all(torch.equal(own[name], x) for name, x in fresh.state_dict().items())
    with pytest.raises(UserError, match=r"type: .* model\.relatives_heads=2 "):
        start("related", "heads")


@pytest.mark.slow
def test_heads_of_relatives_are_trained_and_the_rest_stays(train, tiny_clusters):
    of_both = f"attention=rfa attention.redraw_every=1 data.dir={tiny_clusters}"
    first = train("first", *of_both.split(), "trainer.max_steps=2")
    asked = f"{FAMILIES} model.relatives_heads=1 optimizer.only_relatives=true"
    asked = asked.format(tiny_clusters=tiny_clusters).split()
    asked += [*of_both.split(), f"model.init_from={first}", "seed=5", "trainer.max_steps=10"]
    before, after = (
        protlm.load(one).network.state_dict() for one in (first, train("second", *asked))
    )
    # Also the draws of random features.
    assert all(torch.equal(after[name], x) for name, x in before.items())
    changed = [name for name, x in after.items() if name.endswith("output.weight") and x.any()]
    assert len(changed) == 2 * len([name for name in before if name.endswith("output.weight")])


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_resumes_without_them(train, tmp_path):
    def history(run: Path) -> list[list[str]]:
        return [row.split("\t") for row in (run / "history.tsv").read_text().splitlines()]

    first = train("first", "trainer.max_steps=2")
    asked = [f"model.init_from={first}", "schedule.warmup_steps=0", "seed=5"]
    second = train("second", *asked, "trainer.max_steps=2")
    assert history(second)[1][3] == history(first)[-1][3]
    # The run no longer needs the initial model.
    first.rename(tmp_path / "elsewhere")
    train(second, *asked, "trainer.max_steps=4")
    assert history(second)[-2][1:3] == ["start", "2"]
