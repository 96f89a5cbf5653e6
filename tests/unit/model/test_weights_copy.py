"""Tensors of files reach their targets: in parts, by threads, in any layout and dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model import weights_copy
from pagewire.shared.model.safetensors_header import WeightsFile, read_header
from pagewire.shared.model.shard import Cut, Cuts
from pagewire.shared.model.weights_copy import TensorCopy, copy_weights, num_threads

SHAPES = {"scalar": (), "vector": (300,), "matrix": (70, 33), "experts": (3, 40, 17), "none": (0,)}


@pytest.fixture(params=[8 << 20, 256, 24], ids=["large-parts", "parts-of-rows", "parts-of-a-row"])
def _part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_copy, "PART_BYTES", request.param)


def _written(
    path: Path, dtype: torch.dtype = torch.float32
) -> tuple[WeightsFile, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }
    save_file(tensors, path)
    return read_header(path), tensors


@pytest.mark.usefixtures("_part_bytes")
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
def test_targets_have_the_files_values(tmp_path: Path, source: torch.dtype, layout: str) -> None:
    file, tensors = _written(tmp_path / "a.safetensors", source)
    targets = {name: _target(tensor, layout) for name, tensor in tensors.items()}
    counted: list[int] = []
    copy_weights(
        [TensorCopy(file, entry, targets[name]) for name, entry in file.tensors.items()],
        counted.append,
    )
    for name, target in targets.items():
        assert torch.equal(target, tensors[name].to(torch.float32)), name
    assert sum(counted) == sum(entry.num_bytes for entry in file.tensors.values())


def _target(like: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a float32 tensor of a shape, poisoned, with gaps unless it is contiguous."""
    if layout == "contiguous" or not like.dim():
        return torch.full(like.shape, torch.nan)
    if layout == "transposed":
        return torch.full(like.shape[::-1], torch.nan).permute(*reversed(range(like.dim())))
    wide = torch.full((*like.shape[:-1], like.shape[-1] + 5), torch.nan)
    return wide[..., 2 : 2 + like.shape[-1]]


CUTS: dict[str, tuple[str, Cuts]] = {
    "rows": ("matrix", (Cut(70, ((10, 45),)), None)),
    "columns": ("matrix", (None, Cut(33, ((11, 22),)))),
    "columns-of-two": ("matrix", (None, Cut(33, ((0, 3), (20, 33))))),
    "rows-of-two": ("matrix", (Cut(70, ((1, 3), (60, 70))),)),
    "rows-and-columns": ("matrix", (Cut(70, ((1, 3), (60, 70))), Cut(33, ((32, 33),)))),
    "no-rows": ("matrix", (Cut(70, ()), None)),
    "all": ("matrix", (Cut(70, ((0, 70),)), Cut(33, ((0, 33),)))),
    "numbers": ("vector", (Cut(300, ((7, 207),)),)),
    "experts-rows": ("experts", (None, Cut(40, ((5, 10), (25, 30))), None)),
    "experts-columns": ("experts", (None, None, Cut(17, ((4, 9),)))),
    "some-experts-columns": ("experts", (Cut(3, ((1, 3),)), None, Cut(17, ((4, 9),)))),
}


def _part(values: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    for dim, cut in enumerate(cuts):
        if cut is not None:
            indices = [index for a, b in cut.ranges for index in range(a, b)]
            values = values.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return values


@pytest.mark.usefixtures("_part_bytes")
@pytest.mark.parametrize("gap", [4096, 0], ids=["rows-read-whole", "columns-read-alone"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUTS)
def test_a_part_of_a_tensor(
    tmp_path: Path,
    name: str,
    source: torch.dtype,
    layout: str,
    gap: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_copy, "GAP_BYTES", gap)
    of, cuts = CUTS[name]
    file, tensors = _written(tmp_path / "a.safetensors", source)
    expected = _part(tensors[of].float(), cuts)
    target = _target(expected, layout)
    counted: list[int] = []
    copy_weights([TensorCopy(file, file.tensors[of], target, cuts)], counted.append)
    assert torch.equal(target, expected)
    assert sum(counted) == expected.numel() * source.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUTS)
def test_a_part_of_a_tensor_on_a_gpu(tmp_path: Path, name: str, target_dtype: torch.dtype) -> None:
    of, cuts = CUTS[name]
    file, tensors = _written(tmp_path / "a.safetensors")
    expected = _part(tensors[of], cuts).to(target_dtype)
    target = torch.full(expected.shape, torch.nan, dtype=target_dtype, device="cuda")
    fill = TensorCopy(file, file.tensors[of], target, cuts)
    copy_weights([fill], lambda _count: None)
    assert torch.equal(target.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("part_bytes", [8 << 20, 1000], ids=["one-batch", "several-batches"])
def test_many_small_tensors_on_a_gpu(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_copy, "PART_BYTES", part_bytes)
    dtypes = [torch.uint8, torch.float32, torch.bfloat16]
    tensors = {
        f"{index:03}": torch.arange(index % 7, 100 + index).to(dtypes[index % 3])
        for index in range(200)
    }
    save_file(tensors, tmp_path / "a.safetensors")
    file = read_header(tmp_path / "a.safetensors")
    targets = {
        name: torch.zeros(len(values), device="cuda", dtype=dtypes[1 + index % 2])
        for index, (name, values) in enumerate(tensors.items())
        if index % 5  # some of them are needed
    }
    counted: list[int] = []
    fills = [TensorCopy(file, file.tensors[name], target) for name, target in targets.items()]
    copy_weights(fills, counted.append)
    for name, target in targets.items():
        assert torch.equal(target.cpu(), tensors[name].to(target.dtype)), name
    assert sum(counted) == sum(tensors[name].nbytes for name in targets)


@pytest.mark.parametrize("dim", [0, 1])
def test_no_more_is_read_than_a_part(
    tmp_path: Path, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half of the rows, or of long rows."""
    values = torch.arange(16.0 * 16384).view(16, 16384)
    save_file({"x": values}, tmp_path / "a.safetensors")
    file = read_header(tmp_path / "a.safetensors")
    half = values.shape[dim] // 2
    cuts = (*[None] * dim, Cut(2 * half, ((half, 2 * half),)))
    read: list[int] = []
    pread = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(pread(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    target = torch.empty_like(values.narrow(dim, half, half), memory_format=torch.contiguous_format)
    copy_weights([TensorCopy(file, file.tensors["x"], target, cuts)], lambda _count: None)
    assert torch.equal(target, values.narrow(dim, half, half))
    assert sum(read) == target.nbytes


def test_several_files(tmp_path: Path) -> None:
    fills, wanted = [], []
    for index in range(5):
        values = torch.arange(1000.0) + 1000 * index
        save_file({"x": values}, tmp_path / f"{index}.safetensors")
        file = read_header(tmp_path / f"{index}.safetensors")
        fills.append(TensorCopy(file, file.tensors["x"], torch.empty(1000)))
        wanted.append(values)
    copy_weights(fills, lambda _count: None)
    assert all(torch.equal(fill.target, each) for fill, each in zip(fills, wanted, strict=True))


@pytest.mark.usefixtures("_part_bytes")
def test_a_file_that_is_cut_off_after_its_header_was_read(tmp_path: Path) -> None:
    file, tensors = _written(tmp_path / "a.safetensors")
    os.truncate(file.path, file.size - 4)
    fills = [
        TensorCopy(file, entry, torch.empty_like(tensors[name]))
        for name, entry in file.tensors.items()
    ]
    with pytest.raises(ModelLoadError) as caught:
        copy_weights(fills, lambda _count: None)
    assert str(caught.value) == (
        f"weights file {file.path} is truncated or corrupt: it ends at byte {file.size - 4}; "
        "download it again"
    )


def test_a_file_that_is_gone_after_its_header_was_read(tmp_path: Path) -> None:
    file, tensors = _written(tmp_path / "a.safetensors")
    file.path.unlink()
    fill = TensorCopy(file, file.tensors["matrix"], tensors["matrix"])
    with pytest.raises(ModelLoadError, match=r"a.safetensors cannot be read \(No such file"):
        copy_weights([fill], lambda _count: None)


def test_an_error_of_one_thread_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_copy, "PART_BYTES", 4)
    save_file({"x": torch.arange(10_000.0)}, tmp_path / "a.safetensors")
    file = read_header(tmp_path / "a.safetensors")
    counted: list[int] = []

    def failing(num_bytes: int) -> None:
        counted.append(num_bytes)
        if len(counted) == 10:
            raise KeyError("out of order")

    with pytest.raises(KeyError):
        copy_weights([TensorCopy(file, file.tensors["x"], torch.empty(10_000))], failing)
    assert len(counted) < 5000


def test_nothing_to_copy() -> None:
    copy_weights([], lambda _count: None)


def test_small_checkpoints_take_one_thread() -> None:
    assert num_threads(1) == num_threads(weights_copy.PART_BYTES) == 1
    assert 2 <= num_threads(1 << 40) <= weights_copy.MAX_THREADS


MEMORY = """
import resource, sys, torch
from pathlib import Path
from pagewire.shared.model.safetensors_header import read_header
from pagewire.shared.model.weights_copy import TensorCopy, copy_weights
file = read_header(Path(sys.argv[1]))
target = torch.zeros(file.tensors["x"].shape, dtype=getattr(torch, sys.argv[2]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
copy_weights([TensorCopy(file, file.tensors["x"], target)], lambda count: None)
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_host_does_not_grow_with_the_file(tmp_path: Path, dtype: str) -> None:
    """A mapped file would count whole: 192 MiB."""
    save_file({"x": torch.zeros(48, 1 << 20)}, tmp_path / "a.safetensors")
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEMORY, str(tmp_path / "a.safetensors"), dtype],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    most = weights_copy.MAX_THREADS * weights_copy.PART_BYTES
    assert int(done.stdout) << 10 < most + (16 << 20)
