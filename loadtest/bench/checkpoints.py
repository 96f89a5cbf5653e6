"""Writes checkpoints of random weights in the formats that people publish.

Their tensors have the names and shapes of published models; what is in them means nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.cluster import BenchError

FORMATS = ("bf16", "fp8", "awq")
FILE_BYTES = 4 << 30
BLOCK, GROUP = 128, 128  # weights that share a scale: a square in FP8, a part of a column in AWQ
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
QUANTIZATION = {"bf16": None, "fp8": _FP8, "awq": {**_AWQ, "version": "gemm"}}

Tensor = tuple[str, torch.dtype, tuple[int, ...]]


def tensors(shape: dict[str, Any], form: str) -> Iterator[Tensor]:
    """Yield name, dtype and shape of each tensor of a checkpoint.

    Args:
        shape: content of config.json, of a Llama or a Qwen3 mixture.
        form: one of `FORMATS`.

    Raises:
        BenchError: the architecture is another one.
    """
    if shape["architectures"][0] not in ("LlamaForCausalLM", "Qwen3MoeForCausalLM"):
        raise BenchError(f"no checkpoint can be written of {shape['architectures'][0]}")
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    yield "model.embed_tokens.weight", torch.bfloat16, (vocabulary, hidden)
    yield "lm_head.weight", torch.bfloat16, (vocabulary, hidden)
    yield "model.norm.weight", torch.bfloat16, (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        for name, size in _plain(shape):
            yield f"model.layers.{layer}.{name}.weight", torch.bfloat16, size
        for name, outs, ins in _linears(shape):
            yield from _stored(f"model.layers.{layer}.{name}", outs, ins, form)


def _plain(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a layer's weights that are never quantised."""
    hidden = shape["hidden_size"]
    yield "input_layernorm", (hidden,)
    yield "post_attention_layernorm", (hidden,)
    if experts := shape.get("num_experts"):
        yield "mlp.gate", (experts, hidden)
        yield "self_attn.q_norm", (shape["head_dim"],)
        yield "self_attn.k_norm", (shape["head_dim"],)


def _linears(shape: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield name, outputs and inputs of a layer's projections."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    width = shape.get("head_dim", hidden // heads)
    kv = shape["num_key_value_heads"] * width
    yield "self_attn.q_proj", heads * width, hidden
    yield "self_attn.k_proj", kv, hidden
    yield "self_attn.v_proj", kv, hidden
    yield "self_attn.o_proj", hidden, heads * width
    experts = shape.get("num_experts")
    inner = shape["moe_intermediate_size" if experts else "intermediate_size"]
    for prefix in [f"mlp.experts.{expert}" for expert in range(experts)] if experts else ["mlp"]:
        yield f"{prefix}.gate_proj", inner, hidden
        yield f"{prefix}.up_proj", inner, hidden
        yield f"{prefix}.down_proj", hidden, inner


def _stored(name: str, outs: int, ins: int, form: str) -> Iterator[Tensor]:
    if form == "bf16":
        yield f"{name}.weight", torch.bfloat16, (outs, ins)
    elif form == "fp8":
        yield f"{name}.weight", torch.float8_e4m3fn, (outs, ins)
        yield f"{name}.weight_scale_inv", torch.float32, (-(-outs // BLOCK), -(-ins // BLOCK))
    else:
        yield f"{name}.qweight", torch.int32, (ins, outs // 8)
        yield f"{name}.qzeros", torch.int32, (ins // GROUP, outs // 8)
        yield f"{name}.scales", torch.float16, (ins // GROUP, outs)


def write_checkpoint(folder: Path, shape: dict[str, Any], form: str) -> None:
    """Write a checkpoint, in files of about `FILE_BYTES`.

    Args:
        folder: where; it is made.
        shape: content of config.json, of a Llama or a Qwen3 mixture.
        form: one of `FORMATS`.

    Raises:
        BenchError: the architecture is another one.
    """
    folder.mkdir(parents=True)
    quantization = QUANTIZATION[form]
    described = {"quantization_config": quantization} if quantization else {}
    write_model(folder, {**shape, **described})
    index: dict[str, str] = {}
    for number, names in enumerate(_files(tensors(shape, form)), 1):
        file = f"model-{number:05}.safetensors"
        save_file({name: _random(dtype, size) for name, dtype, size in names}, folder / file)
        index.update(dict.fromkeys((name for name, *_ in names), file))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _files(every: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each file."""
    part, num_bytes = list[Tensor](), 0
    for tensor in every:
        part.append(tensor)
        num_bytes += tensor[1].itemsize * math.prod(tensor[2])
        if num_bytes >= FILE_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _random(dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """Return numbers that repeat: as many random ones would take longer than writing them."""
    if dtype.is_floating_point:
        few = torch.randn(4093).mul_(0.02).to(dtype)
    else:
        few = torch.randint(-(1 << 31), 1 << 31, (4093,), dtype=dtype)
    count = math.prod(size)
    return few.repeat(-(-count // len(few)))[:count].view(size)
