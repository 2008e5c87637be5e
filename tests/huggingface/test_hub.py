"""Models named as on the hub, from a server in this process that answers as the hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import huggingface_hub
import pytest

from cfprm_jax import train
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import hub

COMMIT, OTHER = "1" * 40, "2" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "original/model.pth": b"large", "README.md": b"card"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Revision, tree and files of owner/model; owner/gated requires a token."""

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        path = self.path.split("?")[0]
        if "owner/gated" in path:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "owner/model" not in path:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/owner/model/revision/"):
            revisions = {"main": COMMIT, "v2": OTHER, COMMIT: COMMIT}
            revision = revisions.get(path.rsplit("/", 1)[1])
            if revision is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self.answer(200, json.dumps({"id": "owner/model", "sha": revision, "siblings": []}).encode())
        if path.startswith("/api/models/owner/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return self.answer(200, json.dumps(entries).encode())
        name = path.split("/resolve/")[1].split("/", 1)[1]
        data = FILES[name]
        return self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[http.server.ThreadingHTTPServer]:
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.seen = []
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def test_a_name_is_downloaded_once_and_found_again_without_the_hub(server, monkeypatch) -> None:
    directory = pathlib.Path(hub.local_directory("owner/model"))
    assert directory.name == COMMIT
    stored = {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    assert stored == {name: data for name, data in FILES.items() if name != "original/model.pth"}
    fetched = [path for path in server.seen if "/resolve/" in path]
    server.seen.clear()
    assert hub.local_directory("owner/model") == str(directory)
    assert fetched and not [path for path in server.seen if "/resolve/" in path]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    assert hub.local_directory("owner/model") == str(directory)


def test_a_revision_is_a_directory_of_its_own(server) -> None:
    assert pathlib.Path(hub.local_directory("owner/model@v2")).name == OTHER
    assert pathlib.Path(hub.local_directory(f"owner/model@{COMMIT}")).name == COMMIT


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("owner/model@nowhere", "no revision nowhere"),
        ("owner/gated", "access to this repository"),
        ("owner/unknown", "HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses(server, name: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        hub.local_directory(name, "--model")
    assert str(error.value).startswith(f"--model={name}") and part in str(error.value)


def test_without_a_network_the_error_names_the_command(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="hf download owner/model --local-dir models/model") as error:
        hub.local_directory("owner/model")
    assert "\n" not in str(error.value)


def test_paths_and_other_texts_are_left_as_they_are(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for name in ("models/tiny", "synthetic", "", str(tmp_path), "a/b/c", "../models/x"):
        assert hub.local_directory(name) == name
    # Nor does the hub have such names: they are paths that do not exist.
    for name in ("runs/first--try", "runs/a..b", "runs/x.git", f"runs/{'x' * 120}", "runs/first--try@v1"):
        assert hub.local_directory(name) == name


@pytest.mark.parametrize("name", ["model", "a/b/c", "owner/model@main", "", "owner/a--b", "owner/a..b", "owner/x.git"])
def test_an_upload_needs_a_name(name: str) -> None:
    with pytest.raises(UserError, match="expected owner/name"):
        hub.check_name(name)


def test_an_upload_without_a_token_keeps_the_export(server, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "README.md").write_text("card")
    with pytest.raises(UserError, match="--push_to_hub=owner/mine: "):
        hub.upload(tmp_path, "owner/mine", private=True)


def test_an_upload_without_a_network_keeps_the_export(server, monkeypatch, tmp_path) -> None:
    """A connection that is closed before it is answered, as by a proxy."""
    monkeypatch.setattr(Handler, "do_POST", lambda self: setattr(self, "close_connection", True), raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    (tmp_path / "README.md").write_text("card")
    with pytest.raises(UserError, match=r"--push_to_hub=owner/mine: .* The export itself is complete") as error:
        hub.upload(tmp_path, "owner/mine", private=True)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_train_takes_a_name(server, tmp_path, capsys) -> None:
    """The name reaches the model's files: the download is what is refused."""
    from cfprm_jax import flags

    (tmp_path / "train.jsonl").write_text('{"prompt": "q", "completions": ["a"], "labels": [1]}\n')
    arguments = ["--model=owner/model", f"--train_data={tmp_path / 'train.jsonl'}", f"--output_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=f"{COMMIT}/model.safetensors: truncated"):
        train.main(flags.parse(train.TrainConfig, ["train", *arguments, "--compile_cache_dir="]))
