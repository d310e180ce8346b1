"""`protlm generate -m MODEL -o OUT.fasta`: samples proteins from a causal or a masked model."""

from itertools import cycle, islice
from pathlib import Path

from protlm.commands.outputs import STANDARD_OUTPUT, fasta_file, fasta_text
from protlm.data.records.proteins import Proteins
from protlm.loading import load_model
from protlm.model.decoding import GeneratedSequence
from protlm.model.gibbs import resample
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import InContexts, drawn_beside, in_contexts
from protlm.model.transformer import ENCODER
from protlm.options.generate import GenerateOptions, Sweeps
from protlm.options.shared import Duplicates
from protlm.system.errors import UserError
from protlm.system.terminal import watched

_NUMBER = 10


def generate(model_path: Path, output: Path, options: GenerateOptions) -> None:
    """Writes sampled proteins as FASTA; headers contain how they were sampled."""
    if options.start is None and options.sweeps is not None:
        raise UserError("--sweeps and --mask-fraction need sequences; type --start SEQUENCES.fasta")
    model = load_model(model_path, device=options.device)
    if options.relatives.relatives is not None and not (model.causal and options.start is None):
        raise UserError(
            "--relatives are those of new sequences, which a causal model continues; train one "
            "with data.batching=relatives objective=causal, and leave --start out"
        )
    contexts = in_contexts(model, options.relatives, [""], only_first=True)
    records = (
        _continued(model, options, contexts)
        if options.start is None
        else _resampled(model, options)
    )
    beside = None if output == STANDARD_OUTPUT else contexts
    # Of no query: sequences follow the relatives as new ones.
    with drawn_beside(beside, output, [("", "")]), fasta_file(output) as file:
        file.writelines(records)
    if output != STANDARD_OUTPUT:
        print(output)


def _continued(
    model: PretrainedModel, options: GenerateOptions, contexts: InContexts | None
) -> list[str]:
    """Returns sequences of a causal model, as FASTA."""
    number = _NUMBER if options.number is None else options.number
    generated = model.generate(
        number,
        prefix=options.prefix,
        max_residues=options.max_length,
        sampling=options.sampling,
        seed=options.seed,
        batch_size=options.batch_size,
        relatives=contexts,
    )
    # Sequences are yielded as they end, which depends on the batches; the file is sorted.
    sequences = sorted(watched("generating", generated, total=number), key=lambda one: one.number)
    return [fasta_record(sequence) for sequence in sequences]


def _resampled(model: PretrainedModel, options: GenerateOptions) -> list[str]:
    """Returns sequences of a masked model, as FASTA."""
    assert options.start is not None
    if model.network.head is None:
        raise UserError(ENCODER)
    if model.causal:
        raise UserError(
            "--start is for models that predict masked residues, and this one is causal; type "
            "--prefix RESIDUES to continue a sequence"
        )
    for flag, value in (("--prefix", options.prefix), ("--max-length", options.max_length)):
        if value:
            raise UserError(f"{flag} is for causal models; leave it out with --start")
    proteins = Proteins(
        options.start,
        model.max_residues,
        Duplicates.suffix,
        # In float64, as it is sampled.
        refuse=Room(model, scale=2).refusal,
    )
    proteins.report("starts")
    number = len(proteins) if options.number is None else options.number
    starts = list(islice(cycle(proteins), number))
    new = dict(
        resample(
            model.network,
            [record.sequence for record in starts],
            options.sampling,
            sweeps=options.sweeps or Sweeps(),
            seed=options.seed,
            batch_size=options.batch_size,
        )
    )
    return [
        resampled_record(index + 1, record.identifier, record.sequence, new[index])
        for index, record in enumerate(starts)
    ]


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


def resampled_record(number: int, start: str, before: str, after: str) -> str:
    """Formats a sequence of a masked model; the header has its start and what differs from it.

    >>> print(resampled_record(1, "P1", "MKTAY", "MKSAF"))
    >generated_1 length=5 start=P1 changed=2
    MKSAF
    <BLANKLINE>
    """
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    return fasta_text(
        f"generated_{number} length={len(after)} start={start} changed={changed}", after
    )
