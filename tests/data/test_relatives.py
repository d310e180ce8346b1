"""Relatives by shared 6-mers: against sets, and by what identity leaves of them."""

import numpy as np
import pytest

from protlm.data import relatives as module
from protlm.data.relatives import (
    MIN_SHARED,
    SKETCH_SIZE,
    K,
    KmerIndex,
    best_diagonal,
    highest_shared_fractions,
    leaks,
    sketch,
    unrelated,
)
from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY
from tests.marks import slow_but


def random_protein(rng: np.random.Generator, length: int = 400, letters: str = STANDARD) -> str:
    return "".join(rng.choice(list(letters), length))


def random_sequences(number: int, length: int = 60) -> list[str]:
    rng = np.random.default_rng(0)
    return [random_protein(rng, length) for _ in range(number)]


def mutated(rng: np.random.Generator, sequence: str, identity: float) -> str:
    """Keeps each residue with the probability `identity`, and otherwise substitutes another."""
    codes = np.array([STANDARD.index(letter) for letter in sequence])
    others = (codes + rng.integers(1, 20, len(codes))) % 20
    mixed = np.where(rng.random(len(codes)) < identity, codes, others)
    return "".join(np.array(list(STANDARD))[mixed])


def kmer_set(sequence: str) -> set[str]:
    """The reference implementation."""
    words = (sequence[i : i + K] for i in range(len(sequence) - K + 1))
    return {word for word in words if set(word) <= set(STANDARD)}


def sketch_of(sequence: str) -> np.ndarray:
    return sketch(VOCABULARY.encode(sequence))


def best_fractions(sketches: list[np.ndarray], *batches: list[str]) -> np.ndarray:
    index = KmerIndex(sketches)
    for batch in batches:
        index.search([VOCABULARY.encode(one) for one in batch])
    return index.highest_shared_fractions


def test_kmers_are_numbered_one_to_one() -> None:
    rng = np.random.default_rng(0)
    seen = {}
    for length in (0, 1, K - 1, K, K + 1, 2_000):
        sequence = random_protein(rng, length, RESIDUES)
        words = [sequence[i : i + K] for i in range(length - K + 1)]
        numbers = module.kmers(VOCABULARY.encode(sequence)).tolist()
        assert len(numbers) == len(words)
        for word, number in zip(words, numbers, strict=True):
            standard = word if set(word) <= set(STANDARD) else None
            assert seen.setdefault(number, standard) == standard
            assert (number == 20**K) == (standard is None)
    assert len(set(seen)) == len(set(seen.values()))


def test_a_sketch_is_a_sample_of_distinct_kmers() -> None:
    rng = np.random.default_rng(1)
    sequence = random_protein(rng, 60, RESIDUES) * 3
    numbers = {int(n) for n in module.kmers(VOCABULARY.encode(sequence)) if n < 20**K}
    assert set(sketch_of(sequence).tolist()) <= numbers
    assert len(sketch_of(random_protein(rng, 40))) == 40 - K + 1
    assert len(set(sketch_of(random_protein(rng, 2_000)).tolist())) == SKETCH_SIZE
    for too_little in ("", "MKV", "X" * 100, "MKVXL" * 20):
        assert len(sketch_of(too_little)) == 0


def test_all_kmers_are_equally_likely() -> None:
    """Half of the protein has the letters with the lowest numbers, half those with the highest."""
    rng = np.random.default_rng(5)
    halves = [random_protein(rng, 400, letters) for letters in ("LAGVSERTID", "PKQNFYMHWC")]
    for half in halves:
        (found,) = best_fractions([sketch_of("".join(halves))], [half])
        assert abs(found - 0.5) < 4 * 0.5 / SKETCH_SIZE**0.5


@pytest.mark.parametrize("pairs", [1, 100, 1 << 23])
def test_the_index_agrees_with_sets(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any batches and any division of work, with repeats and letters that no k-mer has."""
    monkeypatch.setattr(module, "_PAIRS", pairs)
    monkeypatch.setattr(module, "_BATCH_RESIDUES", 200)
    rng = np.random.default_rng(2)
    parts = [random_protein(rng, 12, "ACXL") for _ in range(30)]
    queries = ["".join(rng.choice(parts, rng.integers(1, 5))) for _ in range(40)]
    targets = ["".join(rng.choice(parts, rng.integers(0, 9))) for _ in range(50)]
    sketches = [sketch_of(query) for query in queries]
    found = best_fractions(sketches, *(targets[start : start + 7] for start in range(0, 50, 7)))
    known = [set(module.kmers(VOCABULARY.encode(target)).tolist()) for target in targets]
    expected = [
        max(len(one & set(wanted.tolist())) for one in known) / len(wanted)
        if len(wanted)
        else np.nan
        for wanted in sketches
    ]
    np.testing.assert_array_equal(found, expected)
    assert len(set(expected)) > 5
    ones, others = ([kmer_set(sequence) for sequence in some] for some in (queries, targets))
    of_shorter = [
        max(len(one & other) / max(min(len(one), len(other)), 20) for other in others)
        for one in ones
    ]
    np.testing.assert_array_equal(highest_shared_fractions(queries, targets), of_shorter)
    assert len(set(of_shorter)) > 5
    found = highest_shared_fractions(queries, targets, enough=0.3)
    assert ((found >= 0.3) == (np.array(of_shorter) >= 0.3)).all() and (found <= of_shorter).all()
    assert 0 < (found >= 0.3).sum() < len(found)


def test_a_fragment_is_found_in_a_longer_protein() -> None:
    whole, other = random_sequences(2, 400)
    assert highest_shared_fractions([whole, other], [whole[100:140]]).tolist() == [1, 0]
    # One 6-mer shared by a peptide is not a relative.
    assert 0 < highest_shared_fractions([whole], [whole[100:106] + other[:3]])[0] < MIN_SHARED
    assert highest_shared_fractions(["MKTAYI", "MK"], ["MK", "MK"]).tolist() == [0, 0]
    assert highest_shared_fractions(["MKTAYI"], []).tolist() == [0]
    # No k-mer extends across the border of two sequences of a batch.
    assert best_fractions([sketch_of("MKVLWAARND")], ["MKVLW", "AARND"]).tolist() == [0]


@pytest.mark.slow
def test_what_is_taken_has_no_relatives_and_what_is_left_out_has_one() -> None:
    one, two, *others = random_sequences(60)
    # They share n - 5 of 55 6-mers with `one`, 6 % from n = 9 on.
    parts = [one[:n] + other[n:] for n, other in zip(range(3, 43, 2), others[5:25], strict=True)]
    short = ["MKTA", "MKTA", "MKTAYIA", "MKTAYIA"]
    sequences = [one, *others[:5], *parts, two, one, two[10:30], *short]
    taken = unrelated(sequences, limit=len(sequences))
    expected: list[int] = []
    for place, sequence in enumerate(sequences):
        before = [sequences[n] for n in expected]
        if sequence not in before and highest_shared_fractions([sequence], before)[0] < MIN_SHARED:
            expected.append(place)
    assert taken == expected
    assert [sequences[place] for place in taken] == [
        *sequences[:6],
        *parts[:3],
        two,
        "MKTA",
        "MKTAYIA",
    ]
    # Those beyond the limit are not read.
    endless = (sequences[place] if place < 10 else pytest.fail() for place in range(11))
    assert unrelated(endless, limit=5) == expected[:5]


def test_work_is_divided_to_bound_memory(monkeypatch: pytest.MonkeyPatch, look_at) -> None:
    """A hundred sketches of one protein, and a batch of it: each k-mer is in a hundred pairs."""
    monkeypatch.setattr(module, "_PAIRS", 10_000)
    protein = random_protein(np.random.default_rng(6), 60)
    sizes: list[int] = []
    look_at(KmerIndex, "_count", lambda _, numbers, rows, rest: sizes.append(100 * len(rows)))
    found = best_fractions([sketch_of(protein)] * 100, [protein] * 50)
    of_one = 100 * len(sketch_of(protein))
    assert sum(sizes) == 50 * of_one
    assert max(sizes) <= 10_000 + of_one
    assert found.tolist() == [1] * 100


def test_relatives_that_are_found_are_not_compared_again() -> None:
    protein = random_protein(np.random.default_rng(6), 60)
    others = iter([protein] * 5)
    assert highest_shared_fractions([protein] * 9, others, enough=MIN_SHARED).tolist() == [1] * 9
    assert len([*others]) == 4


@pytest.mark.parametrize("identity", slow_but([1, 0.95, 0.8, 0.5, 0.3], 0.8))
def test_the_sketch_estimates_containment_which_is_a_power_of_identity(identity: float) -> None:
    rng = np.random.default_rng(3)
    proteins = [random_protein(rng) for _ in range(300)]
    copies = [mutated(rng, protein, identity) for protein in proteins]
    shares = best_fractions([sketch_of(protein) for protein in proteins], copies)
    exact = np.array(
        [
            len(kmer_set(one) & kmer_set(copy)) / len(kmer_set(one))
            for one, copy in zip(proteins, copies, strict=True)
        ]
    )
    # A sample of 64 without replacement, from each of 300: five standard errors of the mean.
    spread = np.sqrt(exact * (1 - exact) / SKETCH_SIZE)
    assert abs((shares - exact).mean()) <= 5 * np.sqrt((spread**2).sum()) / 300 + 1e-3
    expected = identity**K
    # Neighboring k-mers change together, so a protein of 400 counts as 400 / K of them.
    error = np.sqrt(expected * (1 - expected) * (2 * K) / 400 / 300)
    assert abs(exact.mean() - expected) <= 5 * error + 1e-3


@pytest.mark.parametrize("shift", [-40, 0, 3, 25])
@pytest.mark.parametrize("identity", [1.0, 0.4])
def test_the_best_diagonal_is_that_of_the_shift(shift: int, identity: float) -> None:
    rng = np.random.default_rng(abs(shift))
    first = random_protein(rng, 300)
    ends = random_protein(rng, max(-shift, 0)), random_protein(rng, 30)
    other = ends[0] + mutated(rng, first, identity)[max(shift, 0) :] + ends[1]
    assert best_diagonal(VOCABULARY.encode(first), VOCABULARY.encode(other)) == shift


@pytest.mark.parametrize(
    ("first", "other", "shift"),
    [
        ("MKTAYIAK", "WWWWWWWW", 0), ("", "MKT", 0), ("MK", "MKTA", 0), ("MXTAY", "GGMXTAY", -2),
        # The 3-mer with X is not shared; a repeat is not unique; of equals the smallest shift.
        ("GGMXT", "MXT", 0), ("QQQQQQMKT", "QQQQQQGMKT", -1), ("MKTGGHIV", "HIVMKT", -3),
        ("MKTGGGHIV", "GHIVMKT", 5),
    ],
)  # fmt: skip
def test_shifts_of_special_proteins(first: str, other: str, shift: int) -> None:
    assert best_diagonal(VOCABULARY.encode(first), VOCABULARY.encode(other)) == shift


@pytest.mark.parametrize("length", [60, 100, 350])
def test_what_is_98_percent_identical_leaks(length: int) -> None:
    """Over 95 % of the shorter one, wherever the others are; at 80 % identity nothing does."""
    rng = np.random.default_rng(length)
    for _ in range(50):
        query = random_protein(rng, length)
        number, end = int(0.02 * length), int(0.05 * length)
        places = rng.choice(length, number, replace=False)
        near = np.array([*query])
        near[places] = np.where(near[places] == "W", "M", "W")
        text = random_protein(rng, 20) + "".join(near)[end:]
        others = [text, mutated(rng, query, 0.8), random_protein(rng, 5), query]
        first, *apart, last = leaks(VOCABULARY.encode(query), list(map(VOCABULARY.encode, others)))
        assert "80 %" in first and apart == ["", ""] and "equal" in last
