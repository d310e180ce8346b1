"""Families from files and lists of sequences, aligned or not."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from protlm.data.families.alignment import (
    CONSENSUS,
    align,
    is_aligned,
    place_of_query,
    rows_of,
)
from protlm.data.families.family import Family, Relative, keys_of
from protlm.data.families.filters import kept
from protlm.data.records import ReadOptions, Record, Tally, read_records
from protlm.data.records.in_memory import SequenceLike, letters_of, name_of
from protlm.data.records.record import RANGE, SEVERAL, Names, residues
from protlm.data.records.stockholm import is_stockholm, stockholm_records
from protlm.options.relatives import FamilyOptions, Weights
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of

_ROWS = ReadOptions(allow_gaps=True, allow_comments=True, origins=False, rows=True)
# Names of files that say that the records are rows, as those of equal lengths without gaps may be.
_ALIGNMENTS = (".a3m", ".a2m", ".afa")
# In a header of MMseqs2 and ColabFold: name, score, identity, E-value and ranges.
_IDENTITY = re.compile(r"\S+\t[\d.]+\t([01](?:\.\d+)?)\t[-+.\dEe]+\t")
# Of more relatives, these are drawn, since the time for their weights is that of all pairs.
MOST_RELATIVES = 20_000


@dataclass(frozen=True)
class Found:
    """Records that may be relatives, and what is known of them.

    Args:
        where: their file, for messages.
        digest: its SHA-256, or that of the sorted sequences of a list.
        records: those that can be used.
        aligned: whether they are rows of an alignment.
        counts: those that cannot be used, by reason.
        identities: of names, where a table has them.
    """

    where: str
    digest: str
    records: Sequence[Record]
    aligned: bool
    counts: Counter[str] = field(default_factory=Counter)
    identities: Mapping[str, float] = field(default_factory=dict)


def read_family(
    source: Path | Iterable[SequenceLike],
    query: str | None,
    name: str = "",
    options: FamilyOptions | None = None,
) -> Family:
    """Reads the relatives of a query from a file, plain or gzip, or takes those of a list.

    A file is an alignment (A3M, A2M, FASTA with gaps, Stockholm), in which the query is a row, or a
    sequence file without one, in which every record is a relative: FASTA without gaps and lower
    case, even if the sequences have one length, but for files named .a3m, .a2m or .afa. Sequences
    of a list are aligned if they have gaps or lower case.

    Args:
        source: the file; or text, pairs of a name and text, or objects of Biopython.
        query: the residues of the query in capitals; None is the first row of an alignment; "",
            too, and beside unaligned sequences no query.
        name: the name of the query, which decides the draws with the seed and the file.
        options: the filters; by default those of the command line.
    """
    found = _of_file(source) if isinstance(source, Path) else _of_list(source)
    return family(found, query, name, options)


def _of_file(path: Path) -> Found:
    """Returns the records of a file."""
    tally = Tally()
    is_marked = is_stockholm(path)
    records = [*(stockholm_records(path, tally) if is_marked else read_records(path, tally, _ROWS))]
    counts = tally.rejected + tally.filtered
    if counts[SEVERAL]:
        _, _, line = tally.listed[SEVERAL][0]
        raise InputDataError(
            f"{path}, line {line}: there is a ',' in the sequence, as contexts of E1 have them, "
            "several proteins in one record; write each protein as a record"
        )
    if not records:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
        raise InputDataError(f"{path}: none of its records can be used: {reasons}")
    is_named = path.name.removesuffix(".gz").lower().endswith(_ALIGNMENTS)
    aligned = is_marked or is_named or is_aligned(records)
    return Found(str(path), sha256_of(path), records, aligned, counts)


def _of_list(sequences: Iterable[SequenceLike]) -> Found:
    """Returns sequences that a program holds."""
    tally, records = Tally(), list[Record]()
    for number, one in enumerate(sequences, start=1):
        row = letters_of(one, f"relative {number}")
        sequence, reason = residues(row, tally, _ROWS)
        if reason:
            raise InputDataError(f"relative {number} is refused: {reason}; leave it out")
        identifier = name_of(one) or f"relative {number}"
        records.append(Record(identifier, identifier, sequence, number, row=row))
    digest = digest_of(record.row or "" for record in records)
    return Found("the list", digest, records, is_aligned(records))


def digest_of(sequences: Iterable[str]) -> str:
    """Returns the SHA-256 of a list of sequences, whatever their order, in hexadecimal."""
    return hashlib.sha256("\n".join(sorted(sequences)).encode()).hexdigest()


def family(found: Found, query: str | None, name: str, options: FamilyOptions | None) -> Family:
    """Returns the family of the records that are left after the filters; refuses an empty one."""
    options, counts = options or FamilyOptions(), Counter(found.counts)
    if found.aligned:
        rows = rows_of(found.records, found.where)
        place = place_of_query(found.records, query or None, name, found.where)
        # Without residues, the query is a new protein, of which a row gives the columns alone.
        is_new = query == ""
        aligned = align(found.records, place, *rows)
        relatives = _of_alignment(found, place, aligned, counts, is_new=is_new)
        query = "" if is_new else found.records[place].sequence
        row = f"row {place + 1}" if place else "the first"
        row += " gives the columns" if is_new else " the query"
        source = f"{found.where}: an alignment of {len(found.records):,} rows, {row}"
    else:
        query = _with_query(found, query, options)
        relatives = [_unaligned(one, found.identities) for one in found.records]
        source = f"{found.where}: unaligned sequences ({len(found.records):,})"
    if options.whole_relatives is not None:
        relatives = [*_whole(relatives, options.whole_relatives, counts)]
        source += f", whole proteins from {options.whole_relatives}"
    relatives = [*kept(query, name, relatives, options, counts)]
    if len(relatives) > MOST_RELATIVES:
        counts[f"by chance, beyond {MOST_RELATIVES:,}"] += len(relatives) - MOST_RELATIVES
        chosen = np.sort(keys_of(relatives).argsort()[:MOST_RELATIVES])
        relatives = [relatives[place] for place in chosen]
    is_uniform = not found.aligned or options.weights == Weights.uniform
    made = Family(query, name, tuple(relatives), found.digest, +counts, source, is_uniform)
    if not (made.relatives or options.allow_none):
        raise InputDataError(
            f"{made}. No relative is left for the query{f' {name}' * bool(name)}: change the "
            "limits, or use it alone",
            {"allow_none": True},
        )
    return made


def _with_query(found: Found, query: str | None, options: FamilyOptions) -> str:
    """Returns the query of unaligned sequences; refuses what needs an alignment."""
    what = f"{found.where}: the sequences are not aligned (no gap, no lower case)"
    if query is None:
        raise InputDataError(f"{what}, so that all are relatives; give the query beside them")
    if options.weights == Weights.neighbors:
        raise InputDataError(
            f"{what}, so that no columns show which are neighbors; draw them uniformly",
            {"weights": Weights.uniform},
        )
    return query


def _of_alignment(
    found: Found, place: int, aligned: Iterable[Relative], counts: Counter[str], *, is_new: bool
) -> list[Relative]:
    """Returns the rows that are not the query; all of them for a new protein."""
    rows = [
        row
        for number, row in enumerate(aligned)
        if (is_new or number != place) and not CONSENSUS.match(found.records[number].header)
    ]
    counts["consensus of the alignment"] += len(found.records) - (not is_new) - len(rows)
    return rows


def _unaligned(record: Record, identities: Mapping[str, float]) -> Relative:
    """Returns a relative, with its identity if a table or its header has it."""
    told = _IDENTITY.match(record.header)
    identity = identities.get(record.identifier, float(told[1]) if told else None)
    return Relative(record.identifier, record.sequence, identity)


def _whole(relatives: Sequence[Relative], path: Path, counts: Counter[str]) -> Iterator[Relative]:
    """Yields the whole proteins of relatives, where a sequence file has them."""
    names = [RANGE.sub("", relative.name) for relative in relatives]
    proteins, _ = sequences_named(path, names)
    for name, relative in zip(names, relatives, strict=True):
        whole, columns = proteins.get(name, ""), relative.columns
        # Of a domain that is there twice, the range in the name says which it is.
        first = int(relative.name[len(name) + 1 :].partition("-")[0] or 1) - 1
        is_there = whole.startswith(relative.residues, first)
        begin = first if is_there else whole.find(relative.residues)
        if begin < 0:
            counts[f"{'other than' if whole else 'not'} in {path.name}"] += 1
            continue
        if columns is not None:
            # Around the aligned part, the numbering continues.
            before, after = np.arange(begin), len(whole) - begin - len(columns)
            around = columns[0] - before[::-1] - 1, columns[-1] + 1 + np.arange(after)
            columns = np.concatenate([around[0], columns, around[1]], dtype=np.int32)
        yield relative._replace(residues=whole, columns=columns)


def sequences_named(path: Path, names: Iterable[str]) -> tuple[dict[str, str], int]:
    """Returns the sequences of these names in a file, and its number of records.

    Names are also found by the accessions in them.
    """
    known, sequences, tally = Names(dict.fromkeys(names), path), dict[str, str](), Tally()
    for record in read_records(path, tally):
        name = known.find(record.identifier)
        if name is not None and sequences.setdefault(name, record.sequence) != record.sequence:
            raise InputDataError(
                f"{path}, line {record.line}: {record.identifier} is there with another sequence; "
                "leave one record of each name"
            )
    tally.warn_of_rejected(path)
    return sequences, tally.records
