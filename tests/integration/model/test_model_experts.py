"""Mixtures of experts against Hugging Face's modelling code: routing rules, layers, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from pagewire.kernels import load_ops
from pagewire.kernels.gated_silu import GatedSilu
from pagewire.kernels.reference.route import route
from pagewire.kernels.routing import Routing
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.experts_config import ExpertsConfig
from pagewire.shared.model.layers import experts as experts_module
from pagewire.shared.model.layers.factory import LayerFactory
from pagewire.shared.model.layers.parameters import named_targets
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.tiny_models import randomise, write_tiny_model

CPU = torch.device("cpu")
OPS = load_ops("torch", "cpu")
ALL_FAMILIES = (
    "mixtral",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "granitemoe",
    "deepseekv2",
    "deepseekv3",
)


def _mixture(layer: Any) -> Any:
    mlp = getattr(layer.mlp, "part", layer.mlp)  # Granite's is multiplied
    return getattr(mlp, "experts", mlp)


def targets_of(layer: Any) -> dict[str, torch.Tensor]:
    return {each.name: each.tensor for each in named_targets(layer.parameters("mlp"))}


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return what a model loaded from `path` has in its mixtures, by layer and parameter."""
    model = load_model(path, load_config(path), CPU, torch.float32, OPS)
    mixtures = [_mixture(layer) for layer in model.layers]
    return {
        f"{layer}.{part}": getattr(mixture.weights.method, part)
        for layer, mixture in enumerate(mixtures)
        if isinstance(mixture, experts_module.Experts)
        for part in ("gate_up", "down")
    }


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_stacked_checkpoints_are_read_like_those_by_expert(tmp_path: Path, family: str) -> None:
    """As transformers 5 writes them if it is asked not to keep the original format."""
    theirs = write_tiny_model(tmp_path / "each", family, "groups-of-1-tied")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith(".experts.gate_up_proj") for name in names)
    each, stacked = load_weights(tmp_path / "each"), load_weights(tmp_path / "stacked")
    assert each.keys() == stacked.keys()
    assert all(torch.equal(each[name], stacked[name]) for name in each)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.4.w3.weight"),
        ("qwen3moe", "model.layers.0.mlp.experts.6.down_proj.weight"),
        ("granitemoe", "model.layers.2.block_sparse_moe.router.layer.weight"),
        ("qwen2moe", "model.layers.2.mlp.shared_expert_gate.weight"),
        ("deepseekv2", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("deepseekv3", "model.layers.2.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, family: str, name: str) -> None:
    write_tiny_model(tmp_path, family, "groups-of-1-tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"1 tensor is missing \({name}\)"):
        load_model(tmp_path, load_config(tmp_path), CPU, torch.float32, OPS)


def assert_routes_alike(router: Any, routing: Routing, correction: torch.Tensor | None) -> None:
    """Compare experts and their weights, in whichever order they come."""
    hidden = torch.randn(40, router.hidden_dim)
    logits, weights, chosen = router(hidden)
    ours_chosen, ours_weights = route(logits, routing, correction)
    expected = torch.zeros_like(logits).scatter_(1, chosen, weights)
    actual = torch.zeros_like(logits).scatter_(1, ours_chosen.long(), ours_weights)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("renormalise", [False, True])
def test_routing_of_deepseek_v3(renormalise: bool) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=6,
        topk_group=2,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias)
    routing = Routing(
        top_k=4,
        scores="sigmoid",
        renormalise=renormalise,
        scale=2.5,
        groups=6,
        top_groups=2,
        group_score="best two",
        corrected=True,
    )
    with torch.inference_mode():
        assert_routes_alike(router, routing, router.e_score_correction_bias)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_routing_of_deepseek_v2(method: str) -> None:
    config = transformers.DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=6,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=16.0,
    )
    torch.manual_seed(0)
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    groups = (6, 2) if method == "group_limited_greedy" else (1, 1)
    routing = Routing(top_k=4, scale=16.0, groups=groups[0], top_groups=groups[1])
    with torch.inference_mode():
        assert_routes_alike(router, routing, None)


def test_deepseeks_router_runs_in_float32() -> None:
    """In a bfloat16 model, too, where rounded logits would choose other experts."""
    config = transformers.DeepseekV3Config(
        hidden_size=64, n_routed_experts=24, num_experts_per_tok=4, n_group=6, topk_group=2
    )
    theirs = DeepseekV3TopkRouter(config).bfloat16()
    torch.manual_seed(0)
    torch.nn.init.normal_(theirs.weight)
    routed: list[torch.Tensor] = []

    def note(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        routed.append(logits)
        return route(logits, *rest)

    make = LayerFactory(CPU, torch.bfloat16, replace(OPS, route=note), 16)
    ours = make.experts(config, ExpertsConfig(24, 8, Routing(top_k=4)), wide_router=True)
    make.methods.choose(ours.parameters("mlp"))
    targets_of(ours)["mlp.gate.weight"].copy_(theirs.weight.detach())
    hidden = torch.randn(40, 64).bfloat16()
    with torch.inference_mode():
        assert ours.forward(hidden).dtype == torch.bfloat16
        assert torch.equal(routed[0], theirs(hidden)[0])
    rounded = torch.nn.functional.linear(hidden, theirs.weight.detach()).float()
    assert not torch.equal(routed[0], rounded)


def test_the_mixture_of_gpt_oss() -> None:
    """Biases, a clamped activation, gate and up alternating, weights the other way round."""
    config = transformers.GptOssConfig(
        hidden_size=40,
        intermediate_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
    )
    theirs = GptOssMLP(config)
    randomise(theirs)
    make = LayerFactory(CPU, torch.float32, OPS, 16)
    ours = make.experts(
        config,
        ExpertsConfig(
            5,
            24,
            Routing(top_k=2, renormalise=True),
            activation=GatedSilu(alpha=1.702, up_offset=1.0, limit=0.5),
        ),
        each=(),
        router="router",
        router_bias=True,
        biases=True,
        interleaved=True,
        transposed=True,
    )
    make.methods.choose(ours.parameters("mlp"))
    targets = targets_of(ours)
    state = {f"mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    assert targets.keys() == state.keys()
    for name, tensor in state.items():
        assert targets[name].shape == tensor.shape
        targets[name].copy_(tensor)
    hidden = torch.randn(9, 40)
    with torch.inference_mode():
        expected = theirs(hidden[None])[0][0]
        torch.testing.assert_close(ours.forward(hidden), expected)
