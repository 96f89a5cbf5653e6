"""Downloads models from the Hugging Face hub, or finds them in its cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# The error of its HTTP client, which is httpx in one release and httpx2 in the next.
from huggingface_hub.errors import HTTPError as HubClientError  # type: ignore[attr-defined]

from pagewire.shared.base.errors import ModelLoadError

_TEXT_PATTERNS = ["*.json", "*.jinja", "*.model", "merges.txt", "tokenizer*"]
_WEIGHT_PATTERNS = ["*.safetensors"]
# The same weights once more, in the vendors' own formats.
_IGNORED_PATTERNS = ["original/*", "consolidated*", "onnx/*"]


def download(hub_id: str, weights: bool, revision: str | None) -> Path:
    """Return the local directory of a model of the hub.

    Args:
        hub_id: its name, perhaps with an organisation.
        weights: False leaves its weights where they are.
        revision: branch, tag or commit; None: its main branch.

    Raises:
        ModelLoadError: it cannot be downloaded; one line.
    """
    try:
        path = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=_TEXT_PATTERNS + (_WEIGHT_PATTERNS if weights else []),
            ignore_patterns=_IGNORED_PATTERNS,
            local_files_only=constants.is_offline_mode(),
        )
    except (OSError, ValueError, HubClientError) as exc:
        raise ModelLoadError(f"model {hub_id} {_reason(exc, revision)}") from exc
    return Path(path)


def _reason(error: Exception, revision: str | None) -> str:
    """Say in one line why a download failed; the hub's own messages run over several."""
    if isinstance(error, GatedRepoError):
        return "is gated on the Hugging Face hub; accept its licence there and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {revision} on the Hugging Face hub; check its branches and tags"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "is neither a local directory nor on the Hugging Face hub; check the spelling, or set "
            "HF_TOKEN if it is private"
        )
    if isinstance(error, LocalEntryNotFoundError):
        return (
            "is not a local directory, not in the Hugging Face cache, and the hub cannot be "
            "reached; check the path or the network (HF_HUB_OFFLINE forbids downloads)"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot be fetched from the Hugging Face hub: {lines[0]}"
