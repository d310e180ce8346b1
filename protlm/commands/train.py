"""`protlm train [overrides]`: one training run, composed by Hydra."""

import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from omegaconf import OmegaConf

from protlm.attention.layers import attention_label, cannot_decode, mechanisms_of
from protlm.build import build_data, build_training
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.config import Batching, Objective, TrainConfig
from protlm.config.composition import OWN_FLAGS, compose, key_of, through_hydra, to_plain
from protlm.config.settings import print_help
from protlm.config.settings_file import FileSettings, with_file
from protlm.data.batching.plan import SPECIALS, forecast
from protlm.data.records.proteins import one_protein
from protlm.downstream.training_scores import AssayScores, StructureScores
from protlm.model.transformer import ProteinLM, num_parameters
from protlm.plots import loss_curve, save_figure
from protlm.system.cluster import submitit
from protlm.system.errors import ExitCode, UserError, exit_with_message
from protlm.system.paths import sample_dir, shipped
from protlm.system.terminal import print_table
from protlm.training.callbacks.monitor import MeasureModel
from protlm.training.datamodule import SequenceData
from protlm.training.launch import is_first_rank, leave_other_ranks, locked
from protlm.training.run import find_checkpoint, last_step
from protlm.training.run import train as run
from protlm.training.run_config import (
    SAMPLE_DATA,
    compose_run,
    refuse_another_run,
    refuse_differences,
    refuse_unused,
    with_fitting_warmup,
    write_config,
)
from protlm.training.run_plan import RunPlan

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
    typed, file = with_file(arguments)
    flags = {argument for argument in typed if argument.startswith("-")}
    if "--help" in flags:
        print_help(TrainConfig)
    elif flags & {"-m", "--multirun"}:
        _sweep(typed, file, flags, break_lock=break_lock)
    elif flags and flags <= _SHOWS and _SHOWS & {*typed} - {"--cfg", "--resolve"}:
        typed = [one for one in typed if one not in _SHOWS]
        config = compose_run(typed, file)
        refuse_differences(config)
        print(OmegaConf.to_yaml(to_plain(config)), end="")
    elif flags:
        through_hydra(TrainConfig, [*file.choices, *typed], train, file.stored)
    else:
        train(compose_run(typed, file), break_lock=break_lock)


def _sweep(typed: list[str], file: FileSettings, flags: set[str], *, break_lock: bool) -> None:
    """Trains with each combination of values, and prints a table of the runs."""
    # Swept values contain commas; the others must be valid before Hydra makes a folder.
    plain = [
        one
        for one in typed
        if one not in flags and "," not in one and not key_of(one).startswith("hydra")
    ]
    swept = [key_of(argument) for argument in typed if "," in argument]
    runs: list[Path] = []
    config = compose(TrainConfig, [*file.choices, *plain], file.stored)
    _refuse_devices(config)
    if "hydra/launcher=submitit_slurm" in typed:
        submitit()
    if not any(key_of(one) == "run_dir" and {"$", ","} & set(one) for one in typed):
        raise UserError(
            f"each run of --multirun needs its own folder, and all would have {config.run_dir}; "
            f"type run_dir='runs/{'-'.join(map(_interpolated, swept)) or 'NAME'}'"
        )

    def train_one(config: TrainConfig) -> None:
        _refuse_devices(config)
        refuse_unused(typed, to_plain(config), swept=set(swept))
        runs.append(Path(config.run_dir))
        with_fitting_warmup(config, {*file.keys, *map(key_of, typed)})
        if len(runs) > 1:
            config.schedule.notice = ""
        train(config, break_lock=break_lock)

    through_hydra(TrainConfig, [*file.choices, *typed], train_one, file.stored)
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
    plan = RunPlan(config)
    stored = refuse_another_run(config) if is_first_rank() else None
    module = build_training(plan)
    if is_first_rank() and config.data.dir is not None:
        _prepare_sample_if_missing(Path(config.data.dir))
    data = build_data(plan)
    measurement = _measurement(module.network, plan)
    with locked(plan.run_dir, break_lock=break_lock) as lock:
        checkpoint = find_checkpoint(module, data, plan)
        if is_first_rank():
            write_config(config, stored)
            _print_start(plan, checkpoint)
            _print_summary(module.network, data, plan)
            if (number := len(data.valid.order())) < _FEW_SEQUENCES:
                what = "documents" if config.data.batching is Batching.relatives else "sequences"
                _print(
                    f"protlm: warning: few {what} ({number}) are in the validation "
                    "split, so its loss is uncertain; prepare the data with a larger "
                    "--valid-fraction, or type data.valid_dir=DIR"
                )
        step, code = run(
            module, data, plan, checkpoint=checkpoint, measurement=measurement, lock=lock
        )
        if is_first_rank():
            _finish(plan.run_dir, step, code)
    if code:
        sys.exit(code)


def _prepare_sample_if_missing(directory: Path) -> None:
    """Makes the default data set, so that a bare `protlm train` runs anywhere."""
    if directory.absolute() != SAMPLE_DATA.absolute() or directory.exists():
        return
    from protlm.data_prep import prepare, split

    sample = sample_dir()
    rule = split.TableSplit(sample / "uniprot_sample.splits.tsv.gz")
    prepare.prepare([sample / "uniprot_sample.fasta.gz"], directory, split_rule=rule)


def _print_start(plan: RunPlan, checkpoint: Path | None) -> None:
    config, trainer = plan.config, plan.trainer
    run_is = "new run" if checkpoint is None else f"continuing at step {last_step(checkpoint)}"
    sets = [part.dir for part in config.data.mixture] or [config.data.dir]
    device, number = trainer.accelerator, plan.num_devices
    step = f"steps of {plan.tokens_per_step:,} tokens"
    if plan.tokens_per_step < config.data.max_length:
        step += ", or a longer row"
    facts = [
        f"{number} devices, {device}" if number > 1 else device,
        *([f"{torch.get_num_threads()} threads"] if device == "cpu" else []),
        f"precision {trainer.precision}",
        step,
    ]
    _print(f"{config.run_dir}: {run_is}; data {', '.join(map(str, sets))}; {', '.join(facts)}")
    if config.schedule.notice:
        _print(f"protlm: warning: {config.schedule.notice}")


def _print_summary(network: ProteinLM, data: SequenceData, plan: RunPlan) -> None:
    config, train_split = plan.config, data.train
    expected = forecast(train_split.lengths_of, train_split.order(seed=config.seed), plan.batching)
    total, trained = sum(x.numel() for x in network.parameters()), num_parameters(network)
    parameters = f"{total:,} parameters" + f" ({trained:,} trained)" * (trained < total)
    facts = [
        f"{parameters}, {_layers(config)}",
        config.model.init_from and f"weights of {config.model.init_from}",
        train_split.describe(),
        expected,
        cannot_generate(config),
    ]
    _print("; ".join(fact for fact in facts if fact))
    if config.data.batching is Batching.relatives:
        valid = data.valid
        expected = forecast(valid.lengths_of, valid.order(), data.valid_batching)
        _print(f"validation: {expected}")


def _layers(config: TrainConfig) -> str:
    counts = Counter(one.name for one in mechanisms_of(config.attention, config.model.num_layers))
    each = ", ".join(f"{count} {name}" for name, count in counts.items())
    text = f"{config.model.num_layers} layers of {attention_label(config.attention)}"
    return f"{text} ({each})" if len(counts) > 1 else text


def cannot_generate(config: TrainConfig) -> str:
    """Returns a notice for a causal model whose mechanism cannot decode step by step, or ""."""
    if config.objective.name is not Objective.causal:
        return ""
    found = cannot_decode(config.attention, config.model.num_layers)
    return f"{found} cannot generate; docs/mechanisms.md lists those that can" if found else ""


def _measurement(network: ProteinLM, plan: RunPlan) -> MeasureModel | None:
    trainer = plan.trainer
    if (every := trainer.measure_every) is None:
        return None
    structures = StructureScores()
    if trainer.measure_assay is None or trainer.measure_wild_type is None:
        return MeasureModel(structures, structures.columns, every=every)
    limit = network.max_length
    assay = AssayScores(
        Path(trainer.measure_assay),
        one_protein(Path(trainer.measure_wild_type)).sequence,
        causal=plan.is_causal,
        max_residues=None if limit is None else limit - SPECIALS,
    )
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
