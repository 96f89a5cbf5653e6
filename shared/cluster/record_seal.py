"""Seals records in Redis, so that only members of the cluster can add workers and responses.

A sealed record is its HMAC-SHA256, 32 bytes, and the record. The key derives from the cluster
secret. The record has the id and epoch of its worker or router. The HMAC covers its name in Redis,
too, so that a record is not valid under another name.
"""

from __future__ import annotations

import hashlib
import hmac

from pagewire.shared.base.errors import SealError

_SEAL_BYTES = 32


class RecordSeal:
    """Seals and checks the records of one cluster.

    Args:
        cluster_secret: the same in all services.
    """

    def __init__(self, cluster_secret: str) -> None:
        raw = hashlib.blake2b(cluster_secret.encode(), digest_size=32, person=b"pagewire-record")
        self._key = raw.digest()

    def seal(self, name: str, record: bytes) -> bytes:
        """Return a record as it is stored.

        Args:
            name: the record's name in Redis.
            record: the encoded record.
        """
        return self._seal_of(name, record) + record

    def open(self, name: str, sealed: bytes) -> bytes:
        """Return the record in a stored value.

        Raises:
            SealError: it was not sealed with this cluster's secret for this name.
        """
        seal, record = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal_of(name, record)):
            raise SealError("it is not sealed with this cluster's PAGEWIRE_CLUSTER_SECRET")
        return record

    def _seal_of(self, name: str, record: bytes) -> bytes:
        named = name.encode()
        return hmac.digest(
            self._key, len(named).to_bytes(4, "big") + named + record, hashlib.sha256
        )
