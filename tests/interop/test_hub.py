"""Models of the Hugging Face Hub: its interface is imitated, or a server answers in its place."""

import json
from collections.abc import Callable, Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

import protlm
from protlm import interop
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.hub import _read_files
from protlm.system.errors import InputDataError, UserError

pytestmark = pytest.mark.peers
hub = pytest.importorskip("huggingface_hub")
NAME = "someone/esm2_tiny"
REVISION = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a revision in the cache, without files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / "snapshots").mkdir()
    return folder / "snapshots" / REVISION


def answer(monkeypatch: pytest.MonkeyPatch, information: Any) -> None:
    """The Hub answers with the information on a model, or with an error."""

    def model_info(self: object, name: str, *, files_metadata: bool) -> Any:
        assert (name, files_metadata) == (NAME, True)
        if isinstance(information, Exception):
            raise information
        return information

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)


def hub_error(kind: str) -> Exception:
    import httpx

    response = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))
    return getattr(hub.errors, kind)("no", response=response)


def files(*named: tuple[str, int]) -> Any:
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in named]
    return SimpleNamespace(sha=REVISION, siblings=siblings)


def test_what_is_downloaded_is_printed_before(cache, write_esm, monkeypatch, capsys):
    source = write_esm()

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == NAME
        assert allow_patterns == ["config.json", "model.safetensors"]
        printed = capsys.readouterr().err
        assert printed.startswith(
            f"model: downloading config.json, model.safetensors of {NAME}, 2,001.5 MB, from"
        )
        source.rename(cache)
        return str(cache)

    expected = protlm.load(source).hash
    answer(
        monkeypatch,
        files(("config.json", 1_500_000), ("model.safetensors", 2 * 10**9), ("modeling.py", 7)),
    )
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert protlm.load(NAME).hash == expected


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_is_used_without_the_network(offline, cache, write_esm, monkeypatch, capsys):
    write_esm().rename(cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    answer(monkeypatch, ConnectionError("unreachable\nmore"))
    assert protlm.load(NAME).hash == protlm.load(cache).hash
    reason = "HF_HUB_OFFLINE is set" if offline else "failed (ConnectionError: unreachable)"
    assert capsys.readouterr().err.strip().endswith(reason)


@pytest.mark.parametrize(
    "information, message",
    [
        (None, "here; it is not in the cache .*hub either, and HF_HUB_OFFLINE is set"),
        (ConnectionError("x"), r"in the cache .*failed \(ConnectionError: x\)"),
        ("GatedRepoError", f"{NAME} is gated: accept .*hf auth login"),
        ("RepositoryNotFoundError", "not exist here, and is not a model of the Hugging Face"),
        (files(("README.md", 1)), "has no config.json with weights"),
        (files(("config.json", 1), ("vocab.txt", 1)), "has no config.json with weights"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(information, message, cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", information is None)
    answer(monkeypatch, hub_error(information) if isinstance(information, str) else information)
    with pytest.raises(InputDataError, match=message) as raised:
        protlm.load(NAME)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize("name", ["a/" + "b" * 97, "a" * 97 + "/b", "a/b..c", "a--b/c"])
@pytest.mark.parametrize("offline", [False, True])
def test_an_impossible_name_is_one_sentence(name, offline, cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(UserError, match="cannot be a name of the Hugging Face Hub, which") as error:
        protlm.load(name)
    assert error.value.exit_code == 2


def test_a_model_that_cannot_be_imported_leaves_nothing(
    cache, tmp_path, monkeypatch, protlm_in_process
):
    answer(monkeypatch, hub_error("GatedRepoError"))
    done = protlm_in_process("checkpoint", "import", NAME, "-o", "new", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_local_path_is_not_looked_up(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/mistyped", "/absolute/path", "../x", "a/b/c", "name", "a b/c", "./a"):
        assert interop.local_path(Path(path)) == Path(path)


@pytest.mark.parametrize(
    "names, expected",
    [
        (["model.safetensors", "model.safetensors.index.json"], ["model.safetensors"]),
        (["pytorch_model.bin", "tf_model.h5", "x.pt"], ["pytorch_model.bin"]),
        (
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "x.safetensors"],
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
        ),
    ],
)
def test_one_form_of_the_weights_is_read(names, expected):
    assert _read_files(["config.json", *names]) == ["config.json", *expected]


@pytest.fixture
def served(write_esm: Callable[..., Path]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a Hub with one model, and what ends it."""
    folder = write_esm("served")
    numbers = {token: number for number, token in enumerate(VOCABULARY.tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
    (folder / "modeling_code.py").write_text("raise SystemExit")

    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    tree = [
        {"type": "file", "path": name, "size": size, "oid": REVISION}
        for name, size in sizes.items()
    ]
    siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
    model = {"_id": "1", "id": NAME, "sha": REVISION, "siblings": siblings}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                content = json.dumps(tree if "/tree/" in path else model).encode()
            elif (file := folder / Path(path).name).is_file():
                content = file.read_bytes()
            else:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            return None

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", server.shutdown
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_downloaded_model_is_used_without_the_network(served, protlm_command, tmp_path):
    address, end = served
    named = {"config.json", "tokenizer.json", "model.safetensors"}
    cases = [
        ("first", {}, "downloading config.json, tokenizer.json, model.safetensors of"),
        ("offline", {"HF_HUB_OFFLINE": "1"}, "from the cache, because HF_HUB_OFFLINE is set"),
        ("gone", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "because the Hugging Face Hub failed"),
    ]
    for output, more, told in cases:
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), **more}
        command = ("checkpoint", "import", NAME, "-o", output)
        done = protlm_command(*command, cwd=tmp_path, env=env)
        assert (done.returncode, told in done.stderr) == (0, True), done.stderr
        assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")} == named
        if output == "first":
            end()
    weights = {(tmp_path / name / "model.safetensors").read_bytes() for name, *_ in cases}
    assert len(weights) == 1
