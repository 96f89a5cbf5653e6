"""API keys: which are valid, and what they are named.

Keys are compared as SHA-256 hashes, and the file may hold those. A hash needs no salt: a key is
random, not a password. Neither keys nor hashes are ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.settings.types import API_KEY, API_KEY_RULE, HASHED

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
LOOK_S = 1.0  # between checks whether the file has changed
SETTLE_S = 2.0  # within this time a second change may leave the same time of change
DEFAULT = "default"  # name of the key that is not in a file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_Signature = tuple[int, int, int]  # time of change in ns, bytes, inode


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One valid key.

    Attributes:
        name: in logs and metrics; several keys may have one.
        digest: SHA-256.
    """

    name: str
    digest: bytes


class KeyTable:
    """Finds the key that a client has sent.

    The time of a lookup reveals nothing about the keys: it compares keyed hashes, and only this
    process knows the key of the hash, so that a client cannot choose what is compared.

    Attributes:
        names: of the keys.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._keys = {self._hidden(key.digest): key for key in keys}
        self.names = {key.name for key in self._keys.values()}

    def __len__(self) -> int:
        return len(self._keys)

    def name_of(self, sent: bytes) -> str | None:
        """Return the name of a key; None if it is not valid."""
        digest = hashlib.sha256(sent).digest()
        key = self._keys.get(self._hidden(digest))
        return key.name if key and hmac.compare_digest(key.digest, digest) else None

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._pepper, digest_size=32).digest()


def plain_key(name: str, key: str) -> ApiKey:
    """Return the key of a text."""
    return ApiKey(name, hashlib.sha256(key.encode()).digest())


def parse_keys(text: str) -> list[ApiKey]:
    """Return the keys of a file: a line `NAME: KEY` each; empty lines and # comments are skipped.

    Raises:
        ConfigError: a line is wrong, or there is none; names the line, and does not show it.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parse_line(line, number)
        if (other := keys.setdefault(key.digest, key)) is not key:
            raise ConfigError(f"line {number} has the key of {other.name} again")
    if not keys:
        raise ConfigError("it has no keys")
    return list(keys.values())


def _parse_line(line: str, number: int) -> ApiKey:
    name, colon, key = (part.strip() for part in line.partition(":"))
    if not colon or f"{name.lower()}:" == HASHED or not _NAME.fullmatch(name):
        raise ConfigError(
            f"line {number} is not NAME: KEY, where a name is up to 64 letters, digits, '.', '_', "
            "'@' or '-'"
        )
    if key.lower().startswith(HASHED):
        if not _HASH.fullmatch(digest := key[len(HASHED) :].strip()):
            raise ConfigError(f"line {number} has no SHA-256 hash, which is 64 hexadecimal digits")
        return ApiKey(name, bytes.fromhex(digest))
    if not API_KEY.fullmatch(key):
        raise ConfigError(f"line {number} has a key that is not {API_KEY_RULE}")
    return plain_key(name, key)


class ApiKeys:
    """The keys of an endpoint: of a file that may change, and fixed ones.

    While `watch` runs, the file is read again if it has changed or was replaced, as Kubernetes and
    Docker replace theirs. No signal is needed. While it is missing or wrong, the keys that were
    read last stay valid.

    Args:
        file: of keys; None if there is none.
        fixed: keys by name.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(self, file: Path | None, fixed: Mapping[str, str]) -> None:
        self._file = file
        self._fixed = [plain_key(name, key) for name, key in fixed.items()]
        self._complaint = ""
        self._signature: _Signature | None = None
        self._raw: bytes | None = None
        self._table = KeyTable(self._fixed)
        if file is not None:
            self._read(file)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def names(self) -> set[str]:
        """The names of the keys that are valid now."""
        return self._table.names

    def name_of(self, sent: bytes) -> str | None:
        """Return the name of the key that a client has sent; None if it is not valid."""
        return self._table.name_of(sent)

    async def watch(self) -> None:
        """Look at the file once a second; runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed."""
        if (file := self._file) is None:
            return
        try:
            self._read(file)
        except ConfigError as exc:
            if str(exc) != self._complaint:
                logger.warning("%s; the API keys that were read before stay valid", exc)
            self._complaint = str(exc)
        else:
            if self._complaint:
                logger.info("API keys: %s is valid again", file)
            self._complaint = ""

    def _read(self, file: Path) -> None:
        """Read the file if it has changed.

        Raises:
            ConfigError: it cannot be read, or a line of it is wrong.
        """
        try:
            status = os.stat(file)
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
                raise ConfigError(f"API keys: {file} is not a regular file")
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            if signature == self._signature:
                return
            with file.open("rb") as opened:
                raw = opened.read(MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise ConfigError(f"API keys: {file} cannot be read: {exc.strerror}") from exc
        if raw != self._raw:
            try:
                self._table = KeyTable([*parse_keys(_text(raw)), *self._fixed])
            except ConfigError as exc:
                raise ConfigError(f"API keys: {file}: {exc}") from None
            logger.info("%d API keys are valid", len(self))
        self._raw = raw
        is_settled = time.time() - status.st_mtime > SETTLE_S
        self._signature = signature if is_settled else None


def _text(raw: bytes) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it is too large, or it is not text.
    """
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8-sig")  # some editors mark UTF-8
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None


def load_keys(settings: RouterSettings) -> ApiKeys | None:
    """Return the API keys that the settings name; None if they name none.

    Raises:
        ConfigError: the file of keys cannot be used.
    """
    if settings.api_key is None and settings.api_key_file is None:
        return None
    key = settings.api_key
    fixed = {} if key is None else {DEFAULT: key.get_secret_value()}
    return ApiKeys(settings.api_key_file, fixed)
