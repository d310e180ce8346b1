"""`protlm generate -m MODEL -o OUT.fasta`: samples proteins from a causal model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protlm.build import load_model
from protlm.commands.fasta_output import STANDARD_OUTPUT, fasta_file, fasta_text
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError
from protlm.model.decoding import GeneratedSequence, Sampling
from protlm.paths import check_output
from protlm.terminal import JobProgress


@dataclass(frozen=True)
class GenerateOptions:
    """The settings of `protlm generate`; lengths count residues, including the prefix."""

    prefix: str = ""
    number: int = 10
    max_length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    batch_size: int = 32
    device: str = "auto"


def generate(model_path: Path, output: Path, options: GenerateOptions) -> None:
    """Writes sampled proteins as FASTA; headers contain their end and their probability.

    Args:
        model_path: a run, a checkpoint or an exported model.
        output: the new file, gzip if its name ends with .gz; `-` prints.
        options: the settings.

    Raises:
        UserError: a model that cannot generate, or an impossible setting.
        InputDataError: the model is damaged.
        OutputError: the output exists or cannot be written.
    """
    is_printed = output == STANDARD_OUTPUT
    if not is_printed:
        check_output(output)
    model = load_model(model_path, device=options.device)
    generated = model.generate(
        options.number,
        prefix=_residues(options.prefix),
        max_residues=options.max_length,
        sampling=options.sampling,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    # Sequences are yielded as they end, which depends on the batches; the file is sorted.
    sequences = sorted(_watched(generated, options.number), key=lambda sequence: sequence.number)
    with fasta_file(output) as file:
        file.writelines(map(fasta_record, sequences))
    if not is_printed:
        print(output)


def _residues(prefix: str) -> str:
    """Returns the prefix in upper case and without white space, as FASTA is read."""
    residues = "".join(prefix.split()).upper()
    try:
        VOCABULARY.encode(residues)
    except InputDataError as error:
        raise UserError(f"--prefix: {error}") from None
    return residues


def fasta_record(sequence: GeneratedSequence) -> str:
    """Formats a sequence as FASTA; the header has its number, length, end and probability.

    >>> from protlm.model.decoding import Ended
    >>> print(fasta_record(GeneratedSequence(1, "MKTAY", Ended.eos, num_sampled=2, nats=4.0)))
    >generated_1 length=5 sampled=2 ended=eos log_probability=-2.0000 perplexity=7.39
    MKTAY
    <BLANKLINE>
    """
    header = (
        f"generated_{sequence.number} length={len(sequence.sequence)} "
        f"sampled={sequence.num_sampled} ended={sequence.ended.value}"
    )
    if sequence.num_sampled:
        header += (
            f" log_probability={-sequence.nats / sequence.num_sampled:.4f} "
            f"perplexity={sequence.perplexity:.2f}"
        )
    return fasta_text(header, sequence.sequence)


def _watched(generated: Iterator[GeneratedSequence], number: int) -> Iterator[GeneratedSequence]:
    with JobProgress("generating", number) as progress:
        for done, sequence in enumerate(generated, start=1):
            progress.update(done)
            yield sequence
