"""The context and the KV pool: a length that was set fits or is refused, a shrunk one is logged."""

from __future__ import annotations

import logging

import pytest

from pagewire import LLM
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.choices import fit_context
from pagewire.shared.settings.config import EngineSettings, load_settings
from pagewire.tests.support.kv_layouts import kv_layout


def test_a_context_that_does_not_fit_the_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len .*at most 32, .* raise num_blocks to 4"):
        LLM("demo", num_blocks=2, max_model_len=64)


def test_a_context_that_memory_does_not_hold_is_refused_with_what_would_fit() -> None:
    settings = load_settings(EngineSettings, {"max_model_len": 4096})
    layout = kv_layout(block_size=16)
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 does not fit: .*holds 320 tokens"):
        fit_context(settings, 4096, 20, layout)
    assert fit_context(settings, 4096, 256, layout) == 4096


def test_a_pool_that_holds_no_token_is_refused() -> None:
    settings = load_settings(EngineSettings, {})
    windowed = kv_layout((None, 32), block_size=16)
    with pytest.raises(ConfigError, match="needs at least 2 KV blocks: raise --num-blocks"):
        fit_context(settings, 4096, 1, windowed)
    assert fit_context(settings, 4096, 2, windowed) == 16


def test_a_default_that_had_to_shrink_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    built = build_engine(load_settings(EngineSettings, {"device": "cpu", "num_blocks": 2}))
    assert (built.max_model_len, built.full_model_len) == (32, 4096)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the context is 32 tokens, not the model's 4096" in record.getMessage()


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 256}, {"max_model_len": 64}])
def test_a_context_that_fits_is_not_logged(
    settings: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    built = build_engine(load_settings(EngineSettings, {"device": "cpu", **settings}))
    assert built.max_model_len == built.full_model_len == settings.get("max_model_len", 4096)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_log_says_how_large_the_kv_pool_is(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 512, "block_size": 32}
    with caplog.at_level(logging.INFO):
        built = build_engine(load_settings(EngineSettings, settings))
    size = f"{512 * built.layout.block_bytes / 2**30:.2f} GiB, float32"
    assert f"the KV pool has 512 blocks of 32 tokens ({size}) on cpu" in caplog.text
