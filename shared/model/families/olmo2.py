"""OLMo 2: norms after attention and feed-forward, and one norm each for all queries and keys."""

from __future__ import annotations

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

DEFAULTS = Defaults(
    vocab_size=50_304,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(None, 50_279),
    rms_norm_eps=1e-5,
    norm_style="wide",
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_window(fields)
    return read_config(ModelConfig, "Olmo2ForCausalLM", fields, DEFAULTS)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose layers whose outputs are normalised before they are added."""
    return make.decoder(config, make.post_norm_layer, qk_norm="projection")
