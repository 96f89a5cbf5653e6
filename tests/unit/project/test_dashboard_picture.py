"""The tool that records a dashboard's documents and draws the page from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewire.services.router.dashboard.pages import PAGE
from pagewire.tests.support.browser import PROGRAM
from pagewire.tools import dashboard_picture

DOCUMENTS = [json.dumps({"number": number}).encode() for number in range(2)]


def test_what_is_recorded_of_a_page_is_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_picture, "INTERVAL_S", 0.05)
    file = tmp_path / "documents"
    with dashboard_picture.serving(DOCUMENTS) as url:
        dashboard_picture.record(url.removesuffix(PAGE), file, 1.0)
    first, *others = file.read_bytes().splitlines()
    assert first == DOCUMENTS[0]
    assert len(others) >= 2
    assert set(others) == {DOCUMENTS[1]}


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    (tmp_path / "documents").write_bytes(b"\n".join(DOCUMENTS))
    dashboard_picture.draw(tmp_path / "documents", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
