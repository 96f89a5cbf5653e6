"""The demo model that the package carries: a small Llama that has learned the Python manual."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "pagewire-demo"


def demo_model_path() -> Path:
    """Return the demo model's directory, in Hugging Face format."""
    return Path(__file__).resolve().parent
