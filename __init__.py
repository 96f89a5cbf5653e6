"""Pagewire: LLM serving with prefill and decode on separate GPU services.

`LLM` and what its methods take are loaded on first use, so that `import pagewire`
(the router does it) never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.shared.engine.offline.async_llm import AsyncLLM
    from pagewire.shared.engine.offline.beam_search import BeamSearchParams
    from pagewire.shared.engine.offline.llm import LLM
    from pagewire.shared.request.sampling import SamplingParams
    from pagewire.shared.request.structured_outputs import StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "pagewire.shared.engine.offline.llm",
    "AsyncLLM": "pagewire.shared.engine.offline.async_llm",
    "BeamSearchParams": "pagewire.shared.engine.offline.beam_search",
    "SamplingParams": "pagewire.shared.request.sampling",
    "StructuredOutputs": "pagewire.shared.request.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    helpers = {"Any", "TYPE_CHECKING", "annotations", "import_module"}
    return sorted({*globals(), *__all__} - helpers)
