"""What the files of sentence-transformers say: which are read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.model.pooling import load_pooling


@pytest.mark.parametrize("folder", ["1_Pooling", "parts/pooling", "parts/pooling/", ""])
def test_a_modules_path_is_relative_to_the_models_directory(tmp_path: Path, folder: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"path": folder, "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert load_pooling(tmp_path).mode == "mean"


def test_texts_in_lower_case_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    texts = tmp_path / "sentence_bert_config.json"
    texts.write_text('{"max_seq_length": 512, "do_lower_case": false}')
    assert load_pooling(tmp_path).mode == "mean"
    texts.write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match="do_lower_case"):
        load_pooling(tmp_path)
