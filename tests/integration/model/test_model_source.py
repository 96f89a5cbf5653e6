"""Where models come from: package, directory, hub cache, and a hub served over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import MODEL_NAME, demo_model_path
from pagewire.shared.model.source import default_served_name, resolve_model, served_names
from pagewire.tests.support.fake_hub import FakeHub, running_hub

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


class HubUser:
    """Resolves hub ids in processes of their own, since the hub's library reads its settings once.

    Attributes:
        hub: what they talk to.
    """

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self._environment = {
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.url,
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
    with running_hub(REPO, FILES) as hub:
        yield HubUser(hub, tmp_path)


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
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file; pass the directory that it lies in"):
        resolve_model(str(file))


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
