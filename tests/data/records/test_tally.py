"""Tallies of parts are the tally of the whole, whatever process they come from."""

import pickle
import random

from protlm.data.records import MAX_LISTED, Tally


def test_the_sum_of_parts_is_the_whole():
    rng = random.Random(0)
    whole, parts = Tally(), [Tally() for _ in range(7)]
    for part in parts:
        for line in range(rng.randrange(400)):
            for tally in (whole, part):
                tally.records += 1
            reason = rng.choice("abc")
            match rng.choice(["reject", "filter", "change", "note"]):
                case "reject":
                    whole.reject(reason, f"P{line}", "x.fasta", line)
                    part.reject(reason, f"P{line}", "x.fasta", line)
                case kind:
                    getattr(whole, kind)(reason)
                    getattr(part, kind)(reason)
    total = Tally()
    for part in parts:
        total.add(pickle.loads(pickle.dumps(part)))
    assert total == whole
    assert total.num_rejected + total.num_filtered == sum(
        part.num_rejected + part.num_filtered for part in parts
    )


def test_the_first_thousand_of_all_parts_are_listed():
    parts = [Tally() for _ in range(3)]
    for number, part in enumerate(parts):
        for line in range(MAX_LISTED - 300):
            part.reject("digit", f"{number}/{line}", "x.fasta", line)
    total = Tally()
    for part in parts:
        total.add(part)
    assert total.rejected["digit"] == 3 * (MAX_LISTED - 300)
    listed = [identifier for identifier, _, _ in total.listed["digit"]]
    expected = [identifier for part in parts for identifier, _, _ in part.listed["digit"]]
    assert listed == expected[:MAX_LISTED]
