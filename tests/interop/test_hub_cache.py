"""A model is downloaded by huggingface_hub itself, from a server that answers as the Hub does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from protlm.data.vocabulary import VOCABULARY

pytestmark = pytest.mark.peers
pytest.importorskip("huggingface_hub")
NAME = "someone/esm2_tiny"
COMMIT = "0" * 40


@pytest.fixture
def served(write_esm: Callable[..., Path]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a Hub with one model, and what ends it."""
    folder = write_esm("served")
    numbers = {token: number for number, token in enumerate(VOCABULARY.tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
    (folder / "modeling_code.py").write_text("raise SystemExit")

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
                siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                tree = [
                    {"type": "file", "path": name, "size": size, "oid": COMMIT}
                    for name, size in sizes.items()
                ]
                told = {"_id": "1", "id": NAME, "sha": COMMIT, "siblings": siblings}
                told = tree if "/tree/" in path else told
                self.reply(json.dumps(told).encode(), "application/json")
            elif (file := folder / Path(path).name).is_file():
                self.reply(file.read_bytes(), "application/octet-stream")
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def reply(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", server.shutdown
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_downloaded_model_is_used_without_the_network(
    served: tuple[str, Callable[[], None]], tmp_path: Path
) -> None:
    address, end = served
    cache = tmp_path / "cache"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(cache)}

    def import_model(output: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "protlm", "checkpoint", "import", NAME, "-o", output]
        return subprocess.run(
            command,
            env=environment | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    first = import_model("first")
    assert first.returncode == 0, first.stderr
    assert "downloading config.json, tokenizer.json, model.safetensors of" in first.stderr
    assert {path.name for path in (cache / "hub").rglob("snapshots/*/*")} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    end()
    offline = import_model("offline", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "from the cache, because HF_HUB_OFFLINE is set" in offline.stderr
    unreachable = import_model("unreachable", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.returncode == 0, unreachable.stderr
    assert "from the cache, because the Hugging Face Hub failed" in unreachable.stderr
    weights = {(tmp_path / n / "model.safetensors").read_bytes() for n in ("first", "offline")}
    assert len(weights) == 1
