"""The architectures that are served: one file for each family.

A family's `parse_config` reads a config.json; its `build` composes the model of layers that a
`LayerFactory` makes. The files import no torch, because the router reads configurations, too.
docs/extending.md says how to add one.

Read first: `llama.py` (the simplest), `qwen3.py`, `olmo2.py`.

May import: `experts_config`, `fields`, `latent_config`, `layer_ropes`, `model_config`, `text_part`
and `windows` of `shared.model`, `kernels.gated_silu` and `kernels.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.shared.model.families import (
    cohere,
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    granite_moe,
    granite_moe_hybrid,
    llama,
    ministral,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.text_part import RENAMED_PREFIXES, VISION_PREFIXES


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is read and built.

    Attributes:
        parse_config: reads a config.json; raises a ModelLoadError of one line.
        build: makes a model from the result of `parse_config`; its parameters are not filled.
        ignored_prefixes: tensors with these prefixes are not loaded, such as those of a vision
            tower; a log line names them. `{num_layers}` stands for the number of layers.
        renamed_prefixes: prefix of names in the checkpoint -> prefix in the model here.
    """

    parse_config: Callable[[Fields], ModelConfig]
    build: Callable[[Any, LayerFactory], DecoderModel]
    ignored_prefixes: tuple[str, ...] = ()
    renamed_prefixes: Mapping[str, str] = field(default_factory=dict)


# By their names in `architectures` of config.json.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.parse_config, llama.build),
    "MistralForCausalLM": Architecture(mistral.parse_config, llama.build),
    "MinistralForCausalLM": Architecture(ministral.parse_config, llama.build),
    "Mistral3ForConditionalGeneration": Architecture(
        mistral.parse_conditional_config,
        llama.build,
        ignored_prefixes=VISION_PREFIXES,
        renamed_prefixes=RENAMED_PREFIXES,
    ),
    "Qwen2ForCausalLM": Architecture(qwen2.parse_config, llama.build),
    "Qwen3ForCausalLM": Architecture(qwen3.parse_config, qwen3.build),
    "Olmo2ForCausalLM": Architecture(olmo2.parse_config, olmo2.build),
    "Olmo3ForCausalLM": Architecture(olmo3.parse_config, olmo2.build),
    "Gemma2ForCausalLM": Architecture(gemma2.parse_config, gemma2.build),
    "Gemma3ForCausalLM": Architecture(gemma3.parse_config, gemma3.build),
    "Gemma3ForConditionalGeneration": Architecture(
        gemma3.parse_conditional_config,
        gemma3.build,
        ignored_prefixes=VISION_PREFIXES,
        renamed_prefixes=RENAMED_PREFIXES,
    ),
    "CohereForCausalLM": Architecture(cohere.parse_config, cohere.build),
    "Cohere2ForCausalLM": Architecture(cohere.parse_second_config, cohere.build),
    "GptOssForCausalLM": Architecture(gpt_oss.parse_config, gpt_oss.build),
    "GraniteForCausalLM": Architecture(granite.parse_config, llama.build),
    "GraniteMoeForCausalLM": Architecture(granite_moe.parse_config, granite_moe.build),
    "GraniteMoeHybridForCausalLM": Architecture(
        granite_moe_hybrid.parse_config, granite_moe_hybrid.build
    ),
    "SmolLM3ForCausalLM": Architecture(smollm3.parse_config, llama.build),
    "Phi3ForCausalLM": Architecture(phi3.parse_config, phi3.build),
    "MixtralForCausalLM": Architecture(mixtral.parse_config, mixtral.build),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe.parse_config, qwen2_moe.build),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe.parse_config, qwen3.build),
    "OlmoeForCausalLM": Architecture(olmoe.parse_config, olmoe.build),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2.parse_config, deepseek_v2.build),
    "DeepseekV3ForCausalLM": Architecture(
        deepseek_v3.parse_config,
        deepseek_v3.build,
        ignored_prefixes=("model.layers.{num_layers}.",),  # predicts a second token
    ),
}

_EXPERTS = "it has a mixture of experts of another kind"
# Well-known architectures that are not supported, with the reason.
REFUSED = {
    "Phi3SmallForCausalLM": "its attention is sparse by blocks",
    "PhiMoEForCausalLM": _EXPERTS,
    "PhimoeForCausalLM": _EXPERTS,  # transformers' name of it
}
