"""Models whose chat templates show tools: the demo model with another template and more tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pagewire.shared.model.demo import demo_model_path

TEMPLATES = Path(__file__).parent / "chat_templates"
# Added tokens of each template: SPECIAL ones, and others that count as TEXT, as in Qwen's models.
_IM = ["<|im_start|>", "<|im_end|>"]
_DEEPSEEK = [
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
_COHERE = [
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
]
SPECIAL = {
    "cohere2": _COHERE,
    "command_r": _COHERE,
    "phi4_mini": ["<|tool|>", "<|/tool|>"],
    "granite": ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"],
    "smollm3": _IM,
    "olmo3": _IM,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "qwen3_coder": _IM,
    "harmony": [
        *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
    ],
    "hermes": _IM,
    "llama3_json": ["<|start|>", "<|stop|>", "<|eot|>", "<|python_tag|>"],
    "mistral": [
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ],
}
TEXT = {
    "cohere2": [
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    ],
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "phi4_mini": ["<|tool_call|>", "<|/tool_call|>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "olmo3": ["<function_calls>", "</function_calls>", "<think>", "</think>"],
    "smollm3": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "deepseek_v31": ["<think>", "</think>"],
}


def template_source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def make_model(folder: Path, name: str) -> Path:
    """Make a model directory with a template; its weights have no rows for the new tokens."""
    path = folder / name
    path.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / file, path)
    (path / "chat_template.jinja").write_text(template_source(name), encoding="utf-8")
    tokenizer: dict[str, Any] = json.loads((demo_model_path() / "tokenizer.json").read_text())
    added = [(text, True) for text in SPECIAL[name]] + [(t, False) for t in TEXT.get(name, [])]
    first = max(tokenizer["model"]["vocab"].values()) + 1
    for token_id, (text, special) in enumerate(added, start=first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": token_id, "content": text, "special": special, **flags}
        tokenizer["added_tokens"].append(token)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": first + len(added)}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


class ToolModels(dict[str, Path]):
    """Model directories by the names of their templates; each is made when it is first used."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = path = make_model(self._folder, name)
        return path
