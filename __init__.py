"""Pagewire: LLM serving with prefill and decode on separate GPU services.

`LLM` and what its methods take are loaded on first use, so that `import pagewire`
(the router does it) never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.shared.engine.offline.beam_search import BeamSearchParams
    from pagewire.shared.engine.offline.llm import LLM
    from pagewire.shared.request.sampling import SamplingParams
    from pagewire.shared.request.structured_outputs import StructuredOutputs

__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "LLM":
        from pagewire.shared.engine.offline.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from pagewire.shared.engine.offline.beam_search import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from pagewire.shared.request.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from pagewire.shared.request.structured_outputs import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
