"""Limits on the number of rejected records, beyond which the input is taken to be wrong."""

import math
import sys

from protlm.data.records import Tally
from protlm.data.records.residues import GAP, NUL
from protlm.system.errors import InputDataError

# NUL bytes are holes in a file that was never written completely.
_MAX_NUL_RATE = 0.001
# Fewer records are not representative of the input.
_ENOUGH_RECORDS = 100_000


def warn_of_rejects(before: Tally, latest: Tally, max_reject_rate: float) -> bool:
    """Warns on standard error if the fraction of rejected records exceeds the limit so far.

    The build continues, because later records may lower the fraction.

    Args:
        before: counts of the finished segments.
        latest: counts of the records after them.
        max_reject_rate: maximum fraction of records that may be rejected.

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
        f"them ({number:,}) for this reason: {reason}; if more than {max_reject_rate:.2%} are "
        "rejected at the end, no data set is made: stop now with Ctrl-C, and resume by the same "
        "command with a higher --max-reject-rate",
        file=sys.stderr,
    )
    return True


def refuse_too_many_rejects(tally: Tally, max_reject_rate: float) -> None:
    """Refuses a data set with too many rejected records, or with no record left."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.rejected.items()))
    if GAP in tally.rejected:
        reasons += "; --allow-gaps removes the gaps of alignments"
    if tally.num_filtered and tally.num_rejected + tally.num_filtered == tally.records:
        filtered = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.filtered.items()))
        raise InputDataError(
            f"none of the {tally.records:,} records is left: {tally.num_filtered:,} were not "
            f"selected ({filtered}), {tally.num_rejected:,} cannot be used"
        )
    if tally.num_rejected == tally.records:
        raise InputDataError(
            f"none of the {tally.records:,} records can be used: {reasons}; the first of them "
            f"{_first(tally)}"
        )
    if tally.rejected.get(NUL, 0) > _MAX_NUL_RATE * tally.records:
        raise InputDataError(
            f"{tally.rejected[NUL]:,} of {tally.records:,} records contain NUL bytes: the file is "
            "damaged; download it again"
        )
    if tally.num_rejected > max_reject_rate * tally.records:
        raise InputDataError(
            f"{tally.num_rejected:,} of {tally.records:,} records cannot be used ({reasons}), "
            f"more than {max_reject_rate:.2%}, the first of them {_first(tally)}: fix the file, "
            f"or type: --max-reject-rate {_rounded_up(tally.num_rejected / tally.records)}"
        )


def _first(tally: Tally) -> str:
    """Lists the first record of each reason, with its file and line."""
    return "; ".join(
        f"{identifier} ({file}, line {line}: {reason})"
        for reason, listed in sorted(tally.listed.items())
        for identifier, file, line in listed[:1]
    )


def _rounded_up(rate: float) -> float:
    """Returns the rate, rounded up to thousandths.

    >>> _rounded_up(0.0512)
    0.052
    """
    return math.ceil(rate * 1000) / 1000
