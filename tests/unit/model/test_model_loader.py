"""Filling a model's parameters: every one exactly once, or a line that says what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.layers.parameters import TensorTarget, named_targets
from pagewire.shared.model.loader import LoadFormat, load_model
from pagewire.shared.model.safetensors_header import find_weights, weights_dtype
from pagewire.shared.model.shard import Shard
from pagewire.tests.support.tiny_models import write_tiny_model

CPU = torch.device("cpu")
OPS = load_ops("torch", "cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def _save(path: Path, tied: bool = False, **options: str) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint and return its tensors by name."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(path, **options)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _load(
    path: Path, dtype: torch.dtype = torch.float32, load_format: LoadFormat = "safetensors"
) -> DecoderModel:
    return load_model(path, load_config(path), CPU, dtype, OPS, load_format, 32)


def _parameters(model: DecoderModel) -> dict[int, torch.Tensor]:
    """The allocations, found by walking the objects rather than by `targets()`."""
    found: dict[int, torch.Tensor] = {}
    waiting: list[object] = [model.embed_tokens, model.lm_head, model.norm, *model.layers]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found[item.data_ptr()] = item
        elif isinstance(item, tuple):
            waiting.extend(item)
        elif type(item).__module__.startswith("pagewire.shared.model.layers"):
            slots = [
                name for kind in type(item).__mro__ for name in vars(kind).get("__slots__", ())
            ]
            names = slots or list(vars(item))
            waiting.extend(getattr(item, name) for name in names if name != "_cos_sin")
    return found


def _edit(path: Path, edit: str) -> None:
    """Save the weights again with one thing wrong."""
    tensors = load_file(path / WEIGHTS)
    if edit == "missing":
        del tensors[UP]
    elif edit == "unexpected":
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors[UP].clone()
    elif edit == "wrong-shape":
        tensors[UP] = tensors[UP].T.contiguous()
    elif edit == "integers":
        tensors[UP] = tensors[UP].to(torch.int8)
    elif edit == "old-buffers":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    elif edit == "tied-head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["1GB", "4KB"], ids=["one-file", "shards"])
def test_every_parameter_is_filled_with_its_tensor(
    tmp_path: Path, tied: bool, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _save(tmp_path, tied, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "4KB")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(torch.nan))
    model = _load(tmp_path)
    parameters = _parameters(model)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    targets = dict(model.targets())
    if tied:
        saved.pop("lm_head.weight", None)
        assert model.lm_head.method.matrix() is model.embed_tokens
    assert targets.keys() == saved.keys()
    assert all(torch.equal(targets[name], tensor) for name, tensor in saved.items())
    assert sum(t.numel() for t in targets.values()) == sum(p.numel() for p in parameters.values())


def test_nothing_is_allocated_for_weights_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path)
    _edit(tmp_path, "missing")
    devices: list[str] = []
    empty = torch.empty

    def noting(*size: object, **kind: object) -> torch.Tensor:
        devices.append(str(kind["device"]))
        return empty(*size, **kind)

    monkeypatch.setattr(torch, "empty", noting)
    _assert_refused(tmp_path, "1 tensor is missing")
    assert set(devices) == {"meta"}


def test_prefixes_that_a_family_ignores_are_left_out_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors |= {f"vision_tower.{i}.weight": torch.ones(3) for i in range(2)}
    save_file(tensors, tmp_path / WEIGHTS)
    _assert_refused(tmp_path, "2 tensors are not in the model (vision_tower.0.weight, vision_tower")
    llama = replace(ARCHITECTURES["LlamaForCausalLM"], ignored_prefixes=("vision_tower.",))
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", llama)
    with caplog.at_level("INFO", "pagewire"):
        _load(tmp_path)
    assert "does not use: 2 of vision_tower.*" in caplog.text


@pytest.mark.parametrize("outer", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("head", ["equal", "different"])
def test_names_that_a_family_has_in_another_place(
    tmp_path: Path, outer: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the head, which is compared with the embedding in the file."""
    saved = _save(tmp_path, tied=True)
    own = {name: tensor for name, tensor in saved.items() if name != "lm_head.weight"}
    tensors = {outer + name.removeprefix("model."): tensor for name, tensor in own.items()}
    tensors["language_model.lm_head.weight"] = saved["model.embed_tokens.weight"].clone()
    if head == "different":
        tensors["language_model.lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    prefixes = ARCHITECTURES["Gemma3ForConditionalGeneration"].renamed_prefixes
    llama = replace(ARCHITECTURES["LlamaForCausalLM"], renamed_prefixes=prefixes)
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", llama)
    model = _load(tmp_path)
    targets = dict(model.targets())
    assert all(torch.equal(targets[name], tensor) for name, tensor in own.items())
    assert (model.lm_head.method.matrix() is model.embed_tokens) == (head == "equal")
    tensors["model.norm.weight"] = tensors[outer + "norm.weight"].clone()
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    _assert_refused(tmp_path, f"1 tensor is not in the model ({outer}norm.weight)")


@pytest.mark.parametrize("edit", ["old-buffers", "tied-head"])
def test_tensors_that_add_nothing_are_ignored(tmp_path: Path, edit: str) -> None:
    saved = _save(tmp_path, tied=True)
    _edit(tmp_path, edit)
    targets = dict(_load(tmp_path).targets())
    assert torch.equal(targets[UP], saved[UP])


def test_weights_are_converted_to_the_asked_dtype(tmp_path: Path) -> None:
    saved = _save(tmp_path)
    targets = dict(_load(tmp_path, torch.bfloat16).targets())
    assert {target.dtype for target in targets.values()} == {torch.bfloat16}
    assert torch.equal(targets[UP], saved[UP].bfloat16())


def test_dummy_weights_are_always_alike_and_need_no_files(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    first, second = (dict(_load(tmp_path, load_format="dummy").targets()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.001 < first[UP].std() < 0.003
    assert not torch.equal(first[UP], first["model.layers.0.mlp.up_proj.weight"])
    assert first["model.norm.weight"].eq(1.0).all()


def test_dummy_weights_that_all_ranks_hold_are_the_same_on_each(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3moe", "renormalised-biases", vocab_size=41)
    config = load_config(tmp_path)

    def load(shard: Shard) -> dict[str, TensorTarget]:
        model = load_model(tmp_path, config, CPU, torch.float32, OPS, "dummy", 32, shard=shard)
        return {each.name: each for each in named_targets(model.parameters())}

    first, second = (load(Shard(rank, 2)) for rank in range(2))
    sizes = [each["model.embed_tokens.weight"].tensor.shape for each in (first, second)]
    assert sizes[0] != sizes[1]
    shared = [
        name
        for name, each in first.items()
        if not any(each.cuts) and not name.endswith("o_proj.bias")  # which rank 0 alone adds
    ]
    assert "model.layers.0.mlp.gate.weight" in shared
    assert [n for n in shared if not torch.equal(first[n].tensor, second[n].tensor)] == []


REFUSED = {
    "missing": f"1 tensor is missing ({UP}). Check that",
    "unexpected": "1 tensor is not in the model (model.layers.2.mlp.up_proj.weight). Check that",
    "wrong-shape": f"1 tensor is of another shape ({UP} has [16, 24], not [24, 16]). Check that",
    "integers": f"1 tensor is of another dtype ({UP} is I8, not F64 or F32 or F16 or BF16)",
}


@pytest.mark.parametrize(("edit", "message"), REFUSED.items(), ids=REFUSED)
def test_weights_of_another_model(tmp_path: Path, edit: str, message: str) -> None:
    _save(tmp_path)
    _edit(tmp_path, edit)
    _assert_refused(tmp_path, message)


def test_several_missing_tensors_are_counted(tmp_path: Path) -> None:
    _save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    _assert_refused(
        tmp_path, "16 tensors are missing (model.layers.2.input_layernorm.weight, model.layers.2."
    )
    _assert_refused(tmp_path, "and 10 more). Check")


def _header_length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


CORRUPTED = {
    "empty": lambda data: b"",
    "cut-in-the-length": lambda data: data[:5],
    "cut-in-the-header": lambda data: data[:60],
    "cut-in-the-last-tensor": lambda data: data[:-1],
    "cut-after-the-header": lambda data: data[: 8 + _header_length(data)],
    "bytes-too-many": lambda data: data + b"\0",
    "header-is-no-json": lambda data: data[:8] + b"x" * _header_length(data),
    "header-is-a-list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "header-is-random": lambda data: b"\xff" * len(data),
    "header-without-offsets": lambda data: data.replace(b"data_offsets", b"data_offsetz", 1),
}


@pytest.mark.parametrize("how", CORRUPTED)
def test_corrupt_file(tmp_path: Path, how: str) -> None:
    _save(tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(CORRUPTED[how](data))
    _assert_refused(tmp_path, f"weights file {tmp_path / WEIGHTS} is truncated or corrupt")


def test_header_whose_tensors_overlap(tmp_path: Path) -> None:
    """Sizes and shapes look right."""
    _save(tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    length = _header_length(data)
    header = json.loads(data[8 : 8 + length])
    gate = header["model.layers.1.mlp.gate_proj.weight"]["data_offsets"]
    header[UP]["data_offsets"] = gate
    text = json.dumps(header).encode().ljust(length)
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    _assert_refused(tmp_path, f"weights file {tmp_path / WEIGHTS} is truncated or corrupt")


def test_header_whose_shape_has_other_bytes(tmp_path: Path) -> None:
    _save(tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    assert data.count(b'"shape":[24,16]') > 0
    (tmp_path / WEIGHTS).write_bytes(data.replace(b'"shape":[24,16]', b'"shape":[24,17]', 1))
    _assert_refused(tmp_path, "has 1536 bytes, not 1632; download it again")


def test_directory_without_weights(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    _assert_refused(tmp_path, "only safetensors weights are loaded, convert others first")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    _save(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / name)
    _assert_refused(tmp_path, f"has its weights as a pickle ({name}), which can run any code")
    _assert_refused(tmp_path, f"from_pretrained('{tmp_path}').save_pretrained('NEW')")


def test_shards_without_their_index(tmp_path: Path) -> None:
    _save(tmp_path, max_shard_size="4KB")
    (tmp_path / INDEX).unlink()
    _assert_refused(tmp_path, "has model-00001-of-00007.safetensors, but neither")


def test_one_file_of_another_name(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "llama.safetensors")
    _assert_refused(tmp_path, "rename it to model.safetensors if it has all weights")


def test_the_file_that_autogptq_writes(tmp_path: Path) -> None:
    """AutoGPTQ's file is loaded if model.safetensors is missing."""
    _save(tmp_path)
    name = "gptq_model-4bit-128g.safetensors"
    (tmp_path / WEIGHTS).rename(tmp_path / name)
    (found,) = find_weights(tmp_path)
    assert found.path == tmp_path / name
    assert weights_dtype(tmp_path) == "float32"
    (tmp_path / WEIGHTS).write_bytes(found.path.read_bytes())
    assert find_weights(tmp_path)[0].path == tmp_path / WEIGHTS


def test_missing_shard(tmp_path: Path) -> None:
    _save(tmp_path, max_shard_size="4KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    _assert_refused(tmp_path, f"weights file {shard} is missing; download it again")


def test_weights_that_a_link_no_longer_reaches(tmp_path: Path) -> None:
    """As in a cache of the hub whose blobs were removed."""
    _save(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).symlink_to(tmp_path / "removed")
    _assert_refused(tmp_path, f"weights file {tmp_path / WEIGHTS} is missing; download it again")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    _save(tmp_path, max_shard_size="4KB")
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    save_file({**load_file(second), **tensors}, second)
    name = min(tensors)
    _assert_refused(tmp_path, f"{name} in {first.name} and {second.name}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a safetensors index"),
        ("[" * 100_000, "is not a safetensors index"),
        ('{"metadata": {}}', "is not a safetensors index"),
        ('{"weight_map": {}}', "is not a safetensors index"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', "outside the model's directory"),
        ('{"weight_map": {"a": ".."}}', "outside the model's directory"),
        ('{"weight_map": {"a": ""}}', "outside the model's directory"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "outside the model's directory"),
        ('{"weight_map": {"a": "x\\ud800.safetensors"}}', "outside the model's directory"),
    ],
    ids=[
        "cut-off",
        "nested-too-deep",
        "without-a-map",
        "empty-map",
        "path-out-of-the-directory",
        "the-directory-above",
        "no-name",
        "null-byte",
        "half-a-character",
    ],
)
def test_corrupt_index(tmp_path: Path, content: str, message: str) -> None:
    _save(tmp_path, max_shard_size="4KB")
    (tmp_path / INDEX).write_text(content)
    _assert_refused(tmp_path, message)


def test_more_than_the_device_holds(tmp_path: Path) -> None:
    _save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_size": 2**20, "intermediate_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="no memory on cpu for a LlamaForCausalLM of 2 layers"):
        _load(tmp_path, load_format="dummy")


def _assert_refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        _load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
