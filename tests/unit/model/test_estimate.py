"""What a worker needs of a GPU, compared with what models and pools really have."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.sampling_stage import SamplingStage
from pagewire.shared.engine.loading import choose_dtype
from pagewire.shared.engine.memory import GRAPH_BYTES, pool_bytes
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.estimate import estimate, fitting_ranks, weight_bytes
from pagewire.tests.support.tiny_models import CASES, write_tiny_model

GIB = 1 << 30
PUBLISHED = Path(__file__).parents[2] / "support" / "published_configs"
IMAGES = ("vision_tower", "multi_modal_projector")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.main", "estimate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def _write(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_parameters(tmp_path: Path, case: str) -> None:
    theirs = write_tiny_model(tmp_path, *CASES[case])
    saved = theirs.state_dict()
    buffers = [(name, each) for name, each in theirs.named_buffers() if name in saved]
    expected = sum(
        each.numel() * each.itemsize
        for name, each in (*theirs.named_parameters(), *buffers)
        if not any(part in name for part in IMAGES)  # not served
    )
    assert weight_bytes(load_config(tmp_path), torch.float32) == expected


def test_a_llama_on_an_h100(tmp_path: Path) -> None:
    found = estimate(load_config(Path(_write(tmp_path)).resolve()), WorkerSettings(), 80 * GIB)
    assert found.weights == 16_060_522_496
    assert found.kv_bytes_per_token == 2 * 8 * 128 * 2 * 32
    assert 540e6 < found.tables < 840e6
    used = found.weights + found.tables + found.activations + found.trial_pool + found.staging
    left = int(80 * GIB * 0.85) - used - GRAPH_BYTES
    assert 0 <= left - found.kv_pool < found.kv_bytes_per_token * 16


def test_tables_and_blocks_are_those_that_an_engine_allocates() -> None:
    config = load_config(demo_model_path())
    cpu, ops = torch.device("cpu"), load_ops("torch", "cpu")
    settings = WorkerSettings(max_num_seqs=5, max_model_len=64)
    found = estimate(config, settings, GIB * 8)
    state = DeviceState(5, 4, cpu)
    stage = SamplingStage(ops, state, config.vocab_size)
    angles = 64 * config.head_dim * 4
    tensors = [state._inputs, state.block_tables, state._parameters]
    tensors += [stage._shaped, stage._masks, stage._mask_of_row, *stage.shaping.tables]
    assert found.tables == angles + sum(each.nbytes for each in tensors)
    for kv_dtype in (None, "float8_e4m3fn"):
        each = replace(config, kv_dtype=kv_dtype)
        pool = allocate_pool(each.kv_layout(16, config.dtype), 1, cpu)
        assert estimate(each, settings, GIB * 8).kv_bytes_per_token * 16 == pool.nbytes


def test_a_rank_computes_its_part_of_a_step(tmp_path: Path) -> None:
    config = load_config(Path(_write(tmp_path)).resolve())
    one, two, four = (
        estimate(config, WorkerSettings(tensor_parallel_size=ranks), 80 * GIB).activations
        for ranks in (1, 2, 4)
    )
    divided = 3 * WorkerSettings().max_num_batched_tokens * config.intermediate_size * 2
    assert one - two == divided // 2
    assert two - four == divided // 4


def test_other_processes_and_graphs_take_from_the_pool() -> None:
    assert pool_bytes(1000, 0.5, 100, cuda_graphs=False, staging=50) == 350
    assert pool_bytes(1000, 0.5, 100, cuda_graphs=False, staging=50, in_use_by_others=600) == 250
    assert pool_bytes(1000, 0.5, 100, cuda_graphs=True, staging=50) == 350 - GRAPH_BYTES


def test_command_prints_a_table_and_json(tmp_path: Path) -> None:
    name = _write(tmp_path)
    done = _run(name)
    assert done.returncode == 0, done.stderr
    assert "16060522496 bytes" in done.stdout
    assert "H200" in done.stdout
    found = json.loads(_run(name, "--json", "--memory", "80", "--length", "8192").stdout)
    [gpu] = found["gpus"].values()
    assert gpu["total"] == 80 * GIB
    assert gpu["sequences"] == gpu["kv_tokens"] // 8192
    assert gpu["tensor_parallel_size"] == 1
    halves = json.loads(_run(name, "--json", "--memory", "80", "--dtype", "float32").stdout)
    assert halves["gpus"]["80 GiB"]["weights"] == 2 * gpu["weights"]


def test_weights_in_fp8_leave_more_for_the_pool(tmp_path: Path) -> None:
    """By the checkpoint's own description, and while loading."""
    name = _write(tmp_path)
    (plain,) = json.loads(_run(name, "--json", "--memory", "80").stdout)["gpus"].values()
    quantised = "--quantization", "fp8"
    (online,) = json.loads(_run(name, "--json", "--memory", "80", *quantised).stdout)[
        "gpus"
    ].values()
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    name = _write(tmp_path, quantization_config=described)
    (stored,) = json.loads(_run(name, "--json", "--memory", "80").stdout)["gpus"].values()
    projections = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    rows = 32 * (6144 + 4096 + 2 * 14336 + 4096)
    assert plain["weights"] - online["weights"] == projections - 4 * rows
    assert plain["weights"] - stored["weights"] == projections - 4 * projections // 128**2
    assert online["kv_pool"] - plain["kv_pool"] > 0.99 * (plain["weights"] - online["weights"])
    assert "bytes, fp8)" in _run(name).stdout


def test_a_kv_cache_in_fp8_holds_twice_as_much(tmp_path: Path) -> None:
    name = _write(tmp_path)
    (plain,) = json.loads(_run(name, "--json", "--memory", "80").stdout)["gpus"].values()
    in_fp8 = "--kv-cache-dtype", "fp8"
    (small,) = json.loads(_run(name, "--json", "--memory", "80", *in_fp8).stdout)["gpus"].values()
    assert (plain["kv_dtype"], small["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert (small["dtype"], small["weights"]) == ("bfloat16", plain["weights"])
    assert 2 * small["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    # A little is for copies that long chunks read.
    assert 1.98 <= small["kv_tokens"] / plain["kv_tokens"] < 2.05
    assert "bytes a token, float8_e4m3fn" in _run(name, *in_fp8).stdout


def test_weights_in_int4_are_dequantised_for_many_rows(tmp_path: Path) -> None:
    described = {"quant_method": "awq", "bits": 4, "group_size": 128}
    plain, quantised = (
        estimate(load_config(Path(_write(tmp_path, **fields))), WorkerSettings(), 80 * GIB)
        for fields in ({}, {"quantization_config": described})
    )
    assert quantised.weight_format == "int4"
    # The largest product of many rows dequantises gate and up.
    assert quantised.activations - plain.activations == 2 * 2 * 4096 * 14336


FOUR_BITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt-oss": ("gpt-oss-20b", {"quant_method": "mxfp4"}, "mxfp4"),
    "qwen3": ("qwen3-30b-a3b", {"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
}


@pytest.mark.parametrize(("name", "described", "kind"), FOUR_BITS.values(), ids=FOUR_BITS)
def test_experts_in_four_bits_are_not_dequantised_in_memory(
    tmp_path: Path, name: str, described: dict[str, Any], kind: str
) -> None:
    content = json.loads((PUBLISHED / f"{name}.json").read_text())
    found = []
    for more in ({"quantization_config": None}, {"quantization_config": described}):
        (tmp_path / "config.json").write_text(json.dumps({**content, **more}))
        found.append(estimate(load_config(tmp_path), WorkerSettings(), 140 * GIB))
    plain, quantised = found
    assert quantised.weight_format == kind
    largest = 2048 * (4096 + 2 * 512) if kind == "int4" else 0  # of queries, keys and values
    assert quantised.activations - plain.activations == 2 * largest
    saved = plain.weights - quantised.weights
    assert quantised.kv_pool - plain.kv_pool == pytest.approx(saved, rel=0.01)


def test_a_mixture_has_rows_for_each_pair_of_token_and_expert(tmp_path: Path) -> None:
    content = json.loads((PUBLISHED / "qwen3-30b-a3b.json").read_text())
    found = []
    for top_k in (8, 16):
        (tmp_path / "config.json").write_text(json.dumps({**content, "num_experts_per_tok": top_k}))
        found.append(estimate(load_config(tmp_path), WorkerSettings(), 140 * GIB).activations)
    of_pair = 2 * (768 + 2048)
    assert found[1] - found[0] == WorkerSettings().max_num_batched_tokens * 8 * of_pair


def test_dtype_is_that_of_the_worker_or_asked_for(tmp_path: Path) -> None:
    name = _write(tmp_path, dtype=None)
    done = _run(name)
    assert done.returncode == 2
    assert "config.json names no dtype, and no weights" in done.stderr
    assert "--dtype" in done.stderr and done.stderr.count("\n") == 1
    assert "16060522496 bytes, float16" in _run(name, "--dtype", "float16").stdout


def test_dtype_is_that_of_weights_that_are_there(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, *next(iter(CASES.values()))).to(torch.bfloat16).save_pretrained(
        tmp_path
    )
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    done = _run(str(tmp_path), "--length", "8")
    assert "bytes, bfloat16)" in done.stdout, done.stderr
    assert choose_dtype("auto", load_config(tmp_path)) == torch.bfloat16


def test_a_gpu_that_is_too_small(tmp_path: Path) -> None:
    assert "does not fit" in _run(_write(tmp_path), "--memory", "1").stdout
    assert "needs 2: --tensor-parallel-size 2" in _run(_write(tmp_path), "--memory", "16").stdout


@pytest.mark.parametrize(
    ("heads", "gib", "ranks"),
    [
        ((32, 8), 80, 1),
        ((32, 8), 16, 2),
        ((32, 8), 4, 8),
        ((28, 4), 4, None),  # eight ranks would fit, but cannot share 28 heads
        ((32, 8), 2, None),
    ],
)
def test_how_many_gpus_fit_a_model_together(
    tmp_path: Path, heads: tuple[int, int], gib: int, ranks: int | None
) -> None:
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128}
    config = load_config(Path(_write(tmp_path, **shape)).resolve())
    settings = WorkerSettings(max_num_batched_tokens=512, cuda_graphs=False)
    assert fitting_ranks(config, settings, gib * GIB) == ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "200000"], "is more than the model's 131072 positions"),
        (["--length", "200000"], "--length 200000 is more than the model's 131072 tokens"),
        (["--block-size", "17"], "setting block_size (PAGEWIRE_BLOCK_SIZE) cannot be 17"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = _run(_write(tmp_path), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_refused_models_have_the_refusals_line(tmp_path: Path) -> None:
    done = _run(_write(tmp_path, architectures=["PhimoeForCausalLM"]))
    assert done.returncode == 2
    assert "it has a mixture of experts" in done.stderr
    assert done.stderr.count("\n") == 1
