"""How often the 95 % intervals of metrics that choose on the test labels contain the true value.

make bench-intervals, or: python -m benchmarks.intervals [--draws N] [--sizes N ...]

Test sets are drawn from populations whose AUPRC and Fmax are known from 200,000 proteins. Two
models predict the labels, by log odds that are calibrated but for what their errors at all labels
of a protein have in common. Printed are the fraction of intervals with the true value, and their
median width, for the metric of one model and for its difference from that of the other.
"""

import argparse

import numpy as np
from scipy.special import ndtr, ndtri

from protlm.analysis.bootstrap import Metrics, percentiles
from protlm.downstream.metrics import label_scores
from protlm.options.labels import Task
from studies.tables import markdown

# The fractions of positives, in classes of proteins or in ten residues of a protein, and the
# distances of positives from negatives by each model, in standard deviations.
POPULATIONS = {
    "6 classes of 5 to 30 %": (np.geomspace(0.05, 0.3, 6), (3.0, 2.5)),
    "6 classes of 2 to 20 %, weak": (np.geomspace(0.02, 0.2, 6), (1.5, 1.2)),
    "residues, 5 %": (np.full(10, 0.05), (2.0, 1.6)),
    "residues, 20 %, weak": (np.full(10, 0.2), (1.2, 0.9)),
}
# How much of the variance is common to the labels of a protein, and to the errors of both models.
_OF_PROTEIN, _OF_MODELS = 0.25, 0.5


def scores(name: str, size: int, rng: np.random.Generator, resamples: int) -> list[Metrics]:
    """Returns the metrics of two models for proteins drawn from a population."""
    (rates, distances), found = POPULATIONS[name], []
    own, protein = rng.normal(size=(4, size, len(rates))), rng.normal(size=(4, size, 1))
    labels, common, *errors = np.sqrt(1 - _OF_PROTEIN) * own + np.sqrt(_OF_PROTEIN) * protein
    values, groups, task = labels < ndtri(rates), np.arange(size), Task.several_classes
    for distance, error in zip(distances, errors, strict=True):
        noise = np.sqrt(_OF_MODELS) * common + np.sqrt(1 - _OF_MODELS) * error
        outputs = distance * (distance * values + noise - distance / 2) + np.log(
            rates / (1 - rates)
        )
        given = outputs, values, groups, task
        if name.startswith("residues"):
            two = np.stack([0 * outputs, outputs], axis=2).reshape(-1, 2)
            given = two, 1 * values.ravel(), groups.repeat(len(rates)), Task.residue_classes
        found.append(label_scores(*given, resamples=resamples))
    return found


def accelerated(value: float, drawn: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    """Returns the bounds of Efron (1987), with the acceleration of the jackknife."""
    drawn, influence = drawn[~np.isnan(drawn)], value - left_out[~np.isnan(left_out)]
    middle = ndtri(((drawn < value).sum() + 0.5) / (len(drawn) + 1))
    rate = (influence**3).sum() / (6 * (influence**2).sum() ** 1.5 + 1e-12)
    ends = middle + ndtri([0.025, 0.975])
    return np.quantile(drawn, ndtr(middle + ends / (1 - rate * ends)))


def intervals(models: list[Metrics], metric: str) -> np.ndarray:
    """Returns bounds, [metric and difference, methods, 2]."""
    one, other = models
    place, less = list(one.values).index(metric), one.less(other, metric)
    both = [
        np.array([x.values[metric], *x.resampled[:, place], *x.left_out[metric]]) for x in models
    ]
    corrected = one.interval(metric), (less["low"], less["high"])
    found = []
    for x, y in zip((both[0], both[0] - both[1]), corrected, strict=True):
        drawn, left_out = np.split(x[1:], [len(one.resampled)])
        found.append([percentiles(drawn), accelerated(x[0], drawn, left_out), y])
    return np.array(found, dtype=float)


def rows_of(name: str, size: int, draws: int, resamples: int) -> list[list[str]]:
    """Returns the rows of a population and a number of proteins."""
    rng, rows = np.random.default_rng([size, list(POPULATIONS).index(name)]), []
    large = [scores(name, 20_000, rng, 0) for _ in range(10)]
    drawn = [scores(name, size, rng, resamples) for _ in range(draws)]
    for metric in (x for x in ("AUPRC", "Fmax") if x in drawn[0][0].values):
        one, other = np.mean([[x.values[metric] for x in both] for both in large], axis=0)
        found = np.stack([intervals(both, metric) for both in drawn])
        for what, true in enumerate((one, one - other)):
            low, high = np.moveaxis(found[:, what], 2, 0)
            covers, width = np.mean((low <= true) & (true <= high), 0), np.nanmedian(high - low, 0)
            cells = (f"{x:.3f} ({y:.3f})" for x, y in zip(covers, width, strict=True))
            rows.append([name, metric + ", difference" * what, f"{size}", *cells])
    return rows


def main() -> None:
    """Prints a table of each population."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--draws", type=int, default=1000, help="test sets (default 1000)")
    parser.add_argument("--resamples", type=int, default=300, help="of each (default 300)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[60, 150, 500], help="proteins")
    parser.add_argument("--populations", nargs="+", default=POPULATIONS, choices=POPULATIONS)
    given = parser.parse_args()
    headings = ["population", "metric", "proteins", "percentiles", "BCa", "corrected"]
    for name in given.populations:
        sizes = (rows_of(name, size, given.draws, given.resamples) for size in given.sizes)
        print(markdown([headings, *(row for rows in sizes for row in rows)]), flush=True)


if __name__ == "__main__":
    main()
