"""Labels of residues: letters or numbers, as many as there are residues, and masks of them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from protlm.data.tables import MISSING, number_of
from protlm.downstream.label_files import LIST, TRUTH, UNLABELED, Example
from protlm.system.errors import InputDataError

# Labels of residues may be too many or too few in a tenth of the proteins.
_NEARLY_ALL = 0.9
_PEPTIDE = 20
# An unknown score in the data of CheZOD and SETH.
_UNKNOWN = 999


def items_of(label: str) -> list[str]:
    """Returns the items of a list, separated by semicolons, commas or blanks.

    >>> items_of("[0.0, 1.0]"), items_of("1;2"), items_of("H E")
    (['0.0', '1.0'], ['1', '2'], ['H', 'E'])
    """
    return re.findall(r"""[^][(){}'",;\s]+""", label)


def _states(label: str, sequence: str) -> Sequence[str] | None:
    """Returns the letter or the item of each residue; None if there are not as many."""
    found = label if len(label) == len(sequence) else items_of(label)
    return found if len(found) == len(sequence) else None


def are_of_residues(examples: Sequence[Example]) -> bool:
    """Returns whether labels are of residues; refuses those that may be.

    They are if each has as many letters or items as its sequence has residues, and this is unlikely
    of names and numbers: the proteins are not peptides, or differ in length, or items are decimals.
    """
    labels = [one.label for one in examples]
    # Names of two or three classes and numbers, not masks, may be as long as peptides.
    is_few = len(set(labels)) <= min(3, len(labels) / 2) and max(map(len, labels)) <= _PEPTIDE
    are_numbers = all(number_of(one) is not None for one in labels)
    # A digit for each residue, or most of them with zeros or digits that no number begins with.
    pairs = [(one.label, len(one.sequence)) for one in examples]
    may_be = all(label.isdigit() and len(label) == size > 1 for label, size in pairs)
    may_be |= any(re.match("0[0-9]|[0-9]{20}", one) for one in labels)
    if is_few or (are_numbers and not may_be):
        return False
    fits = [
        len(one.sequence) > 1 and _states(one.label, one.sequence) is not None for one in examples
    ]
    if sum(fits) < _NEARLY_ALL * len(fits):
        return False
    lengths = {len(one.sequence) for one in examples}
    are_decimals = all("." in one and number_of(items_of(one)[0]) is not None for one in labels)
    if all(fits) and (max(lengths) > _PEPTIDE or len(lengths) > 2 or are_decimals):
        return True
    other = examples[fits.index(all(fits))]
    raise InputDataError(
        f"{other.place}: {sum(fits):,} of {len(fits):,} labels are as long as their sequences, and "
        f"this is {other.label[:30]!r}, of {len(other.sequence):,} residues: if they are of "
        "residues, write a letter or a number for each; otherwise choose the task",
        {"per_residue": True, "task": "class, multi-label or number"},
    )


def residue_examples(
    examples: Sequence[Example], counts: Counter[str], hidden: Counter[str]
) -> list[Example]:
    """Returns labels of a letter for each residue, or in all of numbers, separated by semicolons.

    Whole numbers from 0 to 9 become letters, and masked or missing ones `?`, which are counted.
    """
    rows = [_states_or_refusal(one) for one in examples]
    for one, states in zip(examples, rows, strict=True):
        for name, mask in one.masks.items():
            kept = [TRUTH.get(x.lower()) for x in _states(mask, one.sequence) or [""]]
            if None in kept:
                raise InputDataError(f"{one.place}: {name} lacks a 0 or 1 for each residue")
            for place, (state, is_kept) in enumerate(zip(states, kept, strict=True)):
                if not is_kept and state != UNLABELED:
                    states[place] = UNLABELED
                    hidden[f"by {name}"] += 1
    if {len(item) for states in rows for item in states} != {1}:
        meant = _meant({item for states in rows for item in states})
        hidden["that are 999, which is unknown"] += sum(
            number_of(item) == _UNKNOWN for states in rows for item in states
        )
        rows = [[meant[item] for item in states] for states in rows]
    join = "" if all(len(item) == 1 for states in rows for item in states) else LIST
    kept = [{*states} != {UNLABELED} for states in rows]
    counts["without a label"] += len(kept) - sum(kept)
    pairs = zip(examples, rows, kept, strict=True)
    return [replace(one, label=join.join(row)) for one, row, is_kept in pairs if is_kept]


def _states_or_refusal(one: Example) -> list[str]:
    if (states := _states(one.label, one.sequence)) is not None:
        return [*states]
    number = len(items_of(one.label) if LIST in one.label else one.label)
    raise InputDataError(
        f"{one.place}: {number} labels for the {len(one.sequence)} residues of {one.identifier}; "
        f"write a letter for each, or a number, separated by {LIST}, and {UNLABELED} where it is "
        "unknown"
    )


def _meant(items: set[str]) -> dict[str, str]:
    """Returns numbers and letters as they are written in labels of residues."""
    found = {}
    for item in items:
        value = number_of(item)
        digit = f"{value:.0f}" if value in range(10) else item
        found[item] = UNLABELED if item in MISSING or value == _UNKNOWN else digit
    words = [one for one in found.values() if one != UNLABELED and number_of(one) is None]
    if words and any(len(one) > 1 for one in found.values()):
        raise InputDataError(
            f"the label {words[0][:30]!r} of a residue is neither a letter nor a number"
        )
    return found
