"""Which records are relatives of a query: filters, each with a count of what it leaves out."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from protlm.data.families.family import Relative
from protlm.data.records.record import entry_of
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError

# What is inside a sequence, or around it, has this percentage of the shorter in common, end to end.
_CONTAINED = 95


def relation(query: str, residues: str) -> str:
    """Returns whether a sequence is equal to the query, inside it or around it; or "".

    Of the shorter one, 95 % in one run of residues are in the longer one, so that a tag, a lost
    first residue or a fragment does not hide that they are one protein.

    >>> relation("MKTAYIAKQRQISFVKSHFS", "GSHMKTAYIAKQRQISFVKSHF")
    'around the query'
    >>> relation("MKTAYIAKQRXISFVKSHFS", "GMKTAYIAKQRQISFVKSHFS")
    'around the query'
    >>> relation("MKTAYIAKQRXISFVKSHFS", "MKTAYIAKQRWISFVK")
    'inside the query'
    >>> relation("MKTAYIAKQRQISFVKSHFS", "MKTAYIAKQRWISFVKSHFS")
    ''
    """
    if not query or query == residues:
        return query and "equal to the query"
    is_around = len(residues) > len(query)
    shorter, longer = sorted((query, residues), key=len)
    least = -(-_CONTAINED * len(shorter) // 100)
    begins = range(len(shorter) - least + 1)

    def is_found(begin: int, end: int) -> bool:
        run = shorter[begin:end]
        if "X" in query:
            # One that is unknown, or masked, may be any.
            either = "".join(f"[{residue}X]" for residue in run)
            pattern = run.replace("X", ".") if shorter is query else either
            return re.search(pattern, longer) is not None
        return run in longer

    # All runs of this length contain the middle, which is looked for first.
    is_in = is_found(begins[-1], least) and any(is_found(begin, begin + least) for begin in begins)
    return f"{'around' if is_around else 'inside'} the query" if is_in else ""


def kept(
    query: str,
    name: str,
    relatives: Sequence[Relative],
    options: FamilyOptions,
    counts: Counter[str],
) -> Iterator[Relative]:
    """Yields the records that are relatives, and counts the others by reason.

    Args:
        query: its residues.
        name: its name, or "".
        relatives: records that may be relatives.
        options: the limits; those of identities are for relatives whose identity is known.
        counts: what is left out, added to.
    """
    limits = options.min_identity, options.max_identity
    if limits != (0, 1) and any(one.identity is None for one in relatives):
        raise InputDataError(
            "identities to the query are not known without an alignment, a table or headers that "
            "have them of all relatives; give one of these",
            {"min_identity": None, "max_identity": None},
        )
    usual = options.min_coverage == FamilyOptions.min_coverage
    if not usual and any(one.letters is None for one in relatives):
        raise InputDataError(
            "how much of the query relatives cover is not known without an alignment",
            {"min_coverage": None},
        )
    seen, own = set[str](), entry_of(name)
    for relative in relatives:
        reason = (
            relation(query, relative.residues)
            or _reason(relative, options)
            or "with the name of the query" * (own == entry_of(relative.name) != "")
            or "repeated" * (relative.residues in seen)
        )
        if reason:
            counts[reason] += 1
        else:
            seen.add(relative.residues)
            yield relative


def _reason(relative: Relative, options: FamilyOptions) -> str:
    """Returns why a record is not taken, or ""."""
    coverage = 1 if relative.letters is None else (relative.letters != 0).mean()
    length, identity = len(relative.residues), relative.identity
    longest = options.max_residues or length
    reasons = {
        f"shorter than {options.min_residues:,} residues": length < options.min_residues,
        f"longer than {longest:,} residues": length > longest,
        f"with more than {options.max_unknown:.0%} of X": (
            relative.residues.count("X") > options.max_unknown * length
        ),
        f"aligned to less than {options.min_coverage:.0%} of the query": (
            coverage < options.min_coverage
        ),
        f"below {options.min_identity:.0%} identity": (
            identity is not None and identity < options.min_identity
        ),
        f"above {options.max_identity:.0%} identity": (
            identity is not None and identity > options.max_identity
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
