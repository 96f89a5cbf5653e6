"""Where models come from: package, directory, hub cache, and a hub served over HTTP."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import MODEL_NAME, demo_model_path
from pagewire.shared.model.safetensors_header import find_weights
from pagewire.shared.model.source import default_served_name, resolve_model, served_names
from pagewire.tests.support.http_thread import QuietHandler, serving_http

COMMIT = "a" * 40
REPO = "acme/tiny-llama"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"pickled weights",
    "README.md": b"# A model",
}
TEXT_FILES = {"config.json", "tokenizer.json", "chat_template.jinja"}

SCRIPT = """
import sys
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.source import resolve_model
try:
    revision = (sys.argv[3:] or [None])[0]
    print(resolve_model(sys.argv[1], weights=sys.argv[2] == "weights", revision=revision))
except ModelLoadError as exc:
    sys.exit(str(exc))
"""


class FakeHub(ThreadingHTTPServer):
    """Serves `files` of the repository `repo_id`; `acme/gated` is 403, anything else 404.

    Attributes:
        downloads: names of the files that were downloaded, in order.
        paths: paths of all requests, in order.
    """

    def __init__(self, repo_id: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id = repo_id
        self.files = files
        self.downloads: list[str] = []
        self.paths: list[str] = []


class _Handler(QuietHandler, BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.paths.append(path)
        if path.startswith("/api/models/acme/gated/"):
            self._send(403, b"{}", {"X_Error_Code": "GatedRepo"}, body)
        elif path == f"/api/models/{hub.repo_id}/revision/nowhere":
            self._send(404, b"{}", {"X_Error_Code": "RevisionNotFound"}, body)
        elif path.startswith(f"/api/models/{hub.repo_id}/tree/"):
            self._send(200, json.dumps([_entry(*item) for item in hub.files.items()]), {}, body)
        elif path.startswith(f"/api/models/{hub.repo_id}"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": hub.repo_id, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info), {}, body)
        elif path.startswith(f"/{hub.repo_id}/resolve/"):
            self._send_file(path.split("/", 5)[5], body)
        else:
            self._send(404, b"{}", {"X_Error_Code": "RepoNotFound"}, body)

    def _send_file(self, name: str, body: bool) -> None:
        if body:
            self.server.downloads.append(name)
        data = self.server.files[name]
        etag = hashlib.sha256(data).hexdigest()
        self._send(200, data, {"X_Repo_Commit": COMMIT, "ETag": f'"{etag}"'}, body)

    def _send(self, status: int, data: bytes | str, headers: dict[str, str], body: bool) -> None:
        data = data.encode() if isinstance(data, str) else data
        self.answer(status, data, has_body=body, **headers)


def _entry(name: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha256(data).hexdigest()[:40]
    return {"type": "file", "path": name, "size": len(data), "oid": oid}


class HubUser:
    """Resolves hub ids in processes of their own, since the hub's library reads its settings once.

    Attributes:
        hub: what they talk to.
    """

    def __init__(self, hub: FakeHub, url: str, home: Path) -> None:
        self.hub = hub
        self._environment = {
            "HF_HOME": str(home),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def resolve(
        self,
        name: str,
        *,
        weights: bool = True,
        revision: str | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-c", SCRIPT, name, "weights" if weights else "text"),
                *([] if revision is None else [revision]),
            ],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def files_of(self, done: subprocess.CompletedProcess[str]) -> set[str]:
        assert done.returncode == 0, done.stderr
        root = Path(done.stdout.strip())
        return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[HubUser]:
    hub = FakeHub(REPO, FILES)
    with serving_http(hub) as url:
        yield HubUser(hub, url, tmp_path)


def test_demo_is_in_the_package() -> None:
    assert resolve_model("demo") == demo_model_path()
    assert (demo_model_path() / "config.json").is_file()


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / "acme" / "tiny"
    for name in ("acme/tiny", "./acme/tiny/", str(expected), "~/acme/tiny"):
        assert resolve_model(name) == expected


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("demo", MODEL_NAME),
        ("acme/tiny-llama", "tiny-llama"),
        ("/models/tiny-llama/", "tiny-llama"),
        ("tiny-llama", "tiny-llama"),
    ],
)
def test_default_served_name(name: str, served: str) -> None:
    assert default_served_name(name) == served
    assert served_names(None, name) == served_names((), name) == (served,)
    assert served_names(("one", "two"), name) == ("one", "two")


@pytest.mark.parametrize(
    "name",
    ["/nowhere/model", "./model", "~/no-model", "~nobody-here/model", "a/b/c", "white space"],
)
def test_directory_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    assert str(caught.value) == (
        f"model directory {name} does not exist; pass a Hugging Face directory, a hub id such as "
        "meta-llama/Llama-3.1-8B-Instruct, or 'demo'"
    )


def test_no_name_is_not_the_working_directory() -> None:
    with pytest.raises(ModelLoadError, match="model directory '' does not exist"):
        resolve_model("")


def test_file_instead_of_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file; pass the directory that it lies in"):
        resolve_model(str(file))


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    """As a file, in a directory, and in one that has a config.json, too."""
    file = tmp_path / "model-Q4_K_M.gguf"
    file.touch()
    message = r"model-Q4_K_M\.gguf is in GGUF, which is not supported; pass a directory in Hugging"
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(file))
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        find_weights(tmp_path)


def test_hub_id_is_downloaded_without_what_is_not_read(user: HubUser) -> None:
    assert user.files_of(user.resolve(REPO)) == TEXT_FILES | {"model.safetensors"}


def test_a_revision_is_what_the_hub_is_asked_for(user: HubUser) -> None:
    assert "config.json" in user.files_of(user.resolve(REPO, revision="v1.2"))
    assert any(f"/api/models/{REPO}/revision/v1.2" == path for path in user.hub.paths)
    assert not any(path.endswith("/revision/main") for path in user.hub.paths)


def test_a_revision_that_there_is_not(user: HubUser) -> None:
    done = user.resolve(REPO, revision="nowhere")
    assert f"model {REPO} has no revision nowhere on the Hugging Face hub" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_revision_of_a_model_on_this_machine_is_refused(tmp_path: Path) -> None:
    for name in ("demo", str(tmp_path)):
        with pytest.raises(ModelLoadError, match="--revision v1 is for models of the hub"):
            resolve_model(name, revision="v1")


def test_router_downloads_no_weights(user: HubUser) -> None:
    assert user.files_of(user.resolve(REPO, weights=False)) == TEXT_FILES
    assert "model.safetensors" not in user.hub.downloads


def test_downloaded_model_is_found_again_offline(user: HubUser) -> None:
    path = user.resolve(REPO).stdout
    again = user.resolve(REPO, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert again.stdout == path
    assert len(user.hub.downloads) == len(set(user.hub.downloads))


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("acme/nothing", {}, "is neither a local directory nor on the Hugging Face hub"),
        ("acme/gated", {}, "is gated on the Hugging Face hub; accept its licence there and set"),
        (REPO, {"HF_HUB_OFFLINE": "1"}, "not in the Hugging Face cache, and the hub cannot be"),
        (REPO, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "and the hub cannot be reached"),
        ("acme/a--b", {}, "cannot be fetched from the Hugging Face hub: Cannot have -- or .."),
    ],
    ids=["unknown", "gated", "offline", "unreachable", "impossible-id"],
)
def test_model_that_the_hub_does_not_give(
    user: HubUser, name: str, environment: dict[str, str], message: str
) -> None:
    done = user.resolve(name, **environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"model {name} ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
