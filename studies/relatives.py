"""What relatives are worth to models that are trained on families, and to their single twins.

    python -m studies.relatives DATA TABLES FASTA [--arms NAME ...] [--steps 244] [--seeds 0]
        [--jobs 1] [--final] [--alignment pairwise] [--compared RUN] [--figure FILE]
        [--out runs/relatives/near]

DATA is prepared with a cluster table of TABLES, the folder that `studies.held_out` wrote, and
`--no-homologs`; FASTA has all proteins. Every arm is trained on the same families, in the same
order, in steps of 8,192 tokens, with the attention and what else its name says; its twin sees each
protein of them alone. Each is evaluated by `evaluation=relatives` on the held-out families, with
relatives below 50 % identity, and in distribution, with any: one query of a family, or with --final
two, and for held-out families all controls. Relatives are shifted as in training or, with
--alignment pairwise, aligned with gaps. With several --seeds, or twins among --arms, arms are
compared with all others by means over seeds. Finished parts are not repeated, and interrupted ones
continue.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.family_predictions import PREDICTORS, family_means
from protlm.analysis.intervals import in_words
from protlm.plots import relatives_curve, save_figure
from studies import copying
from studies.runs import end_by_signal, name_of, protlm, side_by_side, train, validations
from studies.settings import keep_settings
from studies.tables import markdown, rows_of

ATTENTION = {name: copying.ARMS[name] for name in copying.ARMS if "convolution" not in name}
WINDOW = ATTENTION["hybrid, aligned ±8"]
LONG_ROWS = "data.tokens_per_row=8192"
SHIFTED = "model.relatives_positions=aligned"
ARMS = {
    **ATTENTION,
    "softmax, no convolution": ("attention=softmax", "model.convolution=null"),
    "softmax, aligned positions": ("attention=softmax", SHIFTED),
    "hybrid, aligned ±8, aligned positions": (*WINDOW, SHIFTED),
    "softmax, aligned positions, long rows": ("attention=softmax", SHIFTED, LONG_ROWS),
    "hybrid, aligned ±8, aligned positions, long rows": (*WINDOW, SHIFTED, LONG_ROWS),
    "hybrid, aligned ±8, causal": (*WINDOW, "objective=causal"),
    "hybrid, aligned ±8, causal, alone": (*WINDOW, "objective=causal", "data.relatives_alone=1"),
    "hybrid, aligned ±8, no convolution": (*WINDOW, "model.convolution=null"),
    "hybrid, aligned ±8, 30 % alone": (*WINDOW, "data.relatives_alone=0.3"),
    "hybrid, aligned ±8, none in use": (*WINDOW, "data.relatives_last=0"),
    "hybrid, aligned ±8, half in use": (*WINDOW, "data.relatives_last=0.5"),
    "hybrid, aligned ±8, 15 to 50 % masked": (*WINDOW, "objective.mask_fraction_range=[0.15,0.5]"),
    "hybrid, aligned ±8, apart": (*WINDOW, "model.relatives_sum=apart"),
    "hybrid, aligned ±8, aligned positions, ordered": (*WINDOW, SHIFTED, "model.relatives=ordered"),
}
TWIN, ALIGNED = ", alone", ", aligned positions"
# A twin has targets in all proteins, where a quarter of the others' documents has them in the last.
OF_TWINS = "data.relatives_alone=1", "data.relatives_last=0"
ARMS = {f"{name}{TWIN}": (*ARMS[name], *OF_TWINS) for name in ARMS if TWIN not in name} | ARMS
HELD_OUT, KNOWN, FINAL = "held_out", "in_distribution", "final_"
# How relatives are aligned in use, and how the files of its evaluation begin.
ALIGNMENTS = {"shift": "", "pairwise": "pairwise_"}
SPLITS = {HELD_OUT: "test_ood_family", KNOWN: "valid"}


def folder_of(arm: str, seed: int, given: argparse.Namespace) -> Path:
    """Returns the folder of a run."""
    return given.out / f"{name_of(arm)}-{seed}"


def twin_of(arm: str) -> str:
    """Returns the twin of an arm; positions in the family do not concern it.

    >>> twin_of("softmax, aligned positions")
    'softmax, alone'
    """
    return arm.removesuffix(ALIGNED).removesuffix(TWIN) + TWIN


def make(run_of: tuple[str, int], given: argparse.Namespace) -> None:
    """Trains and evaluates an arm with a seed, or continues."""
    arm, seed = run_of
    folder = folder_of(arm, seed, given)
    settings = [
        *(*copying.BASE, *ARMS[arm], f"seed={seed}", f"data.dir={given.data}"),
        *("data.relatives_from=train", "trainer.valid_batches=10"),
        *(f"trainer.valid_every={given.steps}", "trainer.checkpoint_every=100"),
    ]
    train(settings, folder, steps=given.steps)
    groups = f"evaluation.relatives.groups={given.tables / 'groups.tsv'}"
    for name, members, option in (
        (HELD_OUT, "candidates.tsv", groups),
        (KNOWN, "in_distribution.tsv", "evaluation.relatives.max_identity=1"),
    ):
        output = report_of(folder, name, given)
        if output.exists():
            continue
        split, queries = SPLITS[name], output.with_suffix(".tsv")
        queries.with_suffix(f".{split}.tsv").unlink(missing_ok=True)
        numbers = "[0,1,2,4,8,16]" if given.final else "[0,1,4,16]"
        has_controls = given.final and name == HELD_OUT and not arm.endswith(TWIN)
        limits = (
            *(f"controls={str(has_controls).lower()}", f"per_family={1 + given.final}"),
            *(f"numbers={numbers}", f"per_query={queries}"),
        )
        protlm(
            *("evaluate", f"checkpoint={folder}", "evaluation=[relatives]"),
            *(f"data.dir={given.data}", f"split={split}", "allow_none=true", "data.verify=sizes"),
            *(f"relatives={given.tables / members}", f"whole_relatives={given.fasta}"),
            *(f"output={output}", option, f"alignment={given.alignment}"),
            # Twins have seen none.
            "force_relatives=true",
            *(f"evaluation.relatives.{one}" for one in limits),
        )


def table(runs: Sequence[tuple[str, int]], given: argparse.Namespace) -> str:
    """Returns the nats per masked residue of each run, in Markdown."""
    headings = ["alone", "with one", "with 16", "with 16 - alone", "closed"]
    rows = [
        [
            *("arm", "valid loss"),
            *(f"{split}, {one}" for split in ("held out", "known") for one in headings),
            "held out, with 16 - the first arm with 16",
        ]
    ]
    first = nats_of(given.compared or folder_of(*runs[0], given), given)["model, 16"]
    for arm, seed in runs:
        folder = folder_of(arm, seed, given)
        loss = validations(folder).get(given.steps)
        rows.append(
            [
                f"{arm}, seed {seed}" if len(given.seeds) > 1 else arm,
                "" if loss is None else f"{loss:.3f}",
            ]
        )
        for name in SPLITS:
            found = results_of(folder, name, given)
            nats = [found["curve"][number]["model"]["nats"]["mean"] for number in ("0", "1", "16")]
            gain = in_words(found["differences"]["model - alone"], "+.3f")
            closed = in_words(found["share_closed"], ".0%")
            rows[-1] += [*(f"{one:.3f}" for one in nats), gain, closed]
        own = nats_of(folder, given)["model, 16"]
        rows[-1].append(
            "" if (own == first).all() else in_words(ratio_interval(own - first), "+.3f")
        )
    return markdown(rows)


def results_of(folder: Path, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Returns what the evaluation of a run found."""
    report = json.loads(report_of(folder, name, given).read_text())
    return report["results"][SPLITS[name]]["relatives"]


def report_of(folder: Path, name: str, given: argparse.Namespace) -> Path:
    """Returns the file of an evaluation of a run."""
    return folder / f"{FINAL * given.final}{ALIGNMENTS[given.alignment]}{name}.json"


def over_seeds(arm: str, given: argparse.Namespace) -> str:
    """Returns an arm's comparisons of relatives below 50 % identity, in Markdown.

    A family has the mean of its differences over seeds, and families are drawn. What is predicted
    without a model is the same for all runs, and read from one.
    """
    found, has_twin = [], twin_of(arm) in given.arms
    any_run = nats_of(folder_of(twin_of(arm) if has_twin else arm, given.seeds[0], given), given)
    for seed in given.seeds:
        own = nats_of(folder_of(arm, seed, given), given)
        twin = nats_of(folder_of(twin_of(arm), seed, given), given) if has_twin else {}
        others = {"alone": own["model, 0"]}
        if has_twin:
            others["the twin alone"] = twin["model, 0"]
        controls = ("shuffled", "unrelated") if given.final else ()
        others |= {name: own[f"model, {name}"] for name in controls}
        others |= {x: any_run[f"{x}, 16"] for x in PREDICTORS if f"{x}, 16" in any_run}
        others |= {
            f"{x} with 16": nats_of(folder_of(x, seed, given), given)["model, 16"]
            for x in given.arms
            if x != arm and not x.endswith(TWIN)
        }
        found.append({f"with 16 - {name}": own["model, 16"] - x for name, x in others.items()})
        found[-1]["mixed - mixed alone"] = own["mixed, 16"] - own["mixed alone, 16"]
        if has_twin:
            found[-1]["mixed - the twin mixed alone"] = own["mixed, 16"] - twin["mixed alone, 16"]
    rows = [[arm, "mean of seeds", *(f"seed {one}" for one in given.seeds)]]
    for name in found[0]:
        each = np.array([one[name] for one in found])
        mean = in_words(ratio_interval(each.mean(axis=0)), "+.3f")
        rows.append([name, mean, *(f"{one:+.3f}" for one in each.mean(axis=1))])
    # Both are differences from what the model has with 16 relatives.
    alone, columns = np.array(
        [[one[f"with 16 - {name}"] for one in found] for name in ("alone", "columns")]
    ).mean(axis=1)
    closed = in_words(ratio_interval(-alone, columns - alone), ".0%")
    return markdown([*rows, ["closed", closed, *[""] * len(given.seeds)]])


def nats_of(folder: Path, given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Returns the nats per target of each held-out family, by prediction."""
    rows = rows_of(report_of(folder, HELD_OUT, given).with_suffix(f".{SPLITS[HELD_OUT]}.tsv"))
    order = [*dict.fromkeys(row["family"] for row in rows)]
    families = np.array([order.index(row["family"]) for row in rows])
    targets = np.array([row["targets"] for row in rows], int)
    return {
        name: family_means(np.array([row[name] for row in rows], float), targets, families)
        for name in rows[0]
        if ", " in name
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description="What relatives are worth.")
    parser.add_argument("data", type=Path, help="a data set with families")
    parser.add_argument("tables", type=Path, help="the folder of studies.held_out")
    parser.add_argument("fasta", type=Path, help="all proteins")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ATTENTION))
    parser.add_argument("--steps", type=int, default=244, help="steps of 8,192 tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--final", action="store_true", help="two queries a family, and controls")
    parser.add_argument("--compared", type=Path, help="in place of the first arm: another run")
    parser.add_argument("--alignment", choices=ALIGNMENTS, default="shift", help="in use")
    parser.add_argument("--figure", type=Path, help="of the first arm and seed, held out")
    parser.add_argument("--out", type=Path, default=Path("runs/relatives/near"))
    given = parser.parse_args(arguments)
    keep_settings(given, "data", "steps")
    end_by_signal()
    runs = [(arm, seed) for seed in given.seeds for arm in given.arms]
    side_by_side(lambda one: make(one, given), runs, given.jobs)
    print(table(runs, given), flush=True)
    for arm in (one for one in given.arms if not one.endswith(TWIN)):
        if len(given.seeds) > 1 or twin_of(arm) in given.arms:
            print(f"\n{over_seeds(arm, given)}", flush=True)
    if given.figure is not None:
        curve = relatives_curve(results_of(folder_of(*runs[0], given), HELD_OUT, given))
        save_figure(curve, given.figure)


if __name__ == "__main__":
    main()
