"""Attention to annotated residues and pairs of residues, head by head (Vig et al. 2021).

Contacts, secondary structure and amino acids are those of structures; sites, bonds and regions
those that UniProt lists.

Beside the frequency of a property over all pairs (the background), the attention expected from the
distances alone is reported: the mean when weights are permuted among pairs of the same |i - j|,
because any local head attends to near pairs more often.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from protlm.analysis.dssp import HELIX, STRAND, secondary_structure
from protlm.analysis.precision import MIN_SEPARATION
from protlm.analysis.structures import Protein, ProteinChoice, longest_read
from protlm.analysis.uniprot_features import BOND, SITES, AnnotatedProtein, read_annotated
from protlm.data.vocabulary import STANDARD
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched
from studies.attended_pairs import MIN_ARCS, PropertySums, check_threshold, property_sums, summed

_RESIDUE_PROPERTIES = ("helix", "strand", *STANDARD)
NAMES = ("contact", *_RESIDUE_PROPERTIES)
# Random sign changes of a test, and the smallest p-value that they can give.
FLIPS = 20_000
LOWEST_P = 1 / (FLIPS + 1)
_FLIPS_AT_ONCE = 100


class _Pairs(NamedTuple):
    """A protein's pairs of residues: f of each property, [properties, L, L], and which count."""

    sequence: str
    properties: np.ndarray
    known_LL: np.ndarray


class _Group(NamedTuple):
    """Properties that are measured together, on the same proteins."""

    names: Sequence[str]
    proteins: list[_Pairs]

    def counted(self) -> np.ndarray:
        """Returns which proteins count for a property, bool [proteins, properties].

        Where UniProt lists no feature of a kind, it may only be unknown; such proteins do not
        count. The other properties are known in all proteins.
        """
        if set(self.names) <= set(NAMES):
            return np.ones((len(self.proteins), len(self.names)), dtype=bool)
        return np.array([pairs.properties.any(axis=(1, 2)) for pairs in self.proteins])


@final
class Annotations(Evaluation):
    """The fraction of each head's attention that goes to annotated residues or pairs.

    Contacts are counted over resolved pairs 6 or more apart, properties of the residue attended to
    over all pairs whose second residue is resolved; features of UniProt over all pairs of the
    proteins that have the feature. p-values are of sign flips over proteins of
    observed - expected, corrected for the number of heads by the largest statistic of all heads.

    Structures are as for `ProteinChoice`. Proteins of `uniprot` are drawn, as many, and relatives
    of one drawn before are left out. Homologs below the threshold, 6 % of the 6-mers, remain,
    and the sign flips take them as independent.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        uniprot: str | None = None,
        max_proteins: int = 100,
        max_residues: int = 400,
        threshold: float = 0.3,
        seed: int = 0,
    ) -> None:
        check_threshold(threshold)
        self.proteins = ProteinChoice(structures, max_proteins, max_residues)
        self.uniprot = None if uniprot is None else Path(uniprot)
        self.threshold, self.seed = threshold, seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns for each property the background, and the values of all heads, [N, H]."""
        proteins = self.proteins.read(model)
        groups = _structure_groups(proteins)
        result: dict[str, Any] = {"num_proteins": len(proteins), "threshold": self.threshold}
        if self.uniprot is not None:
            found = read_annotated(
                self.uniprot,
                max_proteins=self.proteins.max_proteins,
                max_residues=longest_read(model, self.proteins.max_residues),
                seed=self.seed,
            )
            groups += _feature_groups(found.proteins)
            result["uniprot"] = {
                "num_proteins": len(found.proteins),
                "proteins_with_features": found.num_in_file,
                "drawn": found.num_drawn,
                "relatives_left_out": found.num_drawn - len(found.proteins),
                "features_left_out": found.left_out,
                "records_rejected": found.rejected,
            }
        for group in groups:
            _describe(group, result)
        for who, one in compared(model, self.seed).items():
            result[who] = self._measured(one, groups, who)
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values, rows = results[NO_SPLIT], []
        proteins_with = values["proteins_with"]
        for name in values["background"]:
            for who in ("model", "random_weights"):
                found = {key: np.array(x) for key, x in values[who][name].items()}
                ratio = found["weighted"] / np.maximum(found["expected"], 1e-12)
                layer, head = np.unravel_index(int(ratio.argmax()), ratio.shape)
                at = (layer, head)
                above = found["threshold"][at]
                fractions = found["weighted"][at], found["expected"][at], values["background"][name]
                cells = [name, who, f"{layer + 1}-{head + 1}", *(f"{x:.2%}" for x in fractions)]
                p = found["p_value"][at]
                cells.append(f"≤ {LOWEST_P:.2g}" if p <= LOWEST_P else f"{p:.2g}")
                cells.append("" if above is None else f"{above:.2%}")
                rows.append([*cells, f"{int(found['arcs'][at]):,}", str(proteins_with[name])])
        columns = ("attention to", "predictor", "layer-head", "attention", "by distance")
        columns += ("background", "p", f"a ≥ {values['threshold']:g}", "pairs above", "proteins")
        caption = (
            "the head with the highest ratio of attention to that expected by distance; p: "
            "two-sided, corrected for the number of heads"
        )
        if uniprot := values.get("uniprot"):
            caption += (
                f"\n{uniprot['proteins_with_features']:,} proteins with features in the file: "
                f"{uniprot['drawn']:,} drawn, {uniprot['relatives_left_out']:,} of them left out "
                f"as relatives, {uniprot['num_proteins']:,} measured"
            )
            for what in ("features left out", "records rejected"):
                for reason, number in uniprot[what.replace(" ", "_")].items():
                    caption += f"\n{what} in the file, {reason}: {number:,}"
        return ResultTable(columns, rows, caption=caption)

    def _measured(
        self, model: PretrainedModel, groups: Sequence[_Group], who: str
    ) -> dict[str, Any]:
        shape = (model.num_layers, model.num_heads)
        every = [pairs for group in groups for pairs in group.proteins]
        sums = (
            property_sums(model, *pairs, threshold=self.threshold)
            for pairs in watched(f"attention to annotations, {who}", every)
        )
        found = {}
        for group in groups:
            of_group = [next(sums) for _ in group.proteins]
            found |= _by_property(group, of_group, shape, self.seed)
        return found


def _by_property(
    group: _Group, sums: list[PropertySums], shape: tuple[int, int], seed: int
) -> dict[str, dict[str, Any]]:
    differences = np.stack([one.observed - one.expected for one in sums])
    p_values = sign_flip_p_values(differences, seed=seed)
    counted = group.counted()
    found = {}
    for place, name in enumerate(group.names):
        together = summed(list(compress(sums, counted[:, place])))
        above = together.observed_arcs[:, place] / np.maximum(together.total_arcs, 1)
        above = above.astype(object)
        above[together.total_arcs < MIN_ARCS] = None
        values = {
            "weighted": together.observed[:, place] / together.total,
            "expected": together.expected[:, place] / together.total,
            "p_value": p_values[:, place],
            "threshold": above,
            "arcs": together.total_arcs,
        }
        found[name] = {key: x.reshape(shape).tolist() for key, x in values.items()}
    return found


def sign_flip_p_values(differences: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Returns two-sided p-values for the heads of each property, [heads, properties].

    The differences d are of each protein, [proteins, heads, properties]. The hypothesis is that
    they are symmetric around 0. The signs of whole proteins are flipped at random, because the
    pairs of one protein are not independent. The statistic of a head is |t| = |Σ d| / √Σ d², which
    is compared with the largest of all heads after each of `FLIPS` flips (Westfall and Young 1993,
    max-T). A p-value is therefore already corrected for the number of heads. None is below
    `LOWEST_P`.
    """
    # Flips do not change Σ d². A head without differences has the statistic 0.
    scale = np.sqrt(np.square(differences).sum(axis=0))
    scaled = differences / np.where(scale > 0, scale, 1.0)
    observed = np.abs(scaled.sum(axis=0))
    flat = scaled.reshape(len(scaled), -1)
    generator = np.random.default_rng(seed)
    exceeded = np.zeros(observed.shape)
    for _ in range(0, FLIPS, _FLIPS_AT_ONCE):
        signs = generator.choice([-1.0, 1.0], size=(_FLIPS_AT_ONCE, len(flat)))
        largest = np.abs(signs @ flat).reshape(-1, *observed.shape).max(axis=1)
        # A sum with all signs unchanged must count in spite of its rounding.
        exceeded += (largest[:, None] >= observed * (1 - 1e-9)).sum(axis=0)
    return (exceeded + 1) / (FLIPS + 1)


def _describe(group: _Group, result: dict[str, Any]) -> None:
    """Adds the frequency of each property over the pairs that count, and its proteins."""
    is_counted = group.counted()
    for place, name in enumerate(group.names):
        counted = list(compress(group.proteins, is_counted[:, place]))
        total = sum(int(pairs.known_LL.sum()) for pairs in counted)
        hits = sum(int((pairs.properties[place] & pairs.known_LL).sum()) for pairs in counted)
        result.setdefault("background", {})[name] = hits / total
        result.setdefault("proteins_with", {})[name] = len(counted)


def _structure_groups(proteins: Sequence[Protein]) -> list[_Group]:
    """Returns contacts, and the secondary structure and letter of the residue attended to."""
    contacts, residues = [], []
    for protein in proteins:
        assert protein.structure is not None
        contacts_LL, letters = protein.contacts(), np.array(list(protein.sequence))
        positions = np.arange(len(letters))
        far_LL = np.abs(positions[:, None] - positions) >= MIN_SEPARATION
        known_LL = far_LL & (contacts_LL >= 0)
        contacts.append(_Pairs(protein.sequence, (contacts_LL == 1)[None], known_LL))
        backbone_L43 = protein.structure.backbone_L43
        states = np.array(list(secondary_structure(backbone_L43, protein.sequence)))
        rows = [states == HELIX, states == STRAND, *(letters == a for a in STANDARD)]
        is_known = np.asarray(~np.isnan(backbone_L43).any(axis=(1, 2)))
        residues.append(_to_residue(protein.sequence, np.array(rows), is_known))
    return [_Group(("contact",), contacts), _Group(_RESIDUE_PROPERTIES, residues)]


def _is_site(protein: AnnotatedProtein) -> np.ndarray:
    """Returns which residues belong to features of each of `SITES`, bool [sites, L]."""
    found = np.zeros((len(SITES), len(protein.sequence)), dtype=bool)
    for row, name in zip(found, SITES, strict=True):
        for first, last in protein.features.get(name, ()):
            row[first : last + 1] = True
    return found


def _bonds(protein: AnnotatedProtein) -> np.ndarray:
    """Returns which pairs of residues a disulfide bond connects, bool LL, symmetric."""
    found_LL = np.zeros((len(protein.sequence),) * 2, dtype=bool)
    for pair in protein.features.get(BOND, ()):
        found_LL[pair, pair[::-1]] = True
    return found_LL


def _feature_groups(proteins: Sequence[AnnotatedProtein]) -> list[_Group]:
    """Returns the sites of the residue attended to, and the bonds; only those that occur."""
    is_used = np.array([_is_site(p).any(axis=1) for p in proteins]).sum(axis=0) > 0
    groups = []
    if is_used.any():
        sites = [
            _to_residue(x.sequence, _is_site(x)[is_used], np.ones(len(x.sequence), dtype=bool))
            for x in proteins
        ]
        groups.append(_Group(list(compress(SITES, is_used)), sites))
    bonds = [
        _Pairs(x.sequence, _bonds(x)[None], np.ones((len(x.sequence),) * 2, dtype=bool))
        for x in proteins
        if BOND in x.features
    ]
    return [*groups, *([_Group((BOND,), bonds)] if bonds else [])]


def _to_residue(sequence: str, properties: np.ndarray, is_known: np.ndarray) -> _Pairs:
    """Returns pairs with properties of the second residue, [properties, L]."""
    length = len(sequence)
    shape = (len(properties), length, length)
    known_LL = np.broadcast_to(is_known, (length, length))
    return _Pairs(sequence, np.broadcast_to(properties[:, None], shape), known_LL)
