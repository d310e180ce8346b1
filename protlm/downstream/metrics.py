"""Metrics of predicted scores and labels, with 95 % intervals.

Scores of variants, as ProteinGym defines their agreement with measured ones (Notin et al. 2023,
doi:10.1101/2023.12.07.570727): the variants of a position resemble each other, so intervals are by
bootstrap over positions. A variant is in a resample as often as the product of the numbers of times
that its positions were drawn. Of single mutants this is the cluster bootstrap (Davison and Hinkley
1997, section 3.8), of multiple ones the pigeonhole bootstrap (Owen 2007, doi:10.1214/07-AOAS122),
which is conservative: it multiplies the variance of what positions do not explain by up to 2^k - 1
for k positions.

Labels: residues of a protein are drawn together, as are proteins of a cluster if clusters are
known. AUROC and AUPRC are averaged over the classes that have both positive and negative proteins.
Matthews' correlation of several classes is that of Gorodkin 2004
(doi:10.1016/j.compbiolchem.2004.09.006). All are those of scikit-learn, except that metrics of
constant labels are NaN, and not 0 or 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protlm.analysis.bootstrap import RESAMPLES, Metrics, draws
from protlm.downstream.variants import Assay, Variant
from protlm.options.labels import Task

METRICS = ("Spearman", "AUC", "MCC", "NDCG", "top recall")
_TOP = 0.1
# The top 10 % of fewer variants has none.
_FEW = 10
# Rows times resamples that are in memory at a time.
_CELLS = 2_000_000
# Fewer resamples of a large assay, whose intervals are narrow.
_MOST_DRAWN, _FEWEST = 20_000_000, 100


@dataclass(frozen=True)
class Agreement(Metrics):
    """The metrics of the measured variants of an assay, in classes by `bins` or `median`.

    Of `clinical` variants, AUC is the metric.
    """

    num_variants: int
    classes: str

    @property
    def metric(self) -> str:
        """The metric that has an interval and is averaged."""
        return "AUC" if self.classes == "clinical" else "Spearman"


def caution(number: int, what: str) -> list[str]:
    """Returns a sentence if metrics are those of a few of `what`."""
    few = f"fewer than {_FEW} {what}: metrics are uncertain, and intervals too narrow"
    return [few] if number < _FEW else []


def positions_of(variants: Sequence[Variant]) -> np.ndarray:
    """Returns numbers of the replaced positions, int64 [variants, most positions], -1 beyond them.

    The wild type has a number, and each variant with insertions or deletions has one of its own.

    >>> from protlm.downstream.variants import Substitution
    >>> one, two = Substitution("M", 0, "A"), Substitution("K", 1, "C")
    >>> positions_of([Variant((two,)), Variant(indel="MKK"), Variant((one, two))]).tolist()
    [[0, -1], [1, -1], [2, 0]]
    """
    numbers: dict[object, int] = {}
    found = []
    for row, variant in enumerate(variants):
        other = "wild type" if variant.indel is None else ("indel", row)
        names = [one.position for one in variant.substitutions] or [other]
        found.append([numbers.setdefault(name, len(numbers)) for name in names])
    width = max(map(len, found), default=1)
    rows = [row + [-1] * (width - len(row)) for row in found]
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def agreement(
    measured: np.ndarray,
    predicted: np.ndarray,
    is_fit: np.ndarray | None,
    positions: np.ndarray,
    *,
    seed: int = 0,
    is_clinical: bool = False,
) -> Agreement | None:
    """Compares predicted scores, higher for fitter variants, with measured ones; None without any.

    `is_fit` has the classes for AUC and MCC; None divides the measured scores at their median.
    """
    known = ~np.isnan(measured)
    number = int(known.sum())
    if not number:
        return None
    fit = measured >= np.median(measured[known]) if is_fit is None else is_fit
    measured, predicted, fit = measured[known], predicted[known], fit[known]
    drawn = [
        list(metrics(measured[rows], predicted[rows], fit[rows]).values())
        for rows in _resamples(positions[known], seed)
    ]
    resampled = np.array(drawn).reshape(-1, len(METRICS))
    classes = "clinical" if is_clinical else "median" if is_fit is None else "bins"
    return Agreement(metrics(measured, predicted, fit), resampled, number, classes)


def _resamples(positions: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yields the rows of variants, by positions drawn with replacement; none of one position."""
    names = np.unique(positions[positions >= 0])
    size, number = len(names), len(positions)
    if size < 2:
        return
    # Beyond the positions of a variant there is a factor of 1.
    place = np.where(positions < 0, size, np.searchsorted(names, positions))
    resamples = max(min(RESAMPLES, _MOST_DRAWN // number), _FEWEST)
    for drawn in draws(size, seed=seed, number=resamples):
        counts = np.bincount(drawn, minlength=size)
        rows = np.repeat(np.arange(number), np.append(counts, 1)[place].prod(axis=1))
        # Few multiple mutants may all have a position that was not drawn.
        if len(rows):
            yield rows


def metrics(measured: np.ndarray, predicted: np.ndarray, is_fit: np.ndarray) -> dict[str, float]:
    """Returns the metrics by the names in `METRICS`."""
    return {
        "Spearman": spearman(measured, predicted),
        "AUC": float(_areas(predicted, is_fit, np.ones((1, len(is_fit))))[0, 0]),
        "MCC": correlation(is_fit.astype(float), (predicted >= np.median(predicted)).astype(float)),
        "NDCG": ndcg(measured, predicted),
        "top recall": top_recall(measured, predicted),
    }


def spearman(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Returns Spearman's rank correlation; NaN if all values of one are equal."""
    from scipy.stats import rankdata

    return correlation(rankdata(measured), rankdata(predicted))


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Returns Pearson's correlation, of two classes Matthews'; NaN if all values are equal."""
    x, y = one - one.mean(), other - other.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else np.nan


def ndcg(measured: np.ndarray, predicted: np.ndarray, *, top: float = _TOP) -> float:
    """Returns the normalized discounted cumulative gain of the predicted top; NaN without one."""
    number = int(len(measured) * top)
    extent = np.ptp(measured)
    if not number or not extent:
        return np.nan
    gains = (measured - measured.min()) / extent
    discounts = 1 / np.log2(np.arange(number) + 2)
    order = np.argsort(-predicted, kind="stable")[:number]
    return float(gains[order] @ discounts / (np.sort(gains)[::-1][:number] @ discounts))


def top_recall(measured: np.ndarray, predicted: np.ndarray, *, top: float = _TOP) -> float:
    """Returns the fraction of the measured top, strictly above its percentile, in the predicted."""
    best = measured > np.quantile(measured, 1 - top)
    chosen = predicted > np.quantile(predicted, 1 - top)
    return float((best & chosen).sum() / best.sum()) if best.any() else np.nan


def averages(values: Mapping[str, float], assays: Mapping[str, Assay]) -> dict[str, float]:
    """Averages a metric over assays as ProteinGym does; assays where it is NaN are left out.

    Assays of a protein are averaged, then proteins of a selection type, then the types.
    """
    by_type = {name: float(np.mean(one)) for name, one in by_selection(values, assays).items()}
    return {**by_type, "mean of types": float(np.mean([*by_type.values()]))} if by_type else {}


def by_selection(
    values: Mapping[str, float], assays: Mapping[str, Assay]
) -> dict[str, list[np.floating]]:
    """Returns the means over assays of each protein by type of selection, without NaN."""
    groups: dict[str, dict[str, list[float]]] = {}
    for name, value in values.items():
        assay = assays[name]
        if not np.isnan(value):
            groups.setdefault(assay.selection, {}).setdefault(assay.protein, []).append(value)
    return {name: [*map(np.mean, one.values())] for name, one in sorted(groups.items())}


LABEL_METRICS = {
    Task.number: ("Spearman", "R2"),
    Task.one_class: ("accuracy", "macro F1", "MCC"),
    Task.several_classes: ("AUROC", "AUPRC", "Fmax"),
    Task.residue_classes: ("accuracy", "macro F1", "MCC", "accuracy per protein"),
    Task.residue_numbers: ("Spearman", "R2", "MAE", "Spearman per protein"),
}
# Of two classes, also the areas of the second one.
_AREAS = ("AUROC", "AUPRC")
# At most this number of blocks of units is left out, one after another.
_BLOCKS = 200


def label_scores(
    outputs: np.ndarray,
    values: np.ndarray,
    groups: np.ndarray,
    task: Task,
    *,
    clusters: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """Compares outputs, numbers or logits [examples, outputs], with labels as in `Targets`.

    Groups are the protein of each row; clusters, those of rows and further ones, are drawn whole.
    """
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    units = group_of if clusters is None else np.unique(clusters, return_inverse=True)[1]
    size, cluster_of = int(units.max()) + 1, units[first]
    counts = [
        np.bincount(drawn, minlength=size)[cluster_of]
        for drawn in draws(size, seed=seed, number=resamples)
    ]
    blocks = _BLOCKS if resamples and (task is Task.several_classes or outputs.shape[1] == 2) else 0
    block_of = np.random.default_rng(seed).permutation(size)[cluster_of] % _BLOCKS
    kept = [block_of != block for block in range(blocks)]
    weights = np.array([np.ones(len(first)), *counts, *kept])
    is_empty = ~weights.any(axis=1)
    weights[is_empty] = 1
    found = _metrics_of(outputs, values, group_of, task)(weights)
    found[is_empty] = np.nan
    own = dict(zip(LABEL_METRICS[task] + _AREAS, found[0].tolist(), strict=False))
    # Those that take the best threshold, or each one, by the labels that they are measured with.
    left_out = {
        name: found[1 + resamples :, place]
        for place, name in enumerate(own)
        if blocks and name in ("AUPRC", "Fmax")
    }
    return Metrics(own, found[1 : 1 + resamples], left_out=left_out)


def _metrics_of(
    outputs: np.ndarray, values: np.ndarray, group_of: np.ndarray, task: Task
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from weights of the proteins [resamples, proteins] to metrics."""
    if task is Task.number:
        return lambda weights: np.stack(
            [_of_numbers(outputs[:, 0], values, row[group_of]) for row in weights]
        )
    if task is Task.several_classes:
        return lambda weights: _of_several(outputs, values, weights[:, group_of])
    if task is Task.residue_numbers:
        return lambda weights: _of_residues(outputs[:, 0], values, group_of, weights)
    predicted, size = outputs.argmax(axis=1), outputs.shape[1]
    confusions = np.zeros((int(group_of.max()) + 1, size, size))
    np.add.at(confusions, (group_of, values, predicted), 1)

    def metrics(weights: np.ndarray) -> np.ndarray:
        found = _of_confusions(confusions, weights, per_residue=task is Task.residue_classes)
        if size != 2:
            return found
        margins, parts = outputs[:, 1] - outputs[:, 0], len(weights) * len(values) // _CELLS + 1
        each = np.array_split(weights, min(parts, len(weights)))
        areas = [_areas(margins, values == 1, some[:, group_of]) for some in each]
        return np.column_stack([found, np.concatenate(areas)])

    return metrics


def _of_numbers(predicted: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    rows = np.repeat(np.arange(len(values)), weights.astype(np.int64))
    x, y = predicted[rows], values[rows]
    spread = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ((y - x) ** 2).sum() / spread if spread else np.nan
    return np.array([spearman(y, x), r2])


def _of_residues(
    predicted: np.ndarray, values: np.ndarray, group_of: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    rows = [np.flatnonzero(group_of == group) for group in range(int(group_of.max()) + 1)]
    each = np.array([spearman(values[one], predicted[one]) for one in rows])
    counts, errors = np.bincount(group_of), np.bincount(group_of, np.abs(values - predicted))
    # Constant labels, or those of one residue, have no correlation.
    known = weights * ~np.isnan(each)
    with np.errstate(invalid="ignore"):
        means = known @ np.nan_to_num(each) / known.sum(axis=1)
    pooled = [_of_numbers(predicted, values, row[group_of]) for row in weights]
    return np.column_stack([pooled, weights @ errors / (weights @ counts), means])


def _of_confusions(confusions: np.ndarray, weights: np.ndarray, *, per_residue: bool) -> np.ndarray:
    table = np.tensordot(weights, confusions, axes=1)
    total = table.sum(axis=(1, 2))
    right = table.diagonal(axis1=1, axis2=2)
    true, predicted = table.sum(axis=2), table.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # As in scikit-learn, also of classes that are predicted and have no label.
        f1 = np.where(true + predicted > 0, 2 * right / (true + predicted), np.nan)
        squares = total**2 - (true**2).sum(axis=1), total**2 - (predicted**2).sum(axis=1)
        covariance = right.sum(axis=1) * total - (true * predicted).sum(axis=1)
        mcc = covariance / np.sqrt(squares[0] * squares[1])
        # MCC is 0/0 for a constant prediction; 0 is the convention.
        mcc = np.where((squares[1] == 0) & (squares[0] > 0), 0, mcc)
    columns = [right.sum(axis=1) / total, np.nanmean(f1, axis=1), mcc]
    if per_residue:
        each = confusions.diagonal(axis1=1, axis2=2).sum(axis=1) / confusions.sum(axis=(1, 2))
        columns.append(weights @ each / weights.sum(axis=1))
    return np.stack(columns, axis=1)


def _of_several(outputs: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    areas = [_areas(o, v, weights) for o, v in zip(outputs.T, values.T, strict=True)]
    means = np.ma.masked_invalid(areas).mean(axis=0).filled(np.nan)
    return np.column_stack([means, _fmax(outputs, values, weights)])


def _fmax(outputs: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the highest F over 101 thresholds of the probability, [resamples].

    F is of the mean precision of proteins with a predicted class and the mean recall of all with a
    label, as in CAFA (Radivojac et al. 2013, doi:10.1038/nmeth.2340).
    """
    p, is_labeled = np.exp(-np.logaddexp(0, -outputs)), values.sum(axis=1) > 0
    sizes, ratios = np.maximum(values.sum(axis=1), 1), []
    for threshold in np.linspace(0, 1, 101):
        taken = (p >= threshold) & is_labeled[:, None]
        hits, number = (taken & values).sum(axis=1), taken.sum(axis=1)
        ratios.append([hits / np.maximum(number, 1), hits / sizes, number > 0])
    right, found, predicted = weights @ np.transpose(ratios, (1, 2, 0))
    labeled = (weights @ is_labeled)[:, None]
    x, y = right / np.maximum(predicted, 1), found / np.maximum(labeled, 1)
    best = (2 * x * y / np.maximum(x + y, 1e-12)).max(axis=1)
    return np.where(labeled[:, 0] > 0, best, np.nan)


def _areas(scores: np.ndarray, is_positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns AUROC and average precision of a class, [resamples, 2]; ties count half in AUROC.

    Average precision is Σ over thresholds of precision times the gain of recall.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    # Thresholds between positives count as one, which changes neither area.
    has_more = np.diff(np.cumsum(is_positive[order])[ends], prepend=0) > 0
    ends = ends[has_more | np.append(has_more[1:], True)]
    weighted = weights[:, order]
    hits = np.cumsum(weighted * is_positive[order], axis=1)[:, ends]
    taken = np.cumsum(weighted, axis=1)[:, ends]
    gains = np.diff(hits, axis=1, prepend=0)
    misses = np.diff(taken - hits, axis=1, prepend=0)
    positives, negatives = hits[:, -1], taken[:, -1] - hits[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(taken > 0, hits / taken, 0)
        auroc = (misses * (hits - gains / 2)).sum(axis=1) / (positives * negatives)
        average = (gains * precision).sum(axis=1) / positives
    is_defined = (positives > 0) & (negatives > 0)
    return np.where(is_defined[:, None], np.stack([auroc, average], axis=1), np.nan)
