"""Content hashes of full KV blocks: chained, keyed, equal in every process of a cluster.

hash = blake2b(parent hash | token ids, 4 bytes each | extra), 16 bytes. `extra` is what else the
content depends on, e.g. a request's salt. The key derives from the cluster secret and the
`ModelIdentity`, so workers that disagree on any of it share no hash, and nobody outside the cluster
can name one.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

import msgspec

from pagewire.shared.kv.model_identity import ModelIdentity

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
_TOKEN_BYTES = 4
_NO_PARENT = bytes(HASH_BYTES)


class BlockHasher:
    """Hashes the full blocks of token sequences.

    Attributes:
        block_size: tokens in a block.
    """

    def __init__(self, cluster_secret: str, identity: ModelIdentity) -> None:
        self.block_size = identity.block_size
        key = _derive_key(cluster_secret, identity)
        # Copying a keyed state skips the compression of the key for every block.
        self._keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=key)

    def hash_prompt(self, token_ids: Sequence[int], extra: bytes = b"") -> list[BlockHash]:
        """Return the hashes of all full blocks; a partial last block has none.

        Args:
            token_ids: each in [0, 2**32).
            extra: what else the content depends on.

        Raises:
            OverflowError: a token id is out of range.
        """
        hashes: list[BlockHash] = []
        self.extend(hashes, token_ids, extra)
        return hashes

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], extra: bytes = b"") -> int:
        """Append the hashes of those full blocks of `token_ids` that `hashes` lacks.

        Args:
            hashes: of the first blocks of `token_ids`; extended in place.
            token_ids: the whole sequence, from its first token.
            extra: the same as for the hashes that are there already.

        Returns:
            How many hashes were appended.

        Raises:
            OverflowError: a token id is out of range.
        """
        first, end = len(hashes), len(token_ids) // self.block_size
        if first >= end:
            return 0
        data = _pack(token_ids[first * self.block_size : end * self.block_size])
        parent: bytes = hashes[-1] if hashes else _NO_PARENT
        step, keyed_copy = self.block_size * _TOKEN_BYTES, self._keyed.copy
        for offset in range(0, len(data), step):
            state = keyed_copy()
            state.update(parent + data[offset : offset + step] + extra)
            parent = state.digest()
            hashes.append(BlockHash(parent))
        return end - first


def _derive_key(secret: str, identity: ModelIdentity) -> bytes:
    state = hashlib.blake2b(digest_size=32, person=b"pagewire-blocks")
    fields = msgspec.structs.asdict(identity)
    if identity.ranks == 1:  # so that an index from before there were ranks stays valid
        del fields["ranks"]
    state.update(msgspec.msgpack.encode((secret, fields)))
    return state.digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian 32-bit integers, on every machine."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
