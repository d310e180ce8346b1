"""Mutants: small faults planted in a stored sample of lines, and which tests notice each.

`make mutants` runs those of tests/mutants.tsv that have no result for this commit yet, at low
priority, and prints a table; an interrupted run is continued. `results.tsv` in
build/mutants/COMMIT has the outcome of each and the tests that failed.

A mutant is a line of a function and what replaces it, so that it is found where its file has moved.
If no such line is left, it is `gone`: its row has to be rewritten, or excused. The tests that run
execute the line: the fastest first, for half a minute.
"""

import argparse
import ast
import csv
import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SAMPLE, BUILD = ROOT / "tests" / "mutants.tsv", ROOT / "build" / "mutants"
AREAS = [f"protlm/data/{name}" for name in ("records", "batching", "shards", "families")]
AREAS += [f"protlm/{name}" for name in ("attention", "model", "checkpoints", "training")]
AREAS += [f"protlm/{name}" for name in ("commands", "analysis", "downstream", "system")]
AREAS += ["protlm/evaluation", "data_prep"]
SECONDS, PROCESSES = 30.0, 2
# Tests of one mutant.
_MOST = 200
TIME, FAILED = (
    re.compile(r"^([\d.]+)s \w+ +(.+)$", re.M),
    re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.M),
)


class Mutant(NamedTuple):
    """A line of a function, without its indentation, and what replaces it."""

    area: str
    file: str
    function: str
    before: str
    after: str


def functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and its classes by qualified name."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef):
            yield f"{name}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{name}{child.name}.")


def find(tree: Path, mutant: Mutant) -> tuple[Path, int] | None:
    """Returns the file and the line of a mutant, from 1, in its own file or another."""
    others = (f for root in ("protlm", "data_prep") for f in sorted((tree / root).rglob("*.py")))
    for file in filter(Path.is_file, (tree / mutant.file, *others)):
        lines = file.read_text().splitlines()
        if mutant.before not in map(str.strip, lines):
            continue
        for name, node in functions(ast.parse("\n".join(lines))):
            inside = range(node.lineno, node.end_lineno or 0)
            there = [number for number in inside if lines[number].strip() == mutant.before]
            if name.rpartition(".")[2] == mutant.function.rpartition(".")[2] and len(there) == 1:
                return file, there[0] + 1
    return None


def run(tree: Path, arguments: list[str], seconds: float) -> str | None:
    """Returns what tests of a copy of the project print; None if they do not end in time."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{BUILD / 'lib'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # Linux shares processors between sessions first, whatever their processes' niceness is.
    with suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text("19")
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return None


class Tests:
    """The tests that execute a line, and their seconds, as one run of them all found."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.data, printed = tree, tree.parent / ".coverage", tree.parent / "tests.txt"
        if not printed.is_file():
            options = ["-n", str(PROCESSES), "--durations=0", "-vvv"]
            options += ["--cov=protlm", "--cov=data_prep", "--cov-context=test", "--cov-report="]
            found = run(tree, options, 2 * 3600) or ""
            (tree / ".coverage").rename(self.data)
            printed.write_text(found)
        text = printed.read_text()
        self.seconds = defaultdict[str, float](float)
        for seconds, name in TIME.findall(text):
            self.seconds[name] += float(seconds)
        for name in FAILED.findall(text):
            self.seconds.pop(name, None)

    def of(self, file: str, line: int) -> list[str]:
        """Returns the tests to run for a line, from 1."""
        query = "SELECT context, numbits FROM line_bits JOIN file ON file.id = file_id JOIN context"
        query += " ON context.id = context_id WHERE path = ?"
        with sqlite3.connect(self.data) as database:
            rows = database.execute(query, [str(self.tree / file)]).fetchall()
        bits = [(name.partition("|")[0], bits) for name, bits in rows]
        exact = {n for n, b in bits if line // 8 < len(b) and b[line // 8] & 1 << line % 8}
        chosen, total = list[str](), 0.0
        known = (exact or {name for name, _ in bits}) & self.seconds.keys()
        for name in sorted(known, key=self.seconds.__getitem__):
            total += self.seconds[name]
            if chosen and (total > SECONDS or len(chosen) == _MOST):
                break
            chosen.append(name)
        return chosen


def judge(mutant: Mutant, tree: Path, tests: Tests) -> tuple[str, str]:
    """Plants a mutant in a tree and runs its tests; returns the outcome and the failed tests."""
    place = find(tree, mutant)
    if place is None:
        return "gone", ""
    file, line = place
    chosen = tests.of(str(file.relative_to(tree)), line)
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(mutant.before, mutant.after)
    file.write_text("".join(lines))
    try:
        printed = run(tree, chosen, 60 + 5 * SECONDS) if chosen else ""
    finally:
        file.write_text(text)
    failed = ["(time)"] if printed is None else sorted(set(FAILED.findall(printed)))
    return "killed" if failed else "survived", "; ".join(failed)


def main() -> None:
    """Runs the mutants without a result, and prints how many of each area were killed."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    folder = BUILD / commit.strip()
    trees = [folder / f"tree-{number}" for number in range(PROCESSES)]
    for tree in trees:
        if not tree.is_dir():
            subprocess.run(["git", "worktree", "add", "--detach", str(tree)], cwd=ROOT, check=True)
    tests, results = Tests(trees[0]), folder / "results.tsv"
    with SAMPLE.open(newline="") as file:
        mutants = [Mutant(**row) for row in csv.DictReader(file, delimiter="\t")]
    with results.open("a+", newline="") as file:
        file.seek(0)
        known = {"\t".join(row[:5]) for row in csv.reader(file, delimiter="\t")}
        left = [mutant for mutant in mutants if "\t".join(mutant) not in known]

        def work(tree: Path) -> None:
            while left:
                mutant = left.pop()
                row = [*mutant, *judge(mutant, tree, tests)]
                csv.writer(file, delimiter="\t", lineterminator="\n").writerow(row)
                file.flush()

        with ThreadPoolExecutor(PROCESSES) as pool:
            list(pool.map(work, trees))
        file.seek(0)
        table = Counter((row[0], row[5]) for row in csv.reader(file, delimiter="\t"))
    for area in AREAS:
        counts = (f"{table[area, outcome]} {outcome}" for outcome in ("killed", "survived", "gone"))
        print(f"{area:24}{', '.join(counts)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.nice(19)
    main()
