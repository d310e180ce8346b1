"""Builds models and runs from configs and checkpoints.

Names in a config or a checkpoint can only refer to modules of `protlm.attention` and
`protlm.evaluation`, and to those that installed packages add (`config/choices.py`).
"""

import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protlm.attention.layers import option_differences, stored_options
from protlm.checkpoints import description as descriptions
from protlm.checkpoints.description import ModelDescription
from protlm.config import (
    Batching,
    DataConfig,
    MixtureConfig,
    Mode,
    ModelConfig,
    Objective,
    Sampling,
    TrainConfig,
)
from protlm.config.composition import to_plain
from protlm.config.fields import as_typed
from protlm.data.batching.mixture import Mixture, integer_weights
from protlm.data.batching.plan import BatchingStrategy, RankBatches
from protlm.data.batching.strategies import Concatenation, LengthBuckets, WholeProteins
from protlm.data.masking import MaskingRule
from protlm.data.shards.data_set import SplitReader, open_clusters, open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.loading import load_model, read_model
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError, UserError

# Padded lengths of a compiled model, a graph for each.
_COMPILED_LENGTHS = 10

if TYPE_CHECKING:
    from protlm.training.datamodule import SequenceData
    from protlm.training.module import LanguageModeling


def load_initial_weights(
    network: ProteinLM, model: ModelConfig, mechanism: Mapping[str, Any], path: Path
) -> Mapping[str, str] | None:
    """Loads the weights of a trained model, whose mechanism may differ if the shapes do not.

    Returns the source of an imported or converted model.
    """
    found = read_model(path)
    _check_alphabet(f"model.init_from={path}", found.description)
    was, now = found.description.attention, mechanism["name"]
    converted = f"or give the result of: protlm checkpoint convert {path} --attention {now}"
    if differing := _architecture_differences(found.description, model, mechanism):
        name, there, here = differing[0]
        # Groups are quoted for the shell, and what the YAML file does not have is added.
        typed = " ".join(
            shlex.quote(f"{'+' * one.startswith('attention.options')}{one}={value}")
            for one, value, _ in differing
        )
        # Its weights may fit, but those of the same mechanism do.
        typed = typed if was == now else f"attention={was} {typed}"
        if differing[-1][0].startswith("attention."):
            typed += f", {converted} --set OPTION=VALUE -o FOLDER"
        raise UserError(
            f"model.init_from={path} has another architecture ({name}={there}, and that of "
            f"this run is {here}); type: {typed}"
        )
    try:
        network.load_state_dict(found.weights)
    except RuntimeError:
        raise UserError(
            f"the weights of model.init_from={path}, of attention={was}, do not fit "
            f"attention={now}; type attention={was}, {converted} -o FOLDER"
        ) from None
    return found.description.source


def _check_alphabet(given: str, described: ModelDescription) -> None:
    """Refuses what shards of proteins, whose rows have `<cls>` and `<eos>`, do not fit."""
    if described.vocabulary != VOCABULARY.hash:
        raise UserError(
            f"{given} has another alphabet or other tokens around the residues than shards, which "
            "have those of ESM-2; train it on labels: protlm finetune"
        )


def _architecture_differences(
    found: ModelDescription, model: ModelConfig, mechanism: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    differing = descriptions.differences(found.model, model)
    settings = [(f"model.{name}", there, here) for name, there, here in differing]
    asked = dict(mechanism)
    if asked.pop("name") == found.attention:
        options = option_differences(found.attention, found.attention_options, asked)
        for name, *values in options:
            there, here = map(as_typed, values)
            settings.append((f"attention.{name}", there, here))
    return settings


def describe(config: TrainConfig) -> ModelDescription:
    """Returns the description of a run's model, which is saved in every checkpoint."""
    options = dict(to_plain(config)["attention"])
    name = options.pop("name")
    return ModelDescription(
        vocabulary=VOCABULARY.hash,
        objective=config.objective.name,
        model=config.model,
        attention=name,
        attention_options=stored_options(name, options),
        seed=config.seed,
        max_length=config.data.max_length,
    )


def build_module(network: ProteinLM, config: TrainConfig) -> "LanguageModeling":
    """Returns the LightningModule of a run."""
    from protlm.training.distillation import STAGES, Distillation
    from protlm.training.module import LanguageModeling
    from protlm.training.optimization import with_half_life

    if network.head is None:
        raise UserError(
            "model.head=none, of an imported encoder, predicts nothing; type model.head=linear"
        )
    stage, teacher, trainer = config.objective.stage, config.objective.teacher, config.trainer
    module = (LanguageModeling if stage is None else STAGES[stage])(
        network,
        description=describe(config),
        causal=config.objective.name is Objective.causal,
        optimizer=with_half_life(config.optimizer, tokens_per_step=tokens_of_step(config)),
        schedule=config.schedule,
        max_steps=trainer.max_steps,
        seed=config.seed,
    )
    if isinstance(module, Distillation):
        if teacher is None:
            raise UserError(
                f"objective.stage={stage} needs a trained model to imitate; type "
                "objective.teacher=MODEL"
            )
        module.learn_from(_teacher(teacher), config)
    return module


def tokens_of_step(config: TrainConfig) -> int:
    """Returns the size of an optimizer step, with padding."""
    trainer = config.trainer
    return trainer.tokens_per_step or trainer.accumulate_grad_batches * config.data.tokens_per_batch


def _teacher(path: str) -> PretrainedModel:
    try:
        teacher = load_model(Path(path))
    except InputDataError as error:
        raise InputDataError(f"objective.teacher={path} cannot be used: {error}") from error
    _check_alphabet(f"objective.teacher={path}", teacher.description)
    return teacher


def open_data(config: DataConfig) -> tuple[Mixture, SplitReader]:
    """Opens the data sets of training, and the validation split."""
    verify = config.verify
    parts = config.mixture
    if config.dir is not None:
        parts = [MixtureConfig(config.dir, weight=1, split=config.train_split)]
    if not parts:
        raise UserError(
            "neither data.dir nor data.mixture has a value; type: data.dir=DIR, or for instance "
            "'data.mixture=[{dir: DIR, weight: 1}, {dir: DIR, weight: 3}]'"
        )
    shares = integer_weights([part.weight for part in parts])
    clusters = None
    # Before the shards are hashed, which takes long.
    if config.sampling is Sampling.cluster:
        clusters = [open_clusters(Path(p.dir), p.split, verify=verify) for p in parts]
    splits = [open_split(Path(p.dir), p.split, verify=verify, shuffled=True) for p in parts]
    valid_dir = config.valid_dir or parts[0].dir
    _warn_of_other_rules([part.dir for part in parts], valid_dir)
    valid = open_split(Path(valid_dir), config.valid_split, verify=verify)
    return Mixture(splits, shares, clusters), valid


def _warn_of_other_rules(directories: Sequence[str], valid_dir: str) -> None:
    """Warns of data sets of which one may train on sequences that another one holds out."""
    first, *others = directories
    rule = read_manifest(Path(first)).split_rule
    given = [("data.mixture", other) for other in others]
    if valid_dir not in directories:
        given.append(("data.valid_dir", valid_dir))
    for setting, directory in given:
        if read_manifest(Path(directory)).split_rule != rule:
            warnings.warn(
                f"{setting}: {directory} was split by another rule than {first}, so that one may "
                "train on sequences that the other one holds out; prepare both with the same "
                "fractions, and with one --cluster-table or none",
                stacklevel=2,
            )


def batching_strategy(
    config: DataConfig, *, tokens_per_step: int | None = None
) -> BatchingStrategy:
    """Returns the batching of training; with `tokens_per_step`, a batch is an optimizer step."""
    size = (tokens_per_step or config.tokens_per_batch, config.max_length)
    if config.mode is Mode.concatenated:
        return Concatenation(*size)
    if config.batching is Batching.packed:
        return WholeProteins(*size, crop=config.crop, row=config.tokens_per_row)
    return LengthBuckets(*size, crop=config.crop)


def build_data(train: Mixture, valid: SplitReader, config: TrainConfig) -> "SequenceData":
    """Returns the LightningDataModule of a run."""
    from protlm.training.datamodule import SequenceData

    trainer = config.trainer
    rule = batching_strategy(config.data, tokens_per_step=trainer.tokens_per_step)
    if trainer.compile and type(rule) is LengthBuckets:
        rule = replace(rule, even=_COMPILED_LENGTHS)
    # The size of a step does not depend on the size of a micro-batch, which has whole rows.
    longest = rule.longest_row
    size = config.data.tokens_per_batch
    if longest > max(size, rule.max_length):
        raise UserError(
            f"rows of data.tokens_per_row={longest} do not fit into data.tokens_per_batch={size}; "
            f"type data.tokens_per_row={size}"
        )
    rows = max((trainer.tokens_per_step or 1) // longest, 1)
    micro_batches = -(-rows // max(config.data.tokens_per_batch // longest, 1))
    return SequenceData(
        train,
        valid,
        rule=rule,
        config=config.data,
        masking=masking_rule(config),
        seed=config.seed,
        share=RankBatches(
            micro_batches=micro_batches,
            fill=trainer.compile,
            batches_per_step=trainer.accumulate_grad_batches,
        ),
    )


def masking_rule(config: TrainConfig) -> MaskingRule | None:
    """Returns the masking of training, or None for the causal objective."""
    from protlm.training.schedule import decay_steps

    objective, max_steps = config.objective, config.trainer.max_steps
    if objective.name is Objective.causal:
        return None
    bounds = objective.mask_fraction_range
    decay = decay_steps(config.schedule, max_steps=max_steps)
    return MaskingRule(
        mask_fraction=objective.mask_fraction,
        mask_prob=objective.mask_prob,
        random_prob=objective.random_prob,
        mask_fraction_range=None if bounds is None else (bounds[0], bounds[1]),
        narrowing=(max_steps - decay, max_steps) if objective.mask_fraction_decays else None,
    )
