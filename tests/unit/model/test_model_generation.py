"""Sampling defaults from `generation_config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.generation import load_sampling_defaults
from pagewire.shared.request.sampling import SamplingDefaults


def write(directory: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return directory


def test_a_models_own_values_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # As Qwen2.5-Instruct has it, and a bit more.
    content = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "max_new_tokens": 2048,
        "repetition_penalty": 1.05,
        "transformers_version": "4.45.0",
        "some_field_of_the_future": {"a": [1]},
    }
    assert load_sampling_defaults(write(tmp_path, content), "auto") == SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=2048
    )
    assert load_sampling_defaults(tmp_path, "none") == SamplingDefaults()
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": None, "top_k": None}, SamplingDefaults()),
        ({"temperature": 1}, SamplingDefaults(temperature=1.0)),
        ({"temperature": 0}, SamplingDefaults(temperature=0.0)),
        ({"top_k": -1}, SamplingDefaults(top_k=0)),
        ({"min_p": 0, "repetition_penalty": 1}, SamplingDefaults()),
        ({"temperature": 0, "do_sample": False}, SamplingDefaults(temperature=0.0)),
    ],
)
def test_each_way_to_say_it(tmp_path: Path, content: Any, expected: SamplingDefaults) -> None:
    assert load_sampling_defaults(write(tmp_path, content), "auto") == expected


def test_a_directory_without_the_file_suggests_nothing(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path, "auto") == SamplingDefaults()


def test_the_demo_is_greedy() -> None:
    assert load_sampling_defaults(demo_model_path(), "auto").temperature == 0


BAD = [
    ("temperature", "-1"),
    ("temperature", '"abc"'),
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "true"),
    ("temperature", "[0.5]"),
    ("top_p", "0"),
    ("top_p", "1.5"),
    ("top_k", "-2"),
    ("top_k", "2.5"),
    ("min_p", "1.5"),
    ("repetition_penalty", "0"),
    ("max_new_tokens", "0"),
    ("max_new_tokens", '"many"'),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}={v}" for f, v in BAD])
def test_a_wrong_value_names_file_field_and_rule(tmp_path: Path, field: str, value: str) -> None:
    write(tmp_path, f'{{"{field}": {value}}}')
    with pytest.raises(ModelLoadError) as caught:
        load_sampling_defaults(tmp_path, "auto")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/generation_config.json: {field} must be ")
    assert "--generation-config none" in message
    assert "\n" not in message
    assert load_sampling_defaults(tmp_path, "none") == SamplingDefaults()


def test_what_is_not_applied_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "do_sample": False,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "temperature": 0.5,
    }
    load_sampling_defaults(write(tmp_path, content), "auto")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{tmp_path}/generation_config.json has fields that are not applied: do_sample=False, "
        "no_repeat_ngram_size=3, num_beams=4"
    )
