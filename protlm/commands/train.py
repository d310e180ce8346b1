"""`protlm train [overrides]`: one training run, composed by Hydra."""

import signal
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf

from protlm.attention import Attention, mechanism, names
from protlm.attention.layers import attention_label, cannot_decode, mechanisms_of, unable
from protlm.build import (
    batching_strategy,
    build_data,
    build_module,
    load_initial_weights,
    masking_rule,
    open_data,
    tokens_of_step,
)
from protlm.checkpoints.format import all_checkpoints
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.config import Objective, TrainConfig
from protlm.config.composition import OWN_FLAGS, compose, key_of, through_hydra, to_plain
from protlm.config.settings import print_help
from protlm.config.settings_file import with_file
from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import SPECIALS, forecast
from protlm.data.records.proteins import one_protein
from protlm.data.shards.data_set import SplitReader
from protlm.downstream.training_scores import AssayScores, StructureScores
from protlm.model.transformer import ProteinLM, build_network, num_parameters
from protlm.plots import loss_curve, save_figure
from protlm.system.errors import ExitCode, UserError, exit_with_message, one_of
from protlm.system.paths import sample_dir, shipped
from protlm.system.terminal import print_table
from protlm.training.callbacks.monitor import MeasureModel
from protlm.training.datamodule import SequenceData
from protlm.training.launch import (
    check_trainer,
    is_first_rank,
    leave_other_ranks,
    locked,
    resolved_accelerator,
    resolved_precision,
)
from protlm.training.run import find_checkpoint, last_step
from protlm.training.run import train as run
from protlm.training.run_config import (
    SAMPLE_DATA,
    compose_run,
    refuse_another_run,
    refuse_unused,
    with_fitting_warmup,
    write_config,
)
from protlm.training.schedule import check_schedule

# Exit codes of runs that ended in the same way on all ranks.
_CLEAN = (ExitCode.OK, ExitCode.PREEMPTED)
# The loss of fewer validation sequences is worth a warning.
_FEW_SEQUENCES = 30
# What is typed for the composed settings, which are resolved.
_SHOWS = {"--cfg", "job", "--cfg=job", "--resolve"}


def main() -> None:
    """Runs the command with the arguments of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = sys.argv[1:]
    debug, break_lock = (flag in arguments for flag in OWN_FLAGS)
    arguments = [argument for argument in arguments if argument not in OWN_FLAGS]
    # Hydra's flags print; a run does not, and must not end when the reader of its output ends.
    prints = any(argument.startswith("-") for argument in arguments)
    try:
        exit_with_message(
            lambda: _run(arguments, break_lock=break_lock), debug=debug, result_on_stdout=prints
        )
    except SystemExit as end:
        if end.code in _CLEAN:
            leave_other_ranks()
        raise


def _run(arguments: list[str], *, break_lock: bool) -> None:
    typed, settings = with_file(arguments)
    flags = {argument for argument in typed if argument.startswith("-")}
    if "--help" in flags:
        print_help(TrainConfig)
    elif flags & {"-m", "--multirun"}:
        _sweep(typed, settings, flags, break_lock=break_lock)
    elif flags and flags <= _SHOWS and _SHOWS & {*typed} - {"--cfg", "--resolve"}:
        typed = [one for one in typed if one not in _SHOWS]
        print(OmegaConf.to_yaml(to_plain(compose_run(typed, settings))), end="")
    elif flags:
        through_hydra(TrainConfig, [*settings, *typed], train)
    else:
        train(compose_run(typed, settings), break_lock=break_lock)


def _sweep(typed: list[str], settings: list[str], flags: set[str], *, break_lock: bool) -> None:
    """Trains with each combination of values, and prints a table of the runs."""
    # Swept values contain commas; the others must be valid before Hydra makes a folder.
    names = [one for one in typed if one not in flags and not key_of(one).startswith("hydra")]
    plain = [one for one in names if "," not in one]
    swept = [key_of(argument) for argument in typed if "," in argument]
    runs: list[Path] = []
    _refuse_devices(config := compose(TrainConfig, [*settings, *plain]))
    if not any(key_of(one) == "run_dir" and {"$", ","} & set(one) for one in typed):
        raise UserError(
            f"each run of --multirun needs its own folder, and all would have {config.run_dir}; "
            f"type run_dir='runs/{'-'.join(map(_interpolated, swept)) or 'NAME'}'"
        )

    def train_one(config: TrainConfig) -> None:
        _refuse_devices(config)
        refuse_unused(typed, to_plain(config), swept=set(swept))
        runs.append(Path(config.run_dir))
        with_fitting_warmup(config, [*settings, *typed])
        if len(runs) > 1:
            config.schedule.notice = ""
        train(config, break_lock=break_lock)

    through_hydra(TrainConfig, [*settings, *typed], train_one)
    print_table(("run", "step", "validation loss", "accuracy"), map(_last_validation, runs))


def _last_validation(run: Path) -> tuple[str, ...]:
    rows = [row for row in read_metrics(run / METRICS) if "valid_loss" in row]
    if not rows:
        return str(run), "", "", ""
    step, loss, accuracy = (rows[-1][key] for key in ("step", "valid_loss", "valid_accuracy"))
    return str(run), f"{step:.0f}", f"{loss:.4f}", f"{accuracy:.2%}"


def _interpolated(key: str) -> str:
    """Returns the interpolation of a swept setting, or of a group such as `model`."""
    return f"${{{key}}}" if "." in key or key == "seed" else f"${{hydra:runtime.choices.{key}}}"


def _refuse_devices(config: TrainConfig) -> None:
    if config.trainer.devices * config.trainer.num_nodes > 1:
        raise UserError(
            f"--multirun runs in one process, and trainer.devices={config.trainer.devices} "
            f"trainer.num_nodes={config.trainer.num_nodes} needs more; type one command for each "
            f"run, or on a cluster one sbatch {shipped('slurm/train.sbatch')}, each with another "
            "run_dir="
        )


def train(config: TrainConfig, *, break_lock: bool = False) -> None:
    """Trains with the given settings, or continues the run in the run directory."""
    _check(config)
    run_dir = Path(config.run_dir)
    if is_first_rank():
        refuse_another_run(run_dir, config)
    network = build_network(config.model, config.attention, seed=config.seed)
    _check_fits(network, config)
    starts_from = None if all_checkpoints(run_dir) else config.model.init_from
    source = None
    if starts_from is not None:
        source = load_initial_weights(network, config.model, config.attention, Path(starts_from))
    network.activation_checkpointing = config.trainer.activation_checkpointing
    if is_first_rank() and config.data.dir is not None:
        _prepare_sample_if_missing(Path(config.data.dir))
    module = build_module(network, config)
    module.description = replace(module.description, source=source)
    if starts_from is not None:
        module.check_start(config)
    train_split, valid_split = open_data(config.data)
    measurement = _measurement(network, config)
    with locked(run_dir, break_lock=break_lock) as lock:
        data = build_data(train_split, valid_split, config)
        checkpoint = find_checkpoint(module, data, config=config.trainer, run_dir=run_dir)
        if is_first_rank():
            write_config(run_dir, config)
            _print_start(config, checkpoint)
            _print_summary(network, data, config)
            _warn_of_few_sequences(valid_split)
        step, code = run(
            module, data, settings=config, checkpoint=checkpoint, measurement=measurement, lock=lock
        )
        if is_first_rank():
            _finish(run_dir, step, code)
    if code:
        sys.exit(code)


def _check(config: TrainConfig) -> None:
    check_trainer(config.trainer)
    check_schedule(config.schedule, max_steps=config.trainer.max_steps)
    batching_strategy(config.data, tokens_per_step=config.trainer.tokens_per_step)
    masking_rule(config)
    if is_first_rank():
        _warn_of_idle_devices(config)


def _warn_of_idle_devices(config: TrainConfig) -> None:
    devices = config.trainer.devices * config.trainer.num_nodes
    longest = batching_strategy(config.data).longest_row
    rows = max(config.data.tokens_per_batch // longest, 1)
    if rows < devices:
        warnings.warn(
            f"data.tokens_per_batch={config.data.tokens_per_batch} holds {rows} of the longest "
            f"rows, of {longest} tokens, so some of the {devices} devices will wait for the "
            f"others; type data.tokens_per_batch={devices * longest}, or use fewer devices",
            stacklevel=2,
        )


def _check_fits(network: ProteinLM, config: TrainConfig) -> None:
    causal = config.objective.name is Objective.causal
    if found := unable(
        config.attention, config.model.num_layers, lambda kind: _supports(kind, causal=causal)
    ):
        able = [name for name in names() if _supports(mechanism(name), causal=causal)]
        asked, other = ("causal", "masked") if causal else ("masked", "causal")
        raise UserError(
            f"{found} does not support objective={asked}; choose objective={other}, or "
            f"one of: {one_of(able)}"
        )
    if config.data.max_length > config.model.max_length and _has_limit(network, config):
        raise UserError(
            f"data.max_length={config.data.max_length} is more than the "
            f"model.max_length={config.model.max_length} positions of the model; "
            f"type data.max_length={config.model.max_length}, or increase model.max_length"
        )


def _has_limit(network: ProteinLM, config: TrainConfig) -> bool:
    return config.model.has_position_table or network.max_length is not None


def _supports(kind: type[Attention], *, causal: bool) -> bool:
    return kind.supports_causal if causal else kind.supports_bidirectional


def _prepare_sample_if_missing(directory: Path) -> None:
    """Makes the default data set, so that a bare `protlm train` runs anywhere."""
    if directory.absolute() != SAMPLE_DATA.absolute() or directory.exists():
        return
    from protlm.data_prep import prepare, split

    sample = sample_dir()
    rule = split.TableSplit(sample / "uniprot_sample.splits.tsv.gz")
    prepare.prepare([sample / "uniprot_sample.fasta.gz"], directory, split_rule=rule)


def _print_start(config: TrainConfig, checkpoint: Path | None) -> None:
    run_dir, trainer, data = config.run_dir, config.trainer, config.data
    run_is = "new run" if checkpoint is None else f"continuing at step {last_step(checkpoint)}"
    sets = [part.dir for part in data.mixture] or [data.dir]
    device = resolved_accelerator(trainer.accelerator)
    number = trainer.devices * trainer.num_nodes
    is_less = tokens_of_step(config) < data.max_length
    facts = [
        f"{number} devices, {device}" if number > 1 else device,
        *([f"{torch.get_num_threads()} threads"] if device == "cpu" else []),
        f"precision {resolved_precision(trainer.precision, device.partition(':')[0])}",
        f"steps of {tokens_of_step(config):,} tokens{', or a longer row' if is_less else ''}",
    ]
    _print(f"{run_dir}: {run_is}; data {', '.join(map(str, sets))}; {', '.join(facts)}")
    if config.schedule.notice:
        _print(f"protlm: warning: {config.schedule.notice}")


def _print_summary(network: ProteinLM, data: SequenceData, config: TrainConfig) -> None:
    rule, train_split = data.rule, data.train
    facts = [
        f"{num_parameters(network):,} parameters, {_layers(config)}",
        _extent(train_split),
        forecast(train_split.lengths_of, train_split.order(seed=config.seed), rule).describe(),
        cannot_generate(config),
    ]
    _print("; ".join(fact for fact in facts if fact))


def _layers(config: TrainConfig) -> str:
    counts = Counter(one.name for one in mechanisms_of(config.attention, config.model.num_layers))
    each = ", ".join(f"{count} {name}" for name, count in counts.items())
    text = f"{config.model.num_layers} layers of {attention_label(config.attention)}"
    return f"{text} ({each})" if len(counts) > 1 else text


def _warn_of_few_sequences(valid: SplitReader) -> None:
    if len(valid) < _FEW_SEQUENCES:
        _print(
            f"protlm: warning: few sequences ({len(valid)}) are in the validation split, so its "
            "loss is uncertain; prepare the data with a larger --valid-fraction, or type "
            "data.valid_dir=DIR"
        )


def _extent(data: Mixture) -> str:
    if data.num_clusters is None:
        return f"{len(data):,} sequences"
    return (
        f"{len(data):,} sequences in {data.num_clusters:,} clusters; an epoch draws one sequence "
        "from each cluster"
    )


def cannot_generate(config: TrainConfig) -> str:
    """Returns a notice for a causal model whose mechanism cannot decode step by step, or ""."""
    is_causal = config.objective.name is Objective.causal
    found = cannot_decode(config.attention, config.model.num_layers) if is_causal else None
    if found is None:
        return ""
    return f"{found} cannot generate; docs/mechanisms.md lists those that can"


def _measurement(network: ProteinLM, config: TrainConfig) -> MeasureModel | None:
    trainer = config.trainer
    if (every := trainer.measure_every) is None:
        return None
    structures = StructureScores()
    if trainer.measure_assay is None or trainer.measure_wild_type is None:
        return MeasureModel(structures, structures.columns, every=every)
    limit = config.model.max_length - SPECIALS if _has_limit(network, config) else None
    wild_type = one_protein(Path(trainer.measure_wild_type)).sequence
    causal = config.objective.name is Objective.causal
    assay = AssayScores(Path(trainer.measure_assay), wild_type, causal=causal, max_residues=limit)
    columns = (*structures.columns, *assay.columns)
    return MeasureModel(lambda model: {**structures(model), **assay(model)}, columns, every=every)


def _finish(run_dir: Path, step: int, code: ExitCode) -> None:
    if code:
        _print(f"stopped after step {step}; the same command continues {run_dir}")
        return
    if rows := read_metrics(run_dir / METRICS):
        save_figure(loss_curve(rows), run_dir / "loss.png", overwrite=True)
    _print(f"{run_dir} is complete at step {step}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
