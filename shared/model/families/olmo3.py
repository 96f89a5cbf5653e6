"""OLMo 3: as OLMo 2, with windows in three of four layers; these never scale their angles."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.layer_ropes import full_fields, sliding_rope, with_sliding
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config

_DEFAULTS = Defaults(
    vocab_size=50_304,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(None, 50_279),
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    norm_style="wide",
)
_WINDOW = 4096
_PATTERN = 4


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "Olmo3ForCausalLM", full_fields(fields), _DEFAULTS)
    rope = sliding_rope(fields, _DEFAULTS.rope_theta, "rope_theta")
    return with_sliding(fields, config, rope, _PATTERN, _WINDOW)
