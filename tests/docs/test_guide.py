"""Check that the guide's programs run, and that it shows what they print and what exists."""

import importlib
import re

import pytest

from tests.docs.guide import FOLDER, PAGES, refreshed
from tests.docs.pictures import differences, of_page

ROOT = FOLDER.parent
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
_NAME = re.compile(r"`((?:ipu_dynamo|poptorch)(?:\.\w+)+)\b[^`]*`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]+)?\)")
_VARIABLE = re.compile(r"\b((?:IPU_DYNAMO|POPTORCH|POPLAR|POPDIST|OMPI_COMM|RDMAV)_[A-Z_]+)\b")
_QUOTED = re.compile(rf'"{_VARIABLE.pattern}"')
_LOOKED_AT = re.compile(r"^(?: *```|\||!\[|    \S)", re.M)
REFERENCE = {"environment.md", "errors.md", "options.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    text = TEXTS[page.name]
    hint = "`python -m tests.docs.guide` writes what it should be"
    new, names = refreshed(text, page.stem, tmp_path)
    assert new == text, hint
    changed = {picture: differences(picture, names) for picture in of_page(page.stem)}
    assert not any(changed.values()), f"{changed}: {hint}"


@pytest.mark.parametrize("name", TEXTS)
def test_names_exist(name):
    """Names in code spans can be imported."""
    assert [one for one in _NAME.findall(TEXTS[name]) if not _exists(one)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    links = _LINK.findall(TEXTS[name])
    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_every_page_can_be_reached_from_the_first():
    assert {*_LINK.findall(TEXTS["index.md"])} >= TEXTS.keys() - {"index.md"}


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - REFERENCE))
def test_a_page_begins_with_something_to_look_at(name):
    """A program, a command, a table or a picture, in its first 40 lines."""
    assert _LOOKED_AT.search("\n".join(TEXTS[name].splitlines()[:40]))


def test_environment_variables_are_those_that_the_sources_name():
    folders = [ROOT / name for name in ("ipu_dynamo", "passes", "runtime", "popdist", "poptorch")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    quoted = {name for file in files for name in _QUOTED.findall(file.read_text(encoding="utf-8"))}
    assert {*_VARIABLE.findall(TEXTS["environment.md"])} == quoted


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one or of a class."""
    first, *rest = name.split(".")
    thing = importlib.import_module(first)
    for index, part in enumerate(rest):
        if hasattr(thing, part):
            thing = getattr(thing, part)
            continue
        try:
            thing = importlib.import_module(".".join([first, *rest[: index + 1]]))
        except ModuleNotFoundError:
            return False
    return True
