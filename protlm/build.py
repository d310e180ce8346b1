"""From configs and checkpoints to objects: the only place where settings become a model or a run.

Names in a config or a checkpoint reach modules of `protlm.attention` and `protlm.evaluation` and
nothing else.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from protlm.attention import Attention, create
from protlm.attention.base import SharesParameters
from protlm.config import (
    DataConfig,
    EvaluateConfig,
    MixtureConfig,
    Mode,
    ModelConfig,
    Objective,
    TrainConfig,
)
from protlm.data.batching import BatchRule, Share
from protlm.data.buckets import LengthBuckets
from protlm.data.concatenation import Concatenation
from protlm.data.curriculum import Curriculum
from protlm.data.manifest import read_manifest
from protlm.data.mixture import Mixture, turns_of
from protlm.data.shards import SplitReader, open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError, one_of
from protlm.evaluation.base import Evaluation
from protlm.model import checkpoint as checkpoints
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM
from protlm.paths import conf_dir

if TYPE_CHECKING:
    from protlm.training.datamodule import SequenceData
    from protlm.training.module import LanguageModeling

HYDRA_FLAGS = ("--help", "--cfg", "--resolve", "--package", "--info", "--multirun", "-m")
Config = TypeVar("Config", TrainConfig, EvaluateConfig)


def register_schemas() -> None:
    """Tells Hydra the schemas that `conf/train.yaml` and `conf/evaluate.yaml` start from."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="evaluate_schema", node=EvaluateConfig)


def compose(schema: type[Config], overrides: Sequence[str]) -> Config:
    """Composes `conf/train.yaml` or `conf/evaluate.yaml` with overrides such as `model=tiny`.

    Raises:
        UserError: an unknown key or choice, a wrong type, a required value that is missing; the
            message names the alternatives.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register_schemas()
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override} is no setting; settings are written key=value")
        if unknown := _unknown_key(_key(override), schema):
            raise UserError(unknown)
    name = "train" if schema is TrainConfig else "evaluate"
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            config = hydra_compose(name, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_explain(error, overrides)) from error
    return to_schema(config, schema)


def through_hydra(
    schema: type[Config], arguments: Sequence[str], action: Callable[[Config], object]
) -> None:
    """Hands Hydra's own flags to Hydra: --help, --cfg, --info, --multirun."""
    import hydra
    from omegaconf import DictConfig

    register_schemas()
    name = "train" if schema is TrainConfig else "evaluate"
    flags = [argument for argument in arguments if argument.startswith("-")]
    if unknown := [flag for flag in flags if flag not in HYDRA_FLAGS]:
        raise UserError(
            f"{unknown[0]} is no flag of protlm {name}; settings are written key=value, and the "
            f"flags are: {', '.join(HYDRA_FLAGS)}"
        )

    @hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")
    def run(config: DictConfig) -> None:
        action(to_schema(config, schema))

    sys.argv[1:] = arguments
    # Errors come to us, to be told in one sentence.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    run()


def to_schema(config: Any, schema: type[Config]) -> Config:
    """Turns a composed config into its dataclass; every required value must be there."""
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise UserError(f"{missing[0]} has no value; type: {missing[0]}=VALUE")
    built = OmegaConf.to_object(config)
    assert isinstance(built, schema)
    return built


def to_plain(config: TrainConfig | EvaluateConfig) -> dict[str, Any]:
    """A config as plain containers and values, as it stands in a run's `config.yaml`."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _key(override: str) -> str:
    """The dotted setting that an override such as `+model.dropout=0` is about."""
    return re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0].replace("/", ".")


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence about a failed composition; Hydra's own message lists the choices there are."""
    text = " ".join(str(error.__cause__ or error).split())
    text = re.sub(r"\s*(full_key|object_type|reference_type)[=:].*", "", text)
    text = re.sub(r"^In '[^']*': |\s*Config search path:.*", "", text)
    named = _full_key(error)
    causes = [o for o in overrides if _key(o).split(".")[-1] == named]
    # A key of one of a list's elements stands in the value.
    causes = causes or [o for o in overrides if named and named in o]
    if causes and "is not in struct" in text:
        return _not_there(_key(causes[0]), getattr(error.__cause__, "parent_node", None))
    return f"{causes[0]}: {text}" if causes else text


def _not_there(key: str, group: Any) -> str:
    """One sentence about a key that the choice made for its group does not have."""
    *where, last = key.split(".")
    there = [str(name) for name in group or () if name != "name"]
    close = difflib.get_close_matches(last, there, n=1)
    hint = f"; did you mean {'.'.join([*where, close[0]])}?" if close else ""
    choice = ".".join(where)
    if group and "name" in group:
        choice = f"{choice}={group['name']}"
    known = f"; {choice} has: {one_of(there)}" if there else f"; {choice} has no settings"
    if key.startswith("attention.options."):
        hint += f"; +{key}=VALUE adds one to those of the inner mechanism"
    return f"{key} is not a setting{hint}{known}"


def _full_key(error: BaseException) -> str:
    found = re.search(r"full_key: (\S+)", f"{error} {error.__cause__}")
    return re.sub(r"\[\d+\]", "", found.group(1)).split(".")[-1] if found else ""


def _unknown_key(key: str, schema: type) -> str | None:
    """Walks a dotted key down the schema; says where it leaves it."""
    import dataclasses

    here: Any = schema
    walked: list[str] = []
    for part in key.split("."):
        if not dataclasses.is_dataclass(here):
            return None
        fields = {f.name: f.type for f in dataclasses.fields(here)}
        if part not in fields and not (not walked and part in ("experiment", "hydra")):
            close = difflib.get_close_matches(part, fields, n=1)
            hint = f"; did you mean {'.'.join([*walked, close[0]])}?" if close else ""
            where = ".".join(walked) or "the config"
            return f"{key} is not a setting{hint}; {where} has: {one_of(list(fields))}"
        here = fields.get(part)
        walked.append(part)
    return None


def build_network(model: ModelConfig, attention: dict[str, Any], *, seed: int) -> ProteinLM:
    """A network with fresh weights, a pure function of the config and the seed.

    Raises:
        UserError: settings that do not exist or do not fit each other.
    """
    options = dict(attention)
    name = str(options.pop("name", ""))
    layers: list[Attention] = []

    def mechanism(layer: int) -> Attention:
        made = create(
            name,
            options,
            num_heads=model.num_heads,
            head_dim=model.model_dim // model.num_heads,
            model_dim=model.model_dim,
            max_length=model.max_length,
            seed=_layer_seed(seed, layer),
        )
        layers.append(made)
        if layer > 0 and isinstance(made, SharesParameters):
            made.share_with(layers[0])
        return made

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ProteinLM(model, vocab_size=len(VOCABULARY), pad=VOCABULARY.pad, mechanism=mechanism)


def _layer_seed(seed: int, layer: int) -> int:
    # Layers draw different projections; the stride keeps neighbouring seeds apart.
    return seed * 100_003 + layer


def describe(config: TrainConfig) -> dict[str, Any]:
    """Plain values that rebuild the model of a run; they stand in every checkpoint."""
    plain = to_plain(config)
    return {
        "format": checkpoints.FORMAT,
        "vocabulary": VOCABULARY.hash,
        "objective": config.objective.name.value,
        "model": plain["model"],
        "attention": plain["attention"],
        "seed": config.seed,
        "max_length": config.data.max_length,
    }


def build_module(network: ProteinLM, config: TrainConfig) -> "LanguageModeling":
    """The LightningModule of a run."""
    from protlm.training.module import LanguageModeling

    return LanguageModeling(
        network,
        description=describe(config),
        causal=config.objective.name is Objective.causal,
        optimizer=config.optimizer,
        schedule=config.schedule,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
    )


def open_data(config: DataConfig) -> tuple[Mixture, SplitReader]:
    """Opens the data sets of training, and the split of validation.

    Raises:
        UserError: no such split, or weights that cannot be.
        InputDataError: no shards, or damaged ones.
    """
    verify = config.verify.value
    parts = config.mixture
    if config.dir is not None:
        parts = [MixtureConfig(config.dir, weight=1, split=config.train_split)]
    if not parts:
        raise UserError(
            "neither data.dir nor data.mixture has a value; type: data.dir=DIR, or for instance "
            "'data.mixture=[{dir: DIR, weight: 1}, {dir: DIR, weight: 3}]'"
        )
    shares = turns_of([part.weight for part in parts])
    splits = [open_split(Path(p.dir), p.split, verify=verify, shuffled=True) for p in parts]
    _warn_of_other_rules([part.dir for part in parts])
    valid_dir = Path(config.valid_dir or parts[0].dir)
    return Mixture(splits, shares), open_split(valid_dir, config.valid_split, verify=verify)


def _warn_of_other_rules(directories: Sequence[str]) -> None:
    """Says which data sets of a mixture may train on what another one holds out."""
    first = read_manifest(Path(directories[0])).split_rule
    for directory in directories[1:]:
        if read_manifest(Path(directory)).split_rule != first:
            warnings.warn(
                f"data.mixture: {directory} was split by another rule than {directories[0]}, and "
                "may train on what that holds out; prepare both with the same options",
                stacklevel=2,
            )


def batch_rule(config: DataConfig, *, tokens_per_step: int | None = None) -> BatchRule:
    """How the samples of training become batches; a batch is a step where steps have a size.

    Raises:
        UserError: a setting that cannot be.
    """
    curriculum = Curriculum(config.curriculum)
    size = (tokens_per_step or config.tokens_per_batch, config.max_length)
    if config.mode is Mode.concatenated:
        return Concatenation(*size, curriculum=curriculum)
    return LengthBuckets(*size, curriculum=curriculum, crop=config.crop.value)


def build_data(train: Mixture, valid: SplitReader, config: TrainConfig) -> "SequenceData":
    """The LightningDataModule of a run."""
    from protlm.training.datamodule import SequenceData

    trainer = config.trainer
    # A step has one size whatever fits into the devices at a time.
    parts = -(-(trainer.tokens_per_step or 1) // config.data.tokens_per_batch)
    return SequenceData(
        train,
        valid,
        rule=batch_rule(config.data, tokens_per_step=trainer.tokens_per_step),
        config=config.data,
        objective=config.objective,
        seed=config.seed,
        share=Share(parts=parts, fill=trainer.compile),
    )


def load_model(path: Path, *, device: str = "cpu") -> PretrainedModel:
    """Loads a model from a run folder, a checkpoint, or an exported folder.

    Raises:
        InputDataError: there is none, it is damaged, or its vocabulary is another.
    """
    found = checkpoints.read(path)
    if found.description["vocabulary"] != VOCABULARY.hash:
        raise InputDataError(f"{found.path} was trained with another vocabulary than protlm's")
    network = _rebuild(found.description, found.description["seed"])
    try:
        network.load_state_dict(found.weights)
    except RuntimeError as error:
        reason = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
        raise InputDataError(f"{found.path} does not fit its own description: {reason}") from None

    def rebuild(seed: int) -> ProteinLM:
        return _rebuild(found.description, seed)

    return PretrainedModel(network, found.description, rebuild=rebuild).to(pick_device(device))


def _rebuild(description: dict[str, Any], seed: int) -> ProteinLM:
    try:
        schema = OmegaConf.merge(OmegaConf.structured(ModelConfig), description["model"])
    except OmegaConfBaseException as error:
        reason = str(error).split("\n", 1)[0]
        raise InputDataError(f"the model's description has a wrong setting: {reason}") from error
    model = OmegaConf.to_object(schema)
    assert isinstance(model, ModelConfig)
    return build_network(model, description["attention"], seed=seed)


def pick_device(name: str) -> torch.device:
    """The device a person named, or with `auto` the best there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", 1)[0][:80]
        raise UserError(
            f"--device {name} cannot be used ({reason}); use auto, cpu or cuda"
        ) from None
    return device


def build_evaluation(label: str, settings: dict[str, Any]) -> Evaluation:
    """An evaluation from its settings: `name` is a module of `protlm.evaluation`.

    Raises:
        UserError: no such evaluation, or a setting it does not have.
    """
    options = dict(settings)
    name = str(options.pop("name", ""))
    cls = _evaluation_class(name)
    allowed = list(inspect.signature(cls).parameters)
    if unknown := sorted(set(options) - set(allowed)):
        raise UserError(
            f"evaluation.{label}.{unknown[0]} is not a setting; it has: {one_of(allowed)}"
        )
    factory: Callable[..., Evaluation] = cls
    return factory(**options)


def _evaluation_class(name: str) -> type[Evaluation]:
    known = ("accuracy", "contacts")
    if name not in known:
        raise UserError(f"evaluation {name!r} does not exist; there are: {one_of(list(known))}")
    module = importlib.import_module(f"protlm.evaluation.{name}")
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Evaluation) and member.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define exactly one Evaluation"
    return found[0]
