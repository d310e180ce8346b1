"""A build killed by SIGKILL at random moments resumes to the same bytes."""

import json

import pytest

# One process imports everything and forks the builders, so that their time is spent on building.
# A builder has its own process group, and its workers die with it.
KILL = """
import json, os, random, shutil, signal, time

source, folder, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
out, partial = folder / "data", folder / "data.partial"
random.seed(seed)

def start(workers, out=out):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        exit_with_message(lambda: build([source], out, workers=workers, deduplicate=True))
    return pid

def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}

def finished_segments():
    return len(list(partial.glob("journal/segment-*.json")))

def wait_for(pid, segments):
    # A builder that ends first stays there to be waited for.
    while finished_segments() < segments:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)

began = time.monotonic()
assert os.waitpid(start(1, folder / "whole"), 0)[1] == 0
seconds = time.monotonic() - began
done, killed, kept = 0, 0, []
while killed < kills:
    before = finished_segments()
    pid = start(workers=random.choice([1, 2]))
    # However slow the machine is, every other builder gets on by some segments.
    wait_for(pid, before + killed % 2 * random.choice([1, 3]))
    time.sleep(random.uniform(0, 0.2 * seconds))
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        killed += 1
    if os.WIFSIGNALED(status) and not out.exists():
        kept.append(finished_segments())
        continue
    assert status in (0, signal.SIGKILL), status
    done += 1
    assert contents(out) == contents(folder / "whole")
    shutil.rmtree(out)
assert os.waitpid(start(1), 0)[1] == 0
assert contents(out) == contents(folder / "whole")
assert sorted(p.name for p in folder.iterdir()) == ["data", "whole"]
print(json.dumps({"killed": killed, "kept": kept}))
"""


# The same with clusters, whose index is written last; the table is the last argument.
WITH_CLUSTERS = """
from protlm.data_prep.cluster_table import ClusterTable

def build(sources, out, **options):
    prepare(
        [Path(source) for source in sources],
        Path(out),
        split_rule=HashSplit(0.1, 0.1),
        clusters=ClusterTable(Path(sys.argv[-1])),
        options=PrepareOptions(shard_residues=30_000, **options),
    )
    assert (Path(out) / "train" / "clusters.h5").is_file()
"""


@pytest.fixture
def cluster_table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "cluster.tsv"
    path.write_text("".join(f"P{i % 700}\tP{i}\np{i % 9}\tp{i}\n" for i in range(2_900)))
    return path


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", "clusters"])
def test_a_killed_build_goes_on_to_the_same_bytes(
    run_builder, proteins, tmp_path, kills, kind, cluster_table
):
    program = KILL if kind == "plain" else WITH_CLUSTERS + KILL
    done = run_builder(program, proteins, tmp_path, kills, kills, cluster_table, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == kills
    # Kills happened while there were finished segments, which were not repeated.
    assert max(told["kept"]) > 0
    assert "resuming" in done.stderr


# Before what changes the disk is done, and after it: every such moment, one after the other.
AT_EVERY_STEP = """
import os, shutil, signal
from protlm.errors import OutputError

source, folder = sys.argv[1], Path(sys.argv[2])
whole, out = folder / "whole", folder / "data"
build([source], whole)

def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}

calls = ["replace", "rename", "mkdir", "unlink", "rmdir", "fsync"]
real = {name: getattr(os, name) for name in calls}

count = [0]

def counted(name, after, limit):
    def call(*arguments, **named):
        count[0] += 1
        if count[0] == limit and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        this = count[0]
        try:
            return real[name](*arguments, **named)
        finally:
            if this == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    return call

step, finished = 0, False
while not finished:
    step += 1
    pid = os.fork()
    if pid == 0:
        count[0] = 0
        for name in calls:
            setattr(os, name, counted(name, after=step % 2 == 0, limit=step))
        exit_with_message(lambda: build([source], out))
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), (step, status)
    finished = status == 0
    was_there = out.exists()
    try:
        build([source], out)
    except OutputError as error:
        assert was_there and "exists already" in str(error), error
    else:
        assert not was_there
    assert contents(out) == contents(whole), step
    assert sorted(path.name for path in folder.iterdir()) == ["data", "whole"], step
    shutil.rmtree(out)
print(step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "clusters"])
def test_no_step_is_a_bad_moment(run_builder, tmp_path, kind, cluster_table):
    source = tmp_path / "few.fasta"
    source.write_text("".join(f">p{i}\n{'MKVLAW' * (i % 90 + 1)}\n" for i in range(250)))
    (tmp_path / "builds").mkdir()
    program = AT_EVERY_STEP if kind == "plain" else WITH_CLUSTERS + AT_EVERY_STEP
    done = run_builder(program, source, tmp_path / "builds", cluster_table, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 40


# Of the reader and its two encoders one is killed, and the build is continued.
KILL_ONE = """
import os, signal, time
from protlm.data_prep.segments import OpenSegment

source, folder, whom = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
out, partial = folder / "data", folder / "data.partial"
build([source], folder / "whole", deduplicate=True)

def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}

def write_and_wait(*arguments):
    write(*arguments)
    time.sleep(0.5)

pid = os.fork()
if pid == 0:
    write, OpenSegment.write = OpenSegment.write, write_and_wait
    exit_with_message(lambda: build([source], out, workers=2, deduplicate=True))
while not list(partial.glob("journal/segment-*.json")):
    assert not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    time.sleep(0.001)
workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
assert len(workers) == 2, workers
os.kill(pid if whom == "reader" else int(workers[0]), signal.SIGKILL)
ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
# A build whose killed encoder had nothing to do may end well with the other one.
assert ended in ([-signal.SIGKILL] if whom == "reader" else [0, 1]), ended
assert out.exists() == (ended == 0)
if ended:
    build([source], out, workers=2, deduplicate=True)
assert contents(out) == contents(folder / "whole")
assert sorted(p.name for p in folder.iterdir()) == ["data", "whole"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["reader", "encoder"])
def test_one_process_of_a_build_is_killed(run_builder, proteins, tmp_path, whom):
    done = run_builder(KILL_ONE, proteins, tmp_path, whom, timeout=120)
    assert done.returncode == 0, done.stderr
