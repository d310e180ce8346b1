"""Work folders: begun, compared, continued, published; and left behind or removed after errors."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import protlm
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.lock import LOCK
from protlm.system.paths import sha256_of
from protlm.system.shares import here
from protlm.system.work_folder import (
    BEGUN,
    Kind,
    begun_with,
    read_begun,
    refuse_finished,
    unfinished,
    work_folder,
)

KIND = Kind("embedding", "being computed", "--output")

WITH = {
    "--batch": 2,
    "--windows": False,
    "--names": ["a", "b"],
    "model": "a" * 64,
    "rule": {"x": 1},
}


def test_what_work_is_begun_with_names_all_that_it_depends_on(tmp_path):
    path = tmp_path / "table"
    path.write_text("1")
    begun = begun_with({"--seed": 1}, files={"--ranges": path, "--cluster": None})
    known = {"protlm": protlm.__version__, "--seed": 1}
    assert begun == {**known, "--ranges": sha256_of(path), "--cluster": None}
    begun = begun_with({"--seed": 1}, models={"the model": "h"})
    assert begun == {**known, "torch": torch.__version__, "the model": "h"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out.h5"


def begin(out: Path, part: str = "1.part", **named: object) -> None:
    """Begins work that ends with an error after a part, if this has a name."""
    with (
        pytest.raises(ZeroDivisionError),
        work_folder(unfinished(out), WITH, KIND, **named) as work,
    ):
        if part:
            (work.path / part).write_text("done")
        raise ZeroDivisionError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_finished_parts_are_kept_until_the_result_is_published(out, capsys):
    begin(out)
    assert names(unfinished(out)) == ["1.part", BEGUN]
    assert f"finished parts are kept in {unfinished(out)}: the same" in capsys.readouterr().err
    with work_folder(unfinished(out), WITH, KIND) as work:
        assert names(work.path) == ["1.part", BEGUN, LOCK]
    assert names(unfinished(out)) == ["1.part", BEGUN]
    with work_folder(unfinished(out), WITH, KIND) as work:
        work.publish(work.path / "1.part", out)
    assert names(out.parent) == ["out.h5"]
    assert out.read_text() == "done"
    assert capsys.readouterr().err == ""


def test_a_folder_is_published_and_replaces_nothing(out):
    for is_first in (True, False):
        with work_folder(unfinished(out), WITH, KIND) as work:
            (work.path / "data").mkdir()
            (work.path / "data" / "x").write_text("done")
            if is_first:
                work.publish(work.path / "data", out)
            else:
                with pytest.raises(OutputError, match="exists already"):
                    work.publish(work.path / "data", out)
    assert (out / "x").read_text() == "done"
    assert names(unfinished(out)) == [BEGUN, "data"]


@pytest.mark.parametrize("part", ["", ".1.part", ".hidden"])
def test_nothing_is_left_without_a_finished_part(out, part):
    """Except hidden files of others; and what is finished can be told otherwise."""
    begin(out, part)
    assert not out.parent.exists() or names(out.parent) == (
        [unfinished(out).name] if part == ".hidden" else []
    )
    kind = Kind("data set", "being built", "--out", lambda path: (path / "good").exists())
    for name in ("bad", "good"):
        with pytest.raises(ZeroDivisionError), work_folder(out, {}, kind) as work:
            assert not (work.path / "bad").exists()
            (work.path / name).touch()
            raise ZeroDivisionError
        assert out.exists() == (name == "good")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("--batch", 3, "with --batch 2, not 3"),
        ("--batch", None, "with --batch 2, not nothing"),
        ("--windows", True, "with --windows off, not on"),
        ("--names", ["a", "c d"], "with --names b, not c d"),
        ("--other", 1, "with --other nothing, not 1"),
        ("model", "b" * 64, f"with model {'a' * 12}, not {'b' * 12}"),
        ("--names", ["b", "a"], "with --names in another order"),
        ("rule", {"x": 2}, "with rule x: 1, not 2"),
    ],
)
def test_other_work_is_refused(out, name, value, told, capsys):
    begin(out)
    now = {**WITH, name: value}
    with pytest.raises(UserError) as refused, work_folder(unfinished(out), now, KIND):
        pass
    assert str(refused.value) == (
        f"{unfinished(out)} was begun {told}: use the same options as then to resume it, or "
        f"remove {unfinished(out)} to start over"
    )
    assert capsys.readouterr().err.count("the same command continues") == 1
    # Without a finished part there is nothing to continue; or on request.
    with work_folder(unfinished(out), now, KIND, restart=True):
        assert names(unfinished(out)) == [BEGUN, LOCK]
    with work_folder(unfinished(out), WITH, KIND):
        pass


@pytest.mark.parametrize("content", ["", "{", "3", "null", "[1]", "[" * 10**5, "\udcff"])
def test_a_damaged_record_is_refused(out, content, refused):
    kind = Kind("data set", "being built", "--out", start_over="add --restart to start over")
    begin(out)
    (unfinished(out) / BEGUN).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputDataError, match=rf"{BEGUN} is damaged .*: add --restart to start"):
        read_begun(unfinished(out), kind)
    refused(InputDataError, "is damaged")
    assert (unfinished(out) / "1.part").exists()


@pytest.mark.parametrize("name", [BEGUN, "1.part", ".workers.part/x", "share-1/lock.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.name)])
@pytest.mark.parametrize("start_over", ["", "add --restart to start over"])
def test_pipes_and_broken_links_are_refused_at_once(name, make, start_over, out):
    """With what to do: where the work needs the file, to start over, which then succeeds."""
    kind = Kind("embedding", "being computed", "--output", start_over=start_over)
    needed = name == BEGUN or (start_over != "" and name != "share-1/lock.json")
    begin(out, "2.part")
    path = unfinished(out) / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    if name == BEGUN:
        with pytest.raises(InputDataError, match=rf"{BEGUN} is damaged .*: remove {path.parent} "):
            read_begun(unfinished(out), KIND)
    advice = kind.advice(unfinished(out)) if needed else "remove it"
    for restart in (False, True):
        with (
            contextlib.nullcontext()
            if needed and restart
            else pytest.raises(OutputError, match=rf"{name} is neither .*: {advice}$"),
            work_folder(unfinished(out), WITH, kind, restart=restart),
        ):
            pass
        assert (unfinished(out) / "2.part").exists() != (needed and restart)


@pytest.fixture
def refused(out: Path) -> Callable[..., None]:
    """Begins work that is refused with an error and its words."""

    def begin_again(kind: type[UserError], told: str, now: dict = WITH, **named: object) -> None:
        with pytest.raises(kind, match=told), work_folder(unfinished(out), now, KIND, **named):
            pass

    return begin_again


def test_a_folder_of_others_is_left_alone(out, refused):
    unfinished(out).mkdir(parents=True)
    (unfinished(out) / "thesis.tex").touch()
    told = "is not an unfinished embedding: move it away or choose another --output"
    for restart in (False, True):
        refused(OutputError, told, restart=restart)
    assert names(unfinished(out)) == ["thesis.tex"]


def test_a_process_that_lost_its_lock_publishes_and_removes_nothing(out):
    """Otherwise, two processes would publish."""
    other = '{"host": "elsewhere", "pid": 1, "since": ""}'
    with (
        pytest.raises(OutputError, match="process 1 on elsewhere"),
        work_folder(unfinished(out), WITH, KIND) as work,
    ):
        (work.path / "1.part").touch()
        (work.path / LOCK).write_text(other)
        work.publish(work.path / "1.part", out)
    assert not out.exists()
    assert (unfinished(out) / LOCK).read_text() == other
    assert names(unfinished(out)) == ["1.part", BEGUN, LOCK]


def test_remains_of_published_work_are_removed(out):
    out.parent.mkdir()
    out.touch()
    for part, is_left in (("", False), ("1.part", True)):
        unfinished(out).mkdir()
        (unfinished(out) / BEGUN).write_text("{}")
        if part:
            (unfinished(out) / part).touch()
        with pytest.raises(OutputError, match="exists already"):
            refuse_finished(out, KIND)
        assert unfinished(out).exists() == is_left


def test_shares_are_computed_side_by_side(out, refused):
    path = unfinished(out)
    with work_folder(path, WITH, KIND, share="1-of-2") as one:
        with work_folder(path, WITH, KIND, share="2-of-2") as two:
            for again in ("1-of-2", "2-of-2", ""):
                refused(OutputError, "[12]-of-2 is being computed by process", share=again)
            (two.path / "2.part").touch()
        (one.path / "1.part").touch()
        refused(UserError, "was begun", {**WITH, "--batch": 3}, share="2-of-2")
    assert names(path) == ["1.part", "2.part", BEGUN]
    with work_folder(path, WITH, KIND) as work:
        # As `--processes` does; and a share that is computed elsewhere now.
        with (
            work_folder(path, WITH, KIND, share="1-of-2"),
            pytest.raises(OutputError, match="1-of-2 is being computed"),
        ):
            work.publish(work.path / "1.part", out)
        work.publish(work.path / "1.part", out)
    assert names(out.parent) == ["out.h5"]


def test_a_share_that_finished_nothing_leaves_the_others_alone(out):
    path = unfinished(out)
    with work_folder(path, WITH, KIND, share="1-of-2"):
        begin(out, "", share="2-of-2")
        assert names(path) == ["1-of-2", BEGUN]
    assert not path.exists()


def interrupt_parent(path: Path, part: str, share: str) -> None:
    with work_folder(path, WITH, KIND, share=share) as work:
        (work.path / f"{part}.{share}.part").touch()
        while share == "1-of-2" or not list(path.glob("*.1-of-2.part")):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "part"), [("", ""), ("", "1"), ("parts/1.partial", "")])
def test_the_locks_of_killed_processes_are_removed(out, folder, part):
    path = unfinished(out)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), work_folder(path, WITH, KIND):
        list(
            here(
                partial(interrupt_parent, path / folder, part),
                ["1-of-2", "2-of-2"],
                at_once=2,
                advice="",
                folder=out.parent,
            )
        )
    assert list(path.rglob(LOCK)) == []
    assert path.exists() == bool(folder or part)


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match=f"{tmp_path}/file/out cannot be written"),
        work_folder(unfinished(tmp_path / "file" / "out"), WITH, KIND),
    ):
        pass
    with (
        pytest.raises(OutputError, match=f"{tmp_path}/out: no space left"),
        work_folder(unfinished(tmp_path / "out"), WITH, KIND),
    ):
        raise OSError(28, os.strerror(28))
    assert names(tmp_path) == ["file"]
