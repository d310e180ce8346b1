"""What relatives are worth to models that are trained on families, and to their single twins.

    python -m studies.relatives DATA TABLES FASTA [--arms NAME ...] [--steps 244] [--seed 0]
        [--jobs 1] [--final] [--out runs/relatives/near]

DATA is prepared with a cluster table of TABLES, the folder that `studies.held_out` wrote, and
`--no-homologs`; FASTA has all proteins. Every arm is trained on the same families, in the same
order, in steps of 8,192 tokens, with the attention and what else its name says; its twin sees each
protein of them alone. Each is evaluated by `evaluation=relatives` on the held-out families, with
relatives below 50 % identity, and in distribution, with any: one
query of a family, or with --final two and all controls. Finished runs are not repeated, and
interrupted ones continue.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from protlm.analysis.intervals import in_words
from studies import copying
from studies.runs import end_by_signal, name_of, run, side_by_side, train, validations
from studies.settings import keep_settings
from studies.tables import markdown

ATTENTION = {name: copying.ARMS[name] for name in copying.ARMS if "convolution" not in name}
WINDOW = ATTENTION["hybrid, aligned ±8"]
ARMS = {
    **ATTENTION,
    "softmax, no convolution": ("attention=softmax", "model.convolution=null"),
    "softmax, aligned positions": ("attention=softmax", "model.relatives_positions=aligned"),
    "hybrid, aligned ±8, aligned positions": (*WINDOW, "model.relatives_positions=aligned"),
    "hybrid, aligned ±8, no convolution": (*WINDOW, "model.convolution=null"),
    "hybrid, aligned ±8, 30 % alone": (*WINDOW, "data.relatives_alone=0.3"),
    "hybrid, aligned ±8, none in use": (*WINDOW, "data.relatives_last=0"),
    "hybrid, aligned ±8, half in use": (*WINDOW, "data.relatives_last=0.5"),
    "hybrid, aligned ±8, 15 to 50 % masked": (*WINDOW, "objective.mask_fraction_range=[0.15,0.5]"),
    "hybrid, aligned ±8, apart": (*WINDOW, "model.relatives_sum=apart"),
}
TWIN = ", alone"
# A twin has targets in all proteins, where a quarter of the others' documents has them in the last.
OF_TWINS = "data.relatives_alone=1", "data.relatives_last=0"
ARMS |= {f"{name}{TWIN}": (*ARMS[name], *OF_TWINS) for name in ARMS}
HELD_OUT, KNOWN = "held_out", "in_distribution"
SPLITS = {HELD_OUT: "test_ood_family", KNOWN: "valid"}


def make(arm: str, given: argparse.Namespace) -> None:
    """Trains and evaluates an arm, or continues."""
    folder = given.out / f"{name_of(arm)}-{given.seed}"
    if (folder / f"{KNOWN}.json").exists():
        return
    settings = [*copying.BASE, *ARMS[arm], f"seed={given.seed}", f"data.dir={given.data}"]
    settings += ["data.relatives_from=train", "trainer.valid_batches=10"]
    settings += [f"trainer.valid_every={given.steps}", "trainer.checkpoint_every=100"]
    train(settings, folder, steps=given.steps)
    groups = f"evaluation.relatives.groups={given.tables / 'groups.tsv'}"
    for name, members, option in (
        (HELD_OUT, "candidates.tsv", groups),
        (KNOWN, "in_distribution.tsv", "evaluation.relatives.max_identity=1"),
    ):
        output = folder / f"{name}.json"
        if output.exists():
            continue
        split, queries = SPLITS[name], folder / f"{name}.tsv"
        queries.with_suffix(f".{split}.tsv").unlink(missing_ok=True)
        numbers = "[0,1,2,4,8,16]" if given.final else "[0,1,4,16]"
        limits = f"controls={str(given.final).lower()} per_family={1 + given.final}"
        limits += f" numbers={numbers} per_query={queries}"
        run(
            [
                *(sys.executable, "-m", "protlm", "evaluate", f"checkpoint={folder}"),
                *("evaluation=[relatives]", f"data.dir={given.data}", f"split={split}"),
                *("allow_none=true", "data.verify=sizes", f"relatives={given.tables / members}"),
                *(f"whole_relatives={given.fasta}", f"output={output}", option),
                *(f"evaluation.relatives.{one}" for one in limits.split()),
            ]
        )


def table(given: argparse.Namespace) -> str:
    """Returns the nats per masked residue of each arm, in Markdown."""
    headings = ["alone", "with one", "with 16", "with 16 - alone"]
    rows = [
        ["arm", "valid loss", *(f"{x}, {one}" for x in ("held out", "known") for one in headings)]
    ]
    for arm in given.arms:
        folder = given.out / f"{name_of(arm)}-{given.seed}"
        loss = validations(folder).get(given.steps)
        rows.append([arm, "" if loss is None else f"{loss:.3f}"])
        for name, split in SPLITS.items():
            if not (path := folder / f"{name}.json").exists():
                continue
            found = json.loads(path.read_text())["results"][split]["relatives"]
            nats = [found["curve"][number]["model"]["nats"]["mean"] for number in ("0", "1", "16")]
            rows[-1] += [*(f"{one:.3f}" for one in nats)]
            rows[-1].append(in_words(found["differences"]["model - alone"], "+.3f"))
        rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description="What relatives are worth.")
    parser.add_argument("data", type=Path, help="a data set with families")
    parser.add_argument("tables", type=Path, help="the folder of studies.held_out")
    parser.add_argument("fasta", type=Path, help="all proteins")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ATTENTION))
    parser.add_argument("--steps", type=int, default=244, help="steps of 8,192 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--final", action="store_true", help="two queries a family, all controls")
    parser.add_argument("--out", type=Path, default=Path("runs/relatives/near"))
    given = parser.parse_args(arguments)
    keep_settings(given, "data", "steps", "final")
    end_by_signal()
    side_by_side(lambda arm: make(arm, given), given.arms, given.jobs)
    print(table(given), flush=True)


if __name__ == "__main__":
    main()
