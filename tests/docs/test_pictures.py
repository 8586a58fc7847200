"""Check that pictures show the data of the code, and that pages show the pictures."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.pictures import FOLDER, PICTURES, differences, digest, drawn, stored

ROOT = FOLDER.parent.parent
HINT = "`python -m tests.docs.guide pictures {}` draws it anew"
THEMES = ("light", "dark")
_IMAGE = re.compile(r"!\[([^\]]+)\]\((?:docs/)?pictures/([\w-]+)-light\.svg\)")
_COLOUR = re.compile(r'(?:fill|stroke|color)(?:="|: ?)([^"; ]+)')


@pytest.mark.parametrize(
    "name", [name for name, of in PICTURES.items() if not of.page and not of.takes_long]
)
def test_data_is_that_of_the_code(name):
    """The data of other pictures is compared where their page runs, or takes long."""
    assert differences(name, {}) == [], HINT.format(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, of in PICTURES.items() if of.takes_long])
def test_data_that_takes_long_is_that_of_the_code(name):
    assert differences(name, {}) == [], HINT.format(name)


@pytest.mark.parametrize("name", PICTURES)
def test_files_show_their_data_in_two_themes(name):
    data = stored(name)
    grounds = set()
    for theme in THEMES:
        svg = (FOLDER / f"{name}-{theme}.svg").read_text(encoding="utf-8")
        assert digest(data) in svg, HINT.format(name)
        if PICTURES[name].drawn_alike:
            assert svg == drawn(name, data, dark=theme == "dark")
        root = ElementTree.fromstring(svg)
        assert {"viewBox", "width", "height"} <= {*root.keys()}
        assert not [c for c in _COLOUR.findall(svg) if not re.fullmatch(r"#[0-9a-f]{3,6}|none", c)]
        grounds.add(svg)
    assert len(grounds) == 2


def test_each_picture_is_on_a_page_with_words_for_who_cannot_see_it():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = [found for page in pages for found in _IMAGE.findall(page.read_text(encoding="utf-8"))]
    assert {name for _, name in shown} == PICTURES.keys()
    assert all(len(words.split()) >= 3 for words, _ in shown)
    files = {file.name for file in FOLDER.iterdir()} - {"report.html"}
    endings = (".json", "-light.svg", "-dark.svg")
    assert files == {f"{name}{ending}" for name in PICTURES for ending in endings}


def test_a_digest_is_of_the_data():
    data = stored("schedules")
    assert digest(data) == digest(json.loads(json.dumps(data)))
    title = next(iter(data))
    assert digest(data) != digest(data | {title: data[title][:-1]})


def test_the_report_is_a_page_that_stands_alone():
    page = Path(FOLDER / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") or page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
