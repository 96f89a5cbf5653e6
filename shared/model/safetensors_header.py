"""Reads and checks headers of safetensors files, before a byte of weights is loaded.

Layout: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.shared.base.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_AUTOGPTQ = "gptq_model-*g.safetensors"  # the name of the one file that AutoGPTQ writes
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Bytes of a number, of dtypes with whole bytes; tensors of other dtypes are refused by name later.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}

# Names in config.json of the dtypes that models have.
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH_BYTES = 8
# Names of files in the directory itself that a system can open.
_FILE_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\0\ud800-\udfff]+")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Exceptions from reading JSON of another form; the last one if it is nested too deeply.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{}').save_pretrained('NEW')\" and copy the tokenizer's files to NEW"
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The dtype, shape and place of a tensor in a file.

    Attributes:
        name: in the file.
        dtype: in safetensors' spelling, e.g. `BF16`.
        start: of its bytes, from the beginning of the file.
        end: after its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensor takes in the file."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file whose header has been checked against its size.

    Attributes:
        header: the header's bytes.
        tensors: by name, which may not be that of the file.
    """

    path: Path
    size: int
    header: bytes
    tensors: dict[str, TensorEntry]


def find_weights(path: Path) -> list[WeightsFile]:
    """Return the safetensors files of a model directory: the shards of its index, or the one file.

    Raises:
        ModelLoadError: none is there, one is missing, truncated or corrupt; one line.
    """
    # Either may be a link that reaches nothing; then an error says so.
    listed = _names(path)
    if any(os.path.lexists(path / name) for name in (INDEX_FILE, listed[0])):
        return [read_header(path / name) for name in listed]
    names = sorted(file.name for file in path.glob("*"))
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise ModelLoadError(
            f"{path} has its weights as a pickle ({pickles[0]}), which can run any code when it is "
            "loaded; convert it to safetensors first, on a machine where that does no harm: "
            f"{_CONVERT.format(path)}"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        remedy = (
            f"rename it to {SINGLE_FILE} if it has all weights, or " if len(shards) == 1 else ""
        )
        raise ModelLoadError(
            f"{path} has {shards[0]}, but neither {SINGLE_FILE} nor {INDEX_FILE}, which lists "
            f"shards; {remedy}download the model again"
        )
    refuse_gguf(path)
    raise ModelLoadError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are loaded, "
        f"convert others first, such as .bin files of a hub repository: {_CONVERT.format(path)}"
    )


def refuse_gguf(path: Path) -> None:
    """Refuse a file in GGUF, or a directory that has one.

    Raises:
        ModelLoadError: it is one; one line.
    """
    for file in [path] if path.is_file() else sorted(path.glob(f"*{GGUF}")):
        if file.suffix == GGUF:
            raise ModelLoadError(
                f"{file} is in GGUF, which is not supported; pass a directory in Hugging Face "
                "format, with weights in safetensors: docs/models.md lists the formats"
            )


def weights_dtype(path: Path) -> str | None:
    """Return the dtype that most bytes of a model's first file have, as config.json names it.

    None if the file is not there, or has no dtype that models have.

    Raises:
        ModelLoadError: the file is truncated or corrupt; one line.
    """
    file = path / _names(path)[0]
    if not file.is_file():  # a router downloads the index alone
        return None
    counts: Counter[str] = Counter()
    for entry in read_header(file).tensors.values():
        counts[entry.dtype] += entry.num_bytes
    return next((_NAMES[name] for name, _ in counts.most_common() if name in _NAMES), None)


def read_header(file: Path) -> WeightsFile:
    """Read one file's header and check it against the file's size.

    Raises:
        ModelLoadError: the file is missing, truncated or corrupt; one line.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise _corrupt(file, "its header is cut off or no safetensors header")
            header = stream.read(length)
    except FileNotFoundError as exc:
        raise ModelLoadError(f"weights file {file} is missing; download it again") from exc
    except OSError as exc:
        raise ModelLoadError(f"weights file {file} cannot be read: {exc.strerror}") from exc
    tensors = _parse(file, header)
    _check_places(file, tensors, _LENGTH_BYTES + length, size)
    return WeightsFile(file, size, header, tensors)


def rename_tensors(file: WeightsFile, prefixes: Mapping[str, str]) -> WeightsFile:
    """Return a file whose tensors have other names; a tensor whose new name is taken keeps its own.

    Args:
        file: the file with its own names.
        prefixes: prefix of names in the file -> prefix of the new names.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        prefix = next((candidate for candidate in prefixes if name.startswith(candidate)), "")
        renamed = prefixes.get(prefix, "") + name.removeprefix(prefix)
        tensors[name if renamed in tensors or renamed in file.tensors else renamed] = entry
    return dataclasses.replace(file, tensors=tensors)


def _check_places(file: Path, tensors: dict[str, TensorEntry], start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps, each with the bytes of its shape."""
    end = max((entry.end for entry in tensors.values()), default=start)
    if end != size:
        raise _corrupt(file, f"it has {size} bytes, and its header says {end}")
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        expected = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
        if entry.start != start:
            raise _corrupt(file, f"its header has tensor {name} at {entry.start}, not at {start}")
        if entry.dtype in ITEM_BYTES and entry.num_bytes != expected:
            raise _corrupt(file, f"tensor {name} has {entry.num_bytes} bytes, not {expected}")
        start = entry.end


def _names(path: Path) -> list[str]:
    """Return the files that the index lists; without an index, the name of the one file."""
    index = path / INDEX_FILE
    if os.path.lexists(index):
        return _shards(index)
    others = [] if os.path.lexists(path / SINGLE_FILE) else list(path.glob(_AUTOGPTQ))
    return [others[0].name] if len(others) == 1 else [SINGLE_FILE]


def _corrupt(file: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"weights file {file} is truncated or corrupt: {what}; download it again")


def _shards(index: Path) -> list[str]:
    """Return the names of an index's files, sorted, each once."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except OSError as exc:
        raise ModelLoadError(f"{index} cannot be read: {exc.strerror}") from exc
    except _MALFORMED as exc:
        raise ModelLoadError(f"{index} is not a safetensors index; download it again") from exc
    if not names:
        raise ModelLoadError(f"{index} is not a safetensors index; download it again")
    for name in names:
        # A name with a directory in it could reach out of the model's directory.
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise ModelLoadError(f"{index} names a file {name!r} outside the model's directory")
    return sorted(names)


def _parse(file: Path, header: bytes) -> dict[str, TensorEntry]:
    base = _LENGTH_BYTES + len(header)
    try:
        content = json.loads(header)
        content.pop("__metadata__", None)
        return {name: _entry(name, raw, base) for name, raw in content.items()}
    except _MALFORMED as exc:
        raise _corrupt(file, "its header cannot be read") from exc


def _entry(name: str, raw: Any, base: int) -> TensorEntry:
    start, end = (int(offset) for offset in raw["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(f"offsets {start}, {end}")
    shape = tuple(int(size) for size in raw["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    return TensorEntry(name, str(raw["dtype"]), shape, base + start, base + end)
