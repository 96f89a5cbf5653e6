"""The picture in the README is readable on a page of any colour and on a narrow screen."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from pagewire.tests.support.documents import ROOT

SVG = "{http://www.w3.org/2000/svg}"
NARROW_PX = 400
LEAST_TEXT_PX = 10


@pytest.fixture(scope="module")
def source() -> str:
    return (ROOT / "docs" / "request.svg").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def picture(source: str) -> ElementTree.Element:
    return ElementTree.fromstring(source)  # noqa: S314 - our own file


def test_background_covers_all_and_is_opaque(picture: ElementTree.Element) -> None:
    first = next(picture.iter(f"{SVG}rect"))
    _, _, width, height = picture.attrib["viewBox"].split()
    assert (first.get("width"), first.get("height")) == (width, height)
    assert (first.get("x", "0"), first.get("y", "0")) == ("0", "0")
    assert re.fullmatch("#[0-9a-f]{6}", first.attrib["fill"])


def test_colours_do_not_follow_the_browser(source: str) -> None:
    """A page may be light in a browser that prefers dark, and the other way round."""
    assert "prefers-color-scheme" not in source
    assert "currentColor" not in source


def test_text_is_large_enough_on_a_narrow_screen(source: str, picture: ElementTree.Element) -> None:
    sizes = [float(size) for size in re.findall(r'font-size[:=] ?"?([\d.]+)', source)]
    scale = NARROW_PX / float(picture.attrib["viewBox"].split()[2])
    assert sizes
    assert min(sizes) * scale >= LEAST_TEXT_PX
