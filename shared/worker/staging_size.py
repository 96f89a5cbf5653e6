"""Computes the size of KV staging slots from the settings and the device's memory."""

from __future__ import annotations

import sys

import torch

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.settings.config import WorkerSettings

# Unless one is asked for, or a single block is larger. A segment costs each side a fraction of a
# millisecond of the host's time, so that over NVLink smaller ones are slower. All staging slots
# together are to take a small share of a GPU's memory.
LARGEST_SLOT_BYTES = 256 << 20
STAGING_SHARE = 1 / 64
MOST_BLOCKS_PER_SLOT = 128
MAX_BLOCKS_PER_SLOT = 4096  # whatever is asked for


def device_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; for a host, where staging costs little, no bound."""
    if device.type != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(device).total_memory)


def staging_bytes(settings: WorkerSettings, layout: KvLayout, total_bytes: int) -> int:
    """Return how much of a device's memory, in bytes, a worker's staging takes."""
    return settings.staging_slots * staging_slot_bytes(settings, layout, total_bytes)


def staging_slot_bytes(settings: WorkerSettings, layout: KvLayout, total_bytes: int) -> int:
    """Return the size of a worker's staging slots: see `slot_size`."""
    share = int(total_bytes * STAGING_SHARE / settings.staging_slots)
    return slot_size(settings.staging_slot_bytes, layout, share)


def slot_size(asked: int | None, layout: KvLayout, share: int = LARGEST_SLOT_BYTES) -> int:
    """Size staging slots: whole blocks, and their checksums on top.

    Args:
        asked: an upper bound of the blocks in bytes. None: large segments keep a link busy, but
            small blocks need no large ones.
        layout: of the blocks.
        share: what a staging slot may take of the device's memory, unless one is asked for or
            a single block is larger.

    Raises:
        ConfigError: what was asked for holds no block, or more than a staging slot may.
    """
    block_bytes = layout.block_bytes * layout.ranks
    if asked is None:
        largest = min(LARGEST_SLOT_BYTES, share)
        asked = max(1, min(largest // block_bytes, MOST_BLOCKS_PER_SLOT)) * block_bytes
    blocks = asked // block_bytes
    if not 1 <= blocks <= MAX_BLOCKS_PER_SLOT:
        raise ConfigError(
            f"setting staging_slot_bytes (PAGEWIRE_STAGING_SLOT_BYTES) cannot be {asked}: it "
            f"holds 1 to {MAX_BLOCKS_PER_SLOT} KV blocks, here {block_bytes} to "
            f"{MAX_BLOCKS_PER_SLOT * block_bytes} bytes"
        )
    return packed_bytes(layout, blocks)
