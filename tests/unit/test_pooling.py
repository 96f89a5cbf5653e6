"""Where the file of a pooling module lies, by its path in `modules.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewire.shared.model.pooling import load_pooling


@pytest.mark.parametrize("folder", ["1_Pooling", "parts/pooling", "parts/pooling/", ""])
def test_a_modules_path_is_relative_to_the_models_directory(tmp_path: Path, folder: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"path": folder, "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert load_pooling(tmp_path).mode == "mean"
