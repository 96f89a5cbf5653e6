"""API keys: what a file may have, which keys are valid, and what changes while a router runs."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.http.api_keys import (
    MAX_FILE_BYTES,
    ApiKeys,
    KeyTable,
    load_keys,
    parse_keys,
)
from pagewire.shared.settings.config import RouterSettings, load_settings

KEY, OTHER = "sk-0123456789", "another-key-of-bob"
HASH = hashlib.sha256(OTHER.encode()).hexdigest()


def test_a_file_has_plain_keys_and_hashes_and_a_name_may_have_several() -> None:
    text = f"# of the team\n\nalice: {KEY}\nalice:sk-abc:defgh\n  bob.b@x :  sha256:{HASH}\n"
    table = KeyTable(parse_keys(text))
    assert len(table) == 3
    assert table.name_of(KEY.encode()) == "alice"
    assert table.name_of(b"sk-abc:defgh") == "alice"
    assert table.name_of(OTHER.encode()) == "bob.b@x"
    assert KeyTable(parse_keys(f"bob: SHA256:{HASH}")).name_of(OTHER.encode()) == "bob"
    for wrong in (b"", KEY[:-1].encode(), KEY.encode() + b"x", HASH.encode(), b"\xff" * 9999):
        assert table.name_of(wrong) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"alice: {KEY}\n{OTHER}", "line 2 is not NAME: KEY"),
        (f"sha256:{HASH}", "line 1 is not NAME: KEY"),
        (f"a b: {KEY}", "line 1 is not NAME: KEY"),
        (f"{'n' * 65}: {KEY}", "line 1 is not NAME: KEY"),
        (f"a: {KEY}\nb: {KEY}", "line 2 has the key of a again"),
        (f"a: {OTHER}\nb: sha256:{HASH.upper()}", "line 2 has the key of a again"),
        ("alice: sha256:123", "64 hexadecimal digits"),
        ("alice: Sha256:123", "64 hexadecimal digits"),
        ("alice: short", "line 1 has a key that is not 8 to 512 printable ASCII characters"),
        ("alice: clé-0123456789", "printable ASCII"),
        (f"alice: {KEY} 2", "characters without blanks"),
        ("# nothing\n", "it has no keys"),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_keys(text)
    assert problem in str(error.value)
    assert not any(key in str(error.value) for key in (KEY, OTHER, HASH, "0123456789"))


def test_a_file_may_mark_utf_8_and_end_its_lines_as_windows_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"\ufeffalice: {KEY}\r\nbob: {OTHER}\r\n".encode())
    keys = ApiKeys(file, {})
    assert keys.name_of(KEY.encode()) == "alice"
    assert keys.name_of(OTHER.encode()) == "bob"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice: {KEY}\n")
    keys = ApiKeys(file, {"default": "of-the-environment"})
    assert keys.name_of(KEY.encode()) == "alice"
    file.write_text(f"bobby: {OTHER[: len(KEY)]}\n")  # as long as before
    keys.look()
    assert keys.name_of(KEY.encode()) is None
    assert keys.name_of(OTHER[: len(KEY)].encode()) == "bobby"
    assert keys.name_of(b"of-the-environment") == "default"


def test_a_file_that_is_replaced_with_an_old_one_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice: {KEY}\n")
    os.utime(file, (1000, 1000))
    keys = ApiKeys(file, {})
    new = tmp_path / "new"
    new.write_text(f"bobby: {OTHER[: len(KEY)]}\n")
    os.utime(new, (1000, 1000))
    new.rename(file)
    keys.look()
    assert keys.name_of(KEY.encode()) is None


@pytest.mark.parametrize("trouble", ["missing", "empty", "wrong", "no text", "too large", "pipe"])
def test_a_file_that_goes_wrong_leaves_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice: {KEY}\n")
    keys = ApiKeys(file, {})
    contents = {"empty": b"", "wrong": b"x", "no text": b"\xff\n", "too large": b"#" * (1 << 21)}
    assert len(contents["too large"]) > MAX_FILE_BYTES
    if trouble in ("missing", "pipe"):
        file.unlink()
        if trouble == "pipe":  # nobody writes to it: whoever opens it waits
            os.mkfifo(file)
    else:
        file.write_bytes(contents[trouble])
    for _ in range(3):
        keys.look()
        assert keys.name_of(KEY.encode()) == "alice"
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in warning.getMessage()
    file.unlink(missing_ok=True)
    caplog.set_level(logging.INFO)
    for name, key in (("alice", KEY), ("bob", OTHER)):
        file.write_text(f"{name}: {key}\n")
        keys.look()
        assert keys.name_of(key.encode()) == name
    assert keys.name_of(KEY.encode()) is None
    assert caplog.text.count(f"{file} is valid again") == 1


def test_a_file_that_is_wrong_from_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ApiKeys(tmp_path / "none", {})
    (tmp_path / "keys").write_text(KEY)
    with pytest.raises(ConfigError, match=r"keys: line 1 is not NAME: KEY"):
        ApiKeys(tmp_path / "keys", {})


def test_settings_name_keys_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_keys(RouterSettings()) is None
    monkeypatch.setenv("PAGEWIRE_API_KEY", KEY)
    settings = load_settings(RouterSettings, {})
    keys = load_keys(settings)
    assert keys is not None
    assert (keys.name_of(KEY.encode()), len(keys)) == ("default", 1)
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "8 to 512 printable ASCII characters without blanks"),
        ("seven77", "8 to 512 printable ASCII characters without blanks"),
        ("seven77" * 99, "8 to 512 printable ASCII characters without blanks"),
        (f"{KEY}\n", "without blanks"),  # no header would have the end of the line
        ("clé-0123456789", "printable ASCII"),
        (f"sha256:{HASH}", "it is a hash, which only a file of keys may have"),
    ],
)
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str, problem: str
) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", key)
    with pytest.raises(ConfigError, match=problem) as error:
        load_settings(RouterSettings, {})
    shown = str(error.value)
    assert "PAGEWIRE_API_KEY" in shown
    assert not any(secret in shown for secret in ("seven", KEY, "clé", HASH))
