"""Builds models and runs from configs and checkpoints.

Names in a config or a checkpoint can only refer to modules of `protlm.attention` and
`protlm.evaluation`, and to those that installed packages add (`config/choices.py`).
"""

import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protlm.attention import Attention, mechanism, names
from protlm.attention.layers import option_differences, stored_options, unable
from protlm.checkpoints import description as descriptions
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint, all_checkpoints
from protlm.config import Batching, DataConfig, MixtureConfig, ModelConfig, Sampling, TrainConfig
from protlm.config.composition import to_plain
from protlm.config.fields import as_typed
from protlm.data.batching.contexts import Contexts
from protlm.data.batching.mixture import Mixture, integer_weights
from protlm.data.batching.plan import BatchingStrategy
from protlm.data.batching.relatives import Families, WholeFamilies
from protlm.data.shards.data_set import SplitReader, open_clusters, open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.loading import load_model, read_model
from protlm.model.pretrained import PretrainedModel
from protlm.model.selfattention import HEADS_OF_RELATIVES
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import InputDataError, UserError, one_of
from protlm.training.datamodule import SequenceData
from protlm.training.distillation import STAGES, Distillation
from protlm.training.module import LanguageModeling
from protlm.training.optimization import with_half_life
from protlm.training.run_plan import RunPlan


def load_initial_weights(
    network: ProteinLM,
    model: ModelConfig,
    mechanism: Mapping[str, Any],
    path: Path,
    *,
    new_heads: bool = False,
) -> Mapping[str, str] | None:
    """Loads the weights of a trained model, whose mechanism may differ if the shapes do not.

    With `new_heads`, heads of relatives are those of the network. Returns the source of an imported
    or converted model.
    """
    found = read_model(path)
    if found.description.model.relatives_heads and (new_heads or model.relatives is None):
        found = _without_heads_of_relatives(found)
    _check_alphabet(f"model.init_from={path}", found.description)
    was, now = found.description.attention, mechanism["name"]
    converted = f"or give the result of: protlm checkpoint convert {path} --attention {now}"
    if model.relatives is None and found.description.model.relatives is not None:
        raise UserError(
            f"model.init_from={path} was trained with relatives, and predicts little without them; "
            "type data.batching=relatives (data.relatives_alone=1 and data.relatives_last=0 show "
            "it proteins alone)"
        )
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
    # What sees relatives is new in a model of single proteins, and is 0 at first.
    new = (".relatives_factor", HEADS_OF_RELATIVES, "family_numbers")
    first = {k: x for k, x in network.state_dict().items() if any(one in k for one in new)}
    try:
        network.load_state_dict({**first, **found.weights})
    except RuntimeError:
        raise UserError(
            f"the weights of model.init_from={path}, of attention={was}, do not fit "
            f"attention={now}; type attention={was}, {converted} -o FOLDER"
        ) from None
    return found.description.source


def _without_heads_of_relatives(found: Checkpoint) -> Checkpoint:
    """Returns the model of single proteins that a model is without them."""
    described = found.description
    alone = replace(described, model=replace(described.model, relatives=None, relatives_heads=0))
    weights = {name: x for name, x in found.weights.items() if HEADS_OF_RELATIVES not in name}
    return Checkpoint(found.path, alone, weights)


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
    settings = [
        (f"model.{name}", there, here)
        for name, there, here in descriptions.differences(found.model, model)
    ]
    asked = dict(mechanism)
    if asked.pop("name") == found.attention:
        settings += [
            (f"attention.{name}", as_typed(there), as_typed(here))
            for name, there, here in option_differences(
                found.attention, found.attention_options, asked
            )
            # It has no weights, and no effect on a model of single proteins.
            if found.model.relatives is not None or not name.endswith("relatives_window")
        ]
    return settings


def describe(config: TrainConfig) -> ModelDescription:
    """Returns the description of a run's model, which is saved in every checkpoint."""
    options = dict(to_plain(config)["attention"])
    name, data = options.pop("name"), config.data
    longest_row = max(min(data.tokens_per_row, data.tokens_per_batch), data.max_length)
    is_related = data.batching is Batching.relatives
    tokens = 0 if data.relatives_alone == 1 else data.relatives_tokens or longest_row
    return ModelDescription(
        vocabulary=VOCABULARY.hash,
        objective=config.objective.name,
        model=config.model,
        attention=name,
        attention_options=stored_options(name, options),
        seed=config.seed,
        max_length=data.max_length,
        relatives_tokens=tokens if is_related else None,
    )


def build_training(plan: RunPlan) -> LanguageModeling:
    """Returns the LightningModule of a run, with new weights or those of `model.init_from`."""
    config = plan.config
    network = build_network(plan.model, config.attention, seed=config.seed)
    _check_fits(network, plan)
    network.activation_checkpointing = config.trainer.activation_checkpointing
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(HEADS_OF_RELATIVES in name or not config.optimizer.only_relatives)
    # A run that continues has weights in its checkpoints.
    starts_from = None if all_checkpoints(plan.run_dir) else config.model.init_from
    if starts_from is None:
        return build_module(network, plan)
    source = load_initial_weights(
        network,
        plan.model,
        config.attention,
        Path(starts_from),
        new_heads=config.optimizer.only_relatives,
    )
    module = build_module(network, plan)
    module.description = replace(module.description, source=source)
    module.check_start(config)
    return module


def build_module(network: ProteinLM, plan: RunPlan) -> LanguageModeling:
    """Returns the LightningModule that trains a network."""
    if network.head is None:
        raise UserError(
            "model.head=none, of an imported encoder, predicts nothing; type model.head=linear"
        )
    config = plan.config
    stage, teacher = config.objective.stage, config.objective.teacher
    module = (LanguageModeling if stage is None else STAGES[stage])(
        network,
        description=describe(replace(config, model=plan.model)),
        causal=plan.is_causal,
        optimizer=with_half_life(config.optimizer, tokens_per_step=plan.tokens_per_step),
        schedule=config.schedule,
        max_steps=config.trainer.max_steps,
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


def _check_fits(network: ProteinLM, plan: RunPlan) -> None:
    """Refuses a mechanism without the objective, and a model that is too short for the rows."""
    config, causal = plan.config, plan.is_causal
    if found := unable(
        config.attention, config.model.num_layers, lambda kind: _supports(kind, causal=causal)
    ):
        able = [name for name in names() if _supports(mechanism(name), causal=causal)]
        asked, other = ("causal", "masked") if causal else ("masked", "causal")
        raise UserError(
            f"{found} does not support objective={asked}; choose objective={other}, or "
            f"one of: {one_of(able)}"
        )
    longest = network.max_length
    if longest is not None and config.data.max_length > longest:
        raise UserError(
            f"data.max_length={config.data.max_length} is more than the "
            f"model.max_length={longest} positions of the model; "
            f"type data.max_length={longest}, or increase model.max_length"
        )


def _supports(kind: type[Attention], *, causal: bool) -> bool:
    return kind.supports_causal if causal else kind.supports_bidirectional


def _teacher(path: str) -> PretrainedModel:
    try:
        teacher = load_model(Path(path))
    except InputDataError as error:
        raise InputDataError(f"objective.teacher={path} cannot be used: {error}") from error
    _check_alphabet(f"objective.teacher={path}", teacher.description)
    return teacher


def open_data(config: DataConfig, rule: BatchingStrategy | None = None) -> tuple[Mixture, Mixture]:
    """Opens the data sets of training, and the validation split.

    With the rule of `data.batching=relatives`, both are read by their clusters.
    """
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
    clusters, rule = None, rule if isinstance(rule, WholeFamilies) else None
    # Before the shards are hashed, which takes long.
    if rule is not None or config.sampling is Sampling.cluster:
        clusters = [open_clusters(Path(p.dir), p.split, verify=verify) for p in parts]
    splits = [open_split(Path(p.dir), p.split, verify=verify, shuffled=True) for p in parts]
    valid_dir = config.valid_dir or parts[0].dir
    _warn_of_other_rules([part.dir for part in parts], valid_dir)
    valid = open_split(Path(valid_dir), config.valid_split, verify=verify)
    if clusters is None or rule is None:
        return Mixture(splits, shares, clusters), Mixture([valid])
    # All proteins are masked and see their relatives, whatever the fractions of training are; but
    # where all are alone in training, they are here.
    valid_rule = replace(rule, alone=float(rule.alone == 1), last=0.0)
    related = _related(config, Path(valid_dir), valid, valid_rule)
    return Families(splits, shares, clusters, rule), related


def _related(
    config: DataConfig, directory: Path, valid: SplitReader, rule: WholeFamilies
) -> Mixture:
    """Returns the families of a validation split, or its proteins after those of another split."""
    verify, other, split = config.verify, config.relatives_from, config.valid_split
    if other is None or rule.alone == 1:
        return Families([valid], [1], [open_clusters(directory, split, verify=verify)], rule)
    if other == split:
        raise UserError(
            f"data.relatives_from={other} is the validation split itself; type another one, or "
            "data.relatives_from=null for its own families"
        )
    index = open_clusters(directory, other, verify=verify)
    context = open_split(directory, other, verify=verify, shuffled=True)
    contexts = Contexts(context, index, valid, rule)
    if not contexts.has_relatives():
        raise UserError(
            f"data.relatives_from={other}: {directory} has no cluster with members in both {other} "
            f"and {split}, as if it was split by clusters; choose data.relatives_from=null, or a "
            "data set that was split by sequences, with clusters"
        )
    return contexts


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


def build_data(plan: RunPlan) -> SequenceData:
    """Opens the data sets of a run; returns its LightningDataModule."""
    return SequenceData(
        *open_data(plan.config.data, plan.batching),
        rule=plan.batching,
        config=plan.config.data,
        masking=plan.masking,
        seed=plan.config.seed,
        share=plan.share,
    )
