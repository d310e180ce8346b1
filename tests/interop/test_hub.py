"""Models of the Hugging Face Hub, with a server in its place."""

import json
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import protlm
from protlm import interop
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError
from tests.interop.families import ESM

pytestmark = pytest.mark.peers
constants = pytest.importorskip("huggingface_hub.constants")
NAME = "someone/esm2_tiny"
REVISION = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves the files of `folder` as one model, or refuses with an error of the Hub."""

    folder: Path
    error = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = self.folder / Path(path).name
        if self.error or not (path.startswith("/api/models/") or file.is_file()):
            self.send_response(403 if self.error == "GatedRepo" else 404)
            self.send_header("X-Error-Code", self.error)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes() if file.is_file() else self.description("/tree/" in path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def description(self, as_tree: bool) -> bytes:
        sizes = {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())}
        if as_tree:
            entry = {"type": "file", "oid": REVISION}
            return json.dumps([{**entry, "path": n, "size": s} for n, s in sizes.items()]).encode()
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return json.dumps({"_id": "1", "id": NAME, "sha": REVISION, "siblings": siblings}).encode()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a Hub that cannot be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


@pytest.fixture
def served(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A Hub with one model, with code in it, that can be reached."""
    folder = ESM.save(tmp_path / "served")
    numbers = {token: number for number, token in enumerate(VOCABULARY.tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
    (folder / "modeling_code.py").write_text("raise SystemExit")
    handler = type("OneModel", (Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield handler
    server.shutdown()
    server.server_close()


def test_a_downloaded_model_is_used_without_the_network(served, cache, monkeypatch, capsys):
    expected = protlm.load(served.folder).hash
    for unused in ("pytorch_model.bin", "tf_model.h5", "model.fp16.safetensors"):
        (served.folder / unused).touch()
    for state in ("first", "again", "offline", "gone"):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", state == "offline")
        if state == "gone":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert protlm.load(NAME).hash == expected
        assert f"model: {NAME} of the Hugging Face Hub, revision 000" in capsys.readouterr().err
        names = {path.name for path in cache.rglob("snapshots/*/*")}
        assert names == {"config.json", "tokenizer.json", "model.safetensors"}


def test_weights_of_pytorch_are_downloaded_where_there_are_no_others(served, cache):
    (served.folder / "model.safetensors").rename(served.folder / "pytorch_model.bin")
    with pytest.raises(InputDataError, match=r"pytorch_model\.bin"):
        protlm.load(NAME)
    assert [*cache.rglob("snapshots/*/pytorch_model.bin")]


@pytest.mark.parametrize(
    "state, message",
    [
        ("offline", "here; it is not in the cache .*hub either, and HF_HUB_OFFLINE is set"),
        ("gone", r"in the cache .*failed \(.*ConnectError: "),
        ("GatedRepo", f"{NAME} is gated: accept .*hf auth login"),
        ("RepoNotFound", "not exist here, and is not a model of the Hugging Face"),
        ("without weights", "has no config.json with weights"),
        ("without config.json", "has no config.json with weights"),
        ("adapter", f"no config.json .* adapter of PEFT, type: hf download {NAME} --local-dir"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(
    state, message, served, tmp_path, monkeypatch, protlm_in_process
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", state == "offline")
    lacking = {"without weights": "model.safetensors", "without config.json": "config.json"}
    if state == "gone":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif state == "adapter":
        for unread in ("config.json", "model.safetensors"):
            (served.folder / unread).rename(served.folder / f"adapter_{unread}")
    elif state in lacking:
        (served.folder / lacking[state]).unlink()
    else:
        served.error = state
    with pytest.raises(InputDataError, match=message) as raised:
        protlm.load(NAME)
    assert "\n" not in str(raised.value)
    done = protlm_in_process("checkpoint", "import", NAME, "-o", "new", cwd=tmp_path, code=3)
    # The library may show the progress of the description before.
    said = [line for line in done.stderr.splitlines() if "protlm" in line]
    assert said == [done.stderr.splitlines()[-1]]
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("name", ["a/" + "b" * 97, "a" * 97 + "/b", "a/b..c", "a--b/c"])
@pytest.mark.parametrize("offline", [False, True])
def test_an_impossible_name_is_one_sentence(name, offline, cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(InputDataError, match="is not a model of the Hugging Face Hub"):
        protlm.load(name)


def test_a_local_path_is_not_looked_up(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/mistyped", "/absolute/path", "../x", "a/b/c", "name", "a b/c", "./a"):
        assert interop.local_path(Path(path)) == Path(path)
