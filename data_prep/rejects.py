"""How many records may be left out before something is wrong with the input."""

import math
import sys

from protlm.data.records import Tally
from protlm.data.records.residues import NUL
from protlm.errors import InputDataError

# NUL bytes are holes of a file that was never written to its end.
_MAX_NUL_RATE = 0.001
# Fewer say little about all the others.
_ENOUGH_RECORDS = 100_000


def warn_of_rejects(before: Tally, latest: Tally, max_reject_rate: float) -> bool:
    """Warns on standard error of a share that is refused if it stays so to the end.

    Nothing is ended for it: the records to come may bring the share down again.

    Args:
        before: of the finished segments.
        latest: of the records behind them.
        max_reject_rate: the share of records that may be rejected.

    Returns:
        Whether it warned.
    """
    records = before.records + latest.records
    rejected = before.num_rejected + latest.num_rejected
    if records < _ENOUGH_RECORDS or rejected <= max_reject_rate * records:
        return False
    reason, number = (before.rejected + latest.rejected).most_common(1)[0]
    print(
        f"protlm: warning: {rejected:,} of the first {records:,} records cannot be used, most of "
        f"them ({number:,}) for this: {reason}; if more than {max_reject_rate:.2%} are so at the "
        "end, nothing is made: Ctrl-C stops here, and the same command with a higher "
        "--max-reject-rate goes on",
        file=sys.stderr,
    )
    return True


def refuse_too_many_rejects(tally: Tally, max_reject_rate: float) -> None:
    """Refuses a set of which more was left out than is allowed, or all of it.

    Raises:
        InputDataError: the share of records that were rejected is above `max_reject_rate`, or no
            record is left.
    """
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.rejected.items()))
    if tally.num_filtered and tally.num_rejected + tally.num_filtered == tally.records:
        filtered = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.filtered.items()))
        raise InputDataError(
            f"none of the {tally.records:,} records is left: {tally.num_filtered:,} were not "
            f"wanted ({filtered}), {tally.num_rejected:,} cannot be used"
        )
    if tally.num_rejected == tally.records:
        raise InputDataError(
            f"none of the {tally.records:,} records can be used: {reasons}; the first of them "
            f"{_first(tally)}"
        )
    if tally.rejected.get(NUL, 0) > _MAX_NUL_RATE * tally.records:
        raise InputDataError(
            f"{tally.rejected[NUL]:,} of {tally.records:,} records hold NUL bytes: the file is "
            "damaged; fetch it again"
        )
    if tally.num_rejected > max_reject_rate * tally.records:
        raise InputDataError(
            f"{tally.num_rejected:,} of {tally.records:,} records cannot be used ({reasons}), "
            f"more than {max_reject_rate:.2%}, the first of them {_first(tally)}: mend the file, "
            f"or type: --max-reject-rate {_rounded_up(tally.num_rejected / tally.records)}"
        )


def _first(tally: Tally) -> str:
    """The first record of each reason, with its place."""
    return "; ".join(
        f"{identifier} ({file}, line {line}: {reason})"
        for reason, listed in sorted(tally.listed.items())
        for identifier, file, line in listed[:1]
    )


def _rounded_up(rate: float) -> float:
    """The rate in thousandths, never less than it is.

    >>> _rounded_up(0.0512)
    0.052
    """
    return math.ceil(rate * 1000) / 1000
