"""k-mers, sketches, and their estimates of similarity."""

import numpy as np
import pytest

from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY
from protlm.data_prep import sketch as module
from protlm.data_prep.sketch import SKETCH_SIZE, K, SketchIndex, kmers, sketch


def tokens_of(sequence):
    return VOCABULARY.encode(sequence)


def random_protein(rng, length=400, letters=STANDARD):
    return "".join(rng.choice(list(letters), length))


def mutated(rng, sequence, identity):
    """Keeps each residue with the probability `identity`, and otherwise substitutes another."""
    codes = np.array([STANDARD.index(letter) for letter in sequence])
    others = (codes + rng.integers(1, 20, len(codes))) % 20
    mixed = np.where(rng.random(len(codes)) < identity, codes, others)
    return "".join(np.array(list(STANDARD))[mixed])


def kmer_set(sequence):
    """The reference implementation."""
    words = (sequence[i : i + K] for i in range(len(sequence) - K + 1))
    return {word for word in words if set(word) <= set(STANDARD)}


def containment(query, target):
    return len(kmer_set(query) & kmer_set(target)) / len(kmer_set(query))


def test_kmers_are_numbered_one_to_one():
    rng = np.random.default_rng(0)
    seen = {}
    for length in (0, 1, K - 1, K, K + 1, 2_000):
        sequence = random_protein(rng, length, RESIDUES)
        words = [sequence[i : i + K] for i in range(length - K + 1)]
        numbers = kmers(tokens_of(sequence)).tolist()
        assert len(numbers) == len(words)
        for word, number in zip(words, numbers, strict=True):
            standard = word if set(word) <= set(STANDARD) else None
            assert seen.setdefault(number, standard) == standard
            assert (number == 20**K) == (standard is None)
    assert len(set(seen)) == len(set(seen.values()))


def test_a_sketch_is_a_sample_of_distinct_kmers():
    rng = np.random.default_rng(1)
    sequence = random_protein(rng, 60, RESIDUES) * 3
    numbers = {int(n) for n in kmers(tokens_of(sequence)) if n < 20**K}
    assert set(sketch(tokens_of(sequence)).tolist()) <= numbers
    short = random_protein(rng, 40)
    assert len(sketch(tokens_of(short))) == 40 - K + 1
    long = random_protein(rng, 2_000)
    assert len(set(sketch(tokens_of(long)).tolist())) == SKETCH_SIZE
    for too_little in ("", "MKV", "X" * 100, "MKVXL" * 20):
        assert len(sketch(tokens_of(too_little))) == 0


def test_all_kmers_are_equally_likely():
    """Half of the protein has the letters with the lowest numbers, half those with the highest."""
    rng = np.random.default_rng(5)
    halves = [random_protein(rng, 400, letters) for letters in ("LAGVSERTID", "PKQNFYMHWC")]
    index = SketchIndex([sketch(tokens_of("".join(halves)))])
    for half in halves:
        index.search([tokens_of(half)])
        assert abs(index.highest_shared_fractions[0] - 0.5) < 4 * 0.5 / SKETCH_SIZE**0.5


@pytest.mark.parametrize("pairs", [1, 100, 1 << 23])
def test_the_index_agrees_with_sets(pairs, monkeypatch):
    """For any batches and any division of work, with repeats and letters that no k-mer has."""
    monkeypatch.setattr(module, "_PAIRS", pairs)
    rng = np.random.default_rng(2)
    parts = [random_protein(rng, 12, "ACXL") for _ in range(30)]
    queries = ["".join(rng.choice(parts, rng.integers(1, 5))) for _ in range(40)]
    targets = ["".join(rng.choice(parts, rng.integers(0, 9))) for _ in range(50)]
    sketches = [sketch(tokens_of(query)) for query in queries]
    index = SketchIndex(sketches)
    for start in range(0, 50, 7):
        index.search([tokens_of(target) for target in targets[start : start + 7]])
    found = [set(kmers(tokens_of(target)).tolist()) for target in targets]
    expected = [
        max(len(found_in & set(one.tolist())) for found_in in found) / len(one)
        if len(one)
        else np.nan
        for one in sketches
    ]
    np.testing.assert_array_equal(index.highest_shared_fractions, expected)
    assert any(0 < share < 1 for share in expected)


def test_work_is_divided_to_bound_memory(monkeypatch):
    """A hundred sketches of one protein, and a batch of it: each k-mer is in a hundred pairs."""
    monkeypatch.setattr(module, "_PAIRS", 10_000)
    protein = tokens_of(random_protein(np.random.default_rng(6), 60))
    index = SketchIndex([sketch(protein)] * 100)
    sizes = []
    count = index._count
    monkeypatch.setattr(
        index, "_count", lambda numbers, rows: (sizes.append(100 * len(rows)), count(numbers, rows))
    )
    index.search([protein] * 50)
    of_one = 100 * len(sketch(protein))
    assert sum(sizes) == 50 * of_one
    assert max(sizes) <= 10_000 + of_one
    assert index.highest_shared_fractions.tolist() == [1] * 100


def test_adjacent_sequences_share_no_kmers():
    """No k-mer extends across the border of two sequences of a batch."""
    index = SketchIndex([sketch(tokens_of("MKVLWAARND"))])
    index.search([tokens_of("MKVLW"), tokens_of("AARND")])
    assert index.highest_shared_fractions.tolist() == [0]


@pytest.fixture(scope="module")
def planted():
    """300 random proteins, and the fractions that mutated copies contain, by identity."""
    rng = np.random.default_rng(3)
    proteins = [random_protein(rng) for _ in range(300)]
    shares, exact = {}, {}
    for identity in (1, 0.95, 0.8, 0.5, 0.3):
        copies = [mutated(rng, protein, identity) for protein in proteins]
        index = SketchIndex([sketch(tokens_of(protein)) for protein in proteins])
        index.search([tokens_of(copy) for copy in copies])
        shares[identity] = index.highest_shared_fractions
        exact[identity] = np.array(
            [containment(one, copy) for one, copy in zip(proteins, copies, strict=True)]
        )
    index.search([tokens_of(random_protein(rng)) for _ in range(3_000)])
    shares["with strangers"] = index.highest_shared_fractions
    return shares, exact


@pytest.mark.parametrize("identity", [1, 0.95, 0.8, 0.5, 0.3])
def test_the_sketch_estimates_containment_which_is_a_power_of_identity(planted, identity):
    shares, exact = planted[0][identity], planted[1][identity]
    # A sample of 64 without replacement, from each of 300: five standard errors of the mean.
    spread = np.sqrt(exact * (1 - exact) / SKETCH_SIZE)
    assert abs((shares - exact).mean()) <= 5 * np.sqrt((spread**2).sum()) / 300 + 1e-3
    expected = identity**K
    # Neighboring k-mers change together, so a protein of 400 counts as 400 / K of them.
    error = np.sqrt(expected * (1 - expected) * (2 * K) / 400 / 300)
    assert abs(exact.mean() - expected) <= 5 * error + 1e-3


def test_copies_are_found_by_their_identity(planted):
    """At a threshold of 0.5: copies at 95 % but none at 80 % or less, and no unrelated protein."""
    found = {identity: (shares >= 0.5).mean() for identity, shares in planted[0].items()}
    assert found[1] == 1
    assert found[0.95] > 0.95
    assert found[0.8] < 0.02
    assert found[0.5] == found[0.3] == found["with strangers"] == 0
    # A quarter of the k-mers is left at 80 % and a sixty-fourth at 50 %; strangers share one.
    assert (planted[0][0.8] >= 0.1).mean() > 0.95
    assert (planted[0]["with strangers"] <= 3 / SKETCH_SIZE).mean() > 0.95


def test_detection_follows_the_theory(planted):
    """A copy at 80 % passes a threshold with the probability of conserving these k-mers."""
    rng = np.random.default_rng(4)
    for identity, threshold in ((0.95, 0.7), (0.8, 0.25), (0.5, 0.03)):
        kept = rng.random((2_000, 400)) < identity
        whole = np.lib.stride_tricks.sliding_window_view(kept, K, axis=1).all(axis=2)
        drawn = rng.hypergeometric(whole.sum(1), (~whole).sum(1), SKETCH_SIZE) / SKETCH_SIZE
        expected, seen = (drawn >= threshold).mean(), (planted[0][identity] >= threshold).mean()
        assert abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / 300) + 0.01
