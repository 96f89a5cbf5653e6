"""How published models describe quantised weights: which tensors they must have, or why refused.

`tests/support/published_quantisation.json` has, for each model, the description and the file that
has it (`quantization_config`: config.json), the plain model in `published_configs` that was
quantised, and the fields of config.json that differ from its. Lists of names are shortened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.parameters import named_targets
from pagewire.shared.model.loader import build_model

SUPPORT = Path(__file__).parents[2] / "support"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (SUPPORT / "published_quantisation.json").read_text()
)
SERVED, REFUSED = PUBLISHED["served"], PUBLISHED["refused"]
META = torch.device("meta")


def write(path: Path, model: dict[str, Any]) -> Path:
    """Write the files that describe a model."""
    plain = json.loads((SUPPORT / "published_configs" / f"{model['base']}.json").read_text())
    described = {"quantization_config": model.get("quantization_config")}
    (path / "config.json").write_text(json.dumps(plain | described | model.get("config", {})))
    for name, content in model.items():
        if name.endswith(".json"):
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", SERVED)
def test_tensors_and_bytes_are_those_of_the_files(tmp_path: Path, name: str) -> None:
    """Scales and zeros in INT4 take more here: they are in float32."""
    config = load_config(write(tmp_path, SERVED[name]))
    model = build_model(config, META, getattr(torch, config.dtype), load_ops("torch", "cpu"), 1)
    stored = sum(each.nbytes for each in model.stored())
    if "gigabytes" in SERVED[name]:
        assert stored / 1e9 == pytest.approx(SERVED[name]["gigabytes"], rel=0.1)
    expected: dict[str, str] = SERVED[name]["tensors"]
    found: dict[str, set[str]] = {layer: set() for layer in expected}
    for section in model.sections():
        for target in named_targets(section):
            layer, _, part = target.name.rpartition(".")
            if layer in found:
                found[layer].add(part)
    assert found == {layer: set(parts.split()) for layer, parts in expected.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_that_names_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_config(write(tmp_path, REFUSED[name]))
    file = next((key for key in REFUSED[name] if key.endswith(".json")), "config.json")
    assert str(caught.value).startswith(f"{tmp_path / file}: ")
    assert REFUSED[name]["refused"] in str(caught.value)
    assert "\n" not in str(caught.value)
