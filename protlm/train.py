"""`protlm train [overrides]`: one training run, composed by Hydra.

Lightning's launcher runs this file again for the other ranks, as `python -m protlm.train`.
"""

import os
import signal

from protlm.parent import end_with_parent

if __name__ == "__main__":
    # The imports below take seconds; Ctrl-C ends them without a word, as it does the rest.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    end_with_parent()

import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from protlm.attention import Attention, mechanism, names
from protlm.attention.base import Recurrent
from protlm.build import (
    batch_rule,
    build_data,
    build_module,
    build_network,
    compose,
    open_data,
    through_hydra,
    to_plain,
)
from protlm.config import Objective, Positions, TrainConfig
from protlm.data.forecast import forecast
from protlm.data.mixture import Mixture
from protlm.errors import (
    ExitCode,
    InputDataError,
    OutputError,
    UserError,
    exit_with_message,
    one_of,
)
from protlm.lock import LOCK
from protlm.model.checkpoint import CHECKPOINTS
from protlm.model.transformer import ProteinLM, num_parameters
from protlm.paths import check_output, complete_file, explain_os_error, sample_dir
from protlm.plots import loss_curve, save_figure
from protlm.training.launch import is_first_rank, leave_other_ranks
from protlm.training.metrics import METRICS, read_metrics
from protlm.training.run import Finished, check_trainer
from protlm.training.run import train as run
from protlm.training.run_lock import locked
from protlm.training.schedule import check_schedule

CONFIG = "config.yaml"
# A run may be continued with others of these; everything else decides what is learnt.
_MAY_CHANGE = {"logger", "run_dir"}
# The checkpoint knows the data themselves, and the weights of a mixture.
_DATA_MAY_CHANGE = {"dir", "mixture", "num_workers", "verify", "valid_dir", "valid_split"}
_TRAINER_DECIDES = {"accumulate", "ema_decay", "gradient_clip", "precision", "tokens_per_step"}


# Codes of runs that have surely ended on all ranks alike.
_IN_ORDER = (ExitCode.OK, ExitCode.PREEMPTED)


def main() -> None:
    """Runs the command with this process's arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    flags = {argument for argument in arguments if argument.startswith("-")}

    def run() -> None:
        if flags & {"-m", "--multirun"}:
            # What is swept over has commas; the rest must fit before Hydra makes a folder.
            plain = [a for a in arguments if a not in flags and "," not in a]
            _refuse_devices(compose(TrainConfig, plain))
            through_hydra(TrainConfig, arguments, _train_one_of_many)
        elif flags:
            through_hydra(TrainConfig, arguments, train)
        else:
            train(compose(TrainConfig, arguments))

    try:
        exit_with_message(run, debug=debug)
    except SystemExit as end:
        if end.code in _IN_ORDER:
            leave_other_ranks()
        raise


def _train_one_of_many(config: TrainConfig) -> None:
    _refuse_devices(config)
    train(config)


def _refuse_devices(config: TrainConfig) -> None:
    if config.trainer.devices * config.trainer.num_nodes > 1:
        raise UserError(
            f"--multirun has one process, and trainer.devices={config.trainer.devices} "
            f"trainer.num_nodes={config.trainer.num_nodes} needs more: type one command for each "
            "run, or on a cluster one sbatch slurm/train.sbatch, with a run_dir= of its own"
        )


def train(config: TrainConfig) -> None:
    """Trains what the config says, or continues the run that is there.

    Raises:
        UserError: settings that do not fit, or another run in the directory.
        OutputError: the run directory cannot be written.
        InputDataError: no shards, or damaged ones.
    """
    _check(config)
    network = build_network(config.model, config.attention, seed=config.seed)
    _check_fits(network, config)
    network.activation_checkpointing = config.trainer.activation_checkpointing
    run_dir = Path(config.run_dir)
    if is_first_rank():
        if config.data.dir is not None:
            _prepare_sample_if_missing(Path(config.data.dir))
        _refuse_another_run(run_dir, config)
    train_split, valid_split = open_data(config.data)
    with locked(run_dir):
        if is_first_rank():
            _enter(run_dir, config)
            _introduce(network, train_split, config)
        finished = run(
            build_module(network, config),
            build_data(train_split, valid_split, config),
            config=config.trainer,
            logger=config.logger,
            run_dir=run_dir,
        )
        if is_first_rank():
            _conclude(run_dir, finished)
    if finished.exit_code:
        sys.exit(finished.exit_code)


def _check(config: TrainConfig) -> None:
    """Refuses what cannot work before anything is read or written."""
    check_trainer(config.trainer)
    check_schedule(config.schedule, max_steps=config.trainer.max_steps)
    batch_rule(config.data, tokens_per_step=config.trainer.tokens_per_step)
    if is_first_rank():
        _warn_of_idle_devices(config)


def _warn_of_idle_devices(config: TrainConfig) -> None:
    devices = config.trainer.devices * config.trainer.num_nodes
    rows = max(config.data.tokens_per_batch // config.data.max_length, 1)
    if rows < devices:
        warnings.warn(
            f"data.tokens_per_batch={config.data.tokens_per_batch} holds {rows} of the longest "
            f"rows, data.max_length={config.data.max_length}, and some of the {devices} devices "
            f"will wait for the others; type data.tokens_per_batch="
            f"{devices * config.data.max_length}, or take fewer devices",
            stacklevel=2,
        )


def _check_fits(network: ProteinLM, config: TrainConfig) -> None:
    """Refuses an attention that has not the mode of the objective, or no room for the data."""
    attention, name = network.mechanism(1), config.attention["name"]
    causal = config.objective.name is Objective.causal
    if not (attention.supports_causal if causal else attention.supports_bidirectional):
        able = [n for n in names() if n != name and _can(mechanism(n), causal=causal)]
        raise UserError(
            f"attention={name} has no {'causal' if causal else 'bidirectional'} form; choose "
            f"objective={'masked' if causal else 'causal'}, or one of: {one_of(able)}"
        )
    rotary = config.model.positions is Positions.rotary
    has_limit = not rotary or attention.max_length is not None
    if config.data.max_length > config.model.max_length and has_limit:
        raise UserError(
            f"data.max_length={config.data.max_length} is more than the "
            f"model.max_length={config.model.max_length} positions the model has; "
            f"type data.max_length={config.model.max_length} or give the model more"
        )


def _can(kind: type[Attention], *, causal: bool) -> bool:
    return kind.supports_causal if causal else kind.supports_bidirectional


def _prepare_sample_if_missing(directory: Path) -> None:
    """Makes the default data set, so that a bare `protlm train` runs anywhere."""
    if directory != Path("data/uniprot_sample") or directory.exists():
        return
    sample = sample_dir()
    command = [sys.executable, "-m", "protlm", "prepare", str(sample / "uniprot_sample.fasta.gz")]
    command += ["--out", str(directory)]
    command += ["--split-table", str(sample / "uniprot_sample.splits.tsv.gz")]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def _refuse_another_run(run_dir: Path, config: TrainConfig) -> None:
    """A run directory holds one run: the same settings continue it, others are refused."""
    written = run_dir / CONFIG
    if not written.is_file():
        if run_dir.exists() and not (run_dir.is_dir() and _is_empty(run_dir)):
            raise OutputError(f"{run_dir} exists and holds no run; choose another run_dir=")
        check_output(run_dir, overwrite=True)
        return
    try:
        # Settings that are newer than the run have their defaults.
        loaded = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(written))
        before = OmegaConf.to_container(loaded, enum_to_str=True)
    except Exception as error:
        raise InputDataError(
            f"{written} cannot be read: {error}; choose another run_dir="
        ) from None
    assert isinstance(before, dict)
    now = to_plain(config)
    keys = sorted(_decisive(before) | _decisive(now), key=str)
    if others := [key for key in keys if _value(before, key) != _value(now, key)]:
        first, more = others[0], len(others) - 1
        old, new = (_value(config, first) for config in (before, now))
        what = f"the settings in {written}" if more else f"{first}={old}"
        raise UserError(
            f"{run_dir} holds a run with {first}={old}, not {new}"
            + (f", and {more} more settings differ" if more else "")
            + f"; continue it with {what}, or choose another run_dir="
        )


def _is_empty(folder: Path) -> bool:
    # Whoever was killed at the very start of a run has left nothing but its lock.
    return {path.name for path in folder.iterdir() if path.suffix != ".part"} <= {LOCK}


def _decisive(config: Mapping[Any, Any]) -> set[str]:
    """Dotted names of the settings that decide what a run learns."""
    names = set()
    for section, values in config.items():
        if section in _MAY_CHANGE:
            continue
        inner = set(values) if isinstance(values, dict) else {None}
        if section == "data":
            inner -= _DATA_MAY_CHANGE
            if config["trainer"].get("tokens_per_step") is not None:
                # It is only how much of a step is computed at a time.
                inner -= {"tokens_per_batch"}
        elif section == "trainer":
            inner &= _TRAINER_DECIDES
        names |= {f"{section}.{key}" if key else str(section) for key in inner}
    return names


def _value(config: Mapping[Any, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    found = config.get(section)
    return found.get(name) if name and isinstance(found, dict) else found


def _enter(run_dir: Path, config: TrainConfig) -> None:
    """Writes the config into the run directory, secrets not among it."""
    # Another start may have come and gone since the directory was looked at.
    _refuse_another_run(run_dir, config)
    with complete_file(run_dir / CONFIG, overwrite=True) as temporary:
        OmegaConf.save(to_plain(config), temporary)
    try:
        (run_dir / CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, run_dir) from error


def _introduce(network: ProteinLM, train_split: Mixture, config: TrainConfig) -> None:
    rule = batch_rule(config.data, tokens_per_step=config.trainer.tokens_per_step)
    epoch = forecast(train_split.lengths_of, train_split.order(seed=config.seed), rule)
    facts = [
        f"{num_parameters(network):,} parameters, {config.model.num_layers} layers of "
        f"{config.attention['name']}",
        f"{len(train_split):,} sequences",
        epoch.describe(),
        rule.curriculum.describe(),
        cannot_generate(network, config),
    ]
    _say("; ".join(fact for fact in facts if fact))


def cannot_generate(network: ProteinLM, config: TrainConfig) -> str:
    """Says so of a causal model whose mechanism cannot take one position after the other."""
    is_causal = config.objective.name is Objective.causal
    if not is_causal or isinstance(network.mechanism(1), Recurrent):
        return ""
    return f"{config.attention['name']} cannot generate: docs/mechanisms.md says which can"


def _conclude(run_dir: Path, finished: Finished) -> None:
    if finished.exit_code:
        _say(f"stopped after step {finished.step}; the same command continues {run_dir}")
        return
    rows = read_metrics(run_dir / METRICS)
    if rows:
        save_figure(loss_curve(rows), run_dir / "loss.png", overwrite=True)
    _say(f"{run_dir} is complete at step {finished.step}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
