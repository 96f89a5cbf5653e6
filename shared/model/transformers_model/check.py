"""Compares a loaded model with transformers' own attention, on a few tokens.

Two sequences run in chunks and by single tokens, in the same batches, over a small KV pool. Their
hidden states must equal those of whole sequences with transformers' attention. This finds models in
which a token depends on others not only through keys and values: recurrent states, convolutions,
biases by distance, custom masks, positions that the model counts itself.
"""

from __future__ import annotations

import torch

from pagewire.kernels.errors import KernelError
from pagewire.shared.base.errors import IntegrityError, ModelLoadError
from pagewire.shared.model.inputs import ForwardBatch, LayerKv
from pagewire.shared.model.transformers_model.model import TransformersModel

_BLOCK_SIZE = 16
_LENGTHS = (13, 9)
# Number of tokens of each sequence in each step.
_STEPS = ((6, 4), (1, 1), (6, 0), (0, 4))
# Errors of the tokens' hidden states, relative to their lengths: the median is compared, since in
# low precision a few tokens may take another expert.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}

# Exceptions of transformers' modules if they do not support this use, and of Pagewire's attention.
_RAISED = (
    IntegrityError,
    KernelError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)


@torch.inference_mode()
def check_model(model: TransformersModel) -> None:
    """Check that a model gives the same results as with transformers' attention.

    Raises:
        ModelLoadError: it does not; one line.
    """
    name = model.config.architecture
    generator = torch.Generator().manual_seed(0)
    top = min(model.config.vocab_size, 1000)
    tokens = [torch.randint(top, (length,), generator=generator) for length in _LENGTHS]
    model.attention.checks = True
    try:
        actual = _paged(model, tokens)
        expected = _whole(model, tokens)
        width = model.compute_logits(actual[:1]).shape[-1]
    except ModelLoadError as exc:
        raise ModelLoadError(f"architecture {name} is not supported: {exc}") from exc
    except _RAISED as exc:
        raise ModelLoadError(
            f"architecture {name} is not supported: its code does not run with paged attention "
            f"({str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__})"
        ) from exc
    finally:
        model.attention.checks = False
    if width != model.config.vocab_size:
        raise ModelLoadError(
            f"{name} has {width} logits, but config.json asks for {model.config.vocab_size}"
        )
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)
    median = float(errors.median())
    if not median <= _TOLERANCE[model.embed_tokens.dtype]:
        raise ModelLoadError(
            f"architecture {name} is not supported: with paged attention its hidden states are "
            f"off by {median:.2g}"
        )


def _whole(model: TransformersModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return the hidden states of whole sequences by transformers' attention, [T, hidden]."""
    decoder, device = model.decoder, model.embed_tokens.device
    decoder.set_attn_implementation("eager")
    try:
        rows = [
            decoder(input_ids=ids[None].to(device), use_cache=False).last_hidden_state[0]
            for ids in tokens
        ]
    finally:
        decoder.set_attn_implementation(model.attention.name)
    return torch.cat(rows).float()


def _paged(model: TransformersModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return the hidden states of the same sequences, computed in several steps, [T, hidden]."""
    config, device = model.config, model.embed_tokens.device
    shape = (len(tokens), config.num_layers, 2, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    pool = torch.zeros(shape, dtype=model.embed_tokens.dtype, device=device)
    layers = [LayerKv(0, cache) for cache in pool.unbind(1)]
    rows: list[list[torch.Tensor]] = [[] for _ in tokens]
    done = [0] * len(tokens)
    for lengths in _STEPS:
        chunks = [
            (index, done[index], done[index] + length)
            for index, length in enumerate(lengths)
            if length
        ]
        hidden = model.forward(_batch(tokens, chunks, device), layers)
        parts = hidden.split([end - start for _, start, end in chunks])
        for (index, _, end), part in zip(chunks, parts, strict=True):
            rows[index].append(part)
            done[index] = end
    return torch.cat([part for parts in rows for part in parts]).float()


def _batch(
    tokens: list[torch.Tensor], chunks: list[tuple[int, int, int]], device: torch.device
) -> ForwardBatch:
    """Return a step of chunks (sequence, start, end); a sequence's number is its block id.

    Chunks of one token are decode rows.
    """
    positions = [torch.arange(start, end) for _, start, end in chunks]
    tables = torch.tensor([[index] for index, _, _ in chunks], dtype=torch.int32, device=device)
    ends = torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=device)
    lengths = [end - start for _, start, end in chunks]
    cumulative = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    decodes = all(length == 1 for length in lengths)
    return ForwardBatch(
        input_ids=torch.cat([tokens[i][start:end] for i, start, end in chunks]).to(device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(
            [p + index * _BLOCK_SIZE for p, (index, _, _) in zip(positions, chunks, strict=True)]
        ).to(device),
        num_decodes=len(chunks) if decodes else 0,
        decode_block_tables=tables if decodes else None,
        decode_seq_lens=ends if decodes else None,
        prefill_block_tables=None if decodes else tables,
        prefill_cu_query_lens=None if decodes else cumulative,
        prefill_seq_lens=None if decodes else ends,
        max_query_len=0 if decodes else max(lengths),
    )
