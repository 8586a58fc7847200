"""Check that the files which CONTRIBUTING.md names are there."""

import re
from pathlib import Path

import pytest

from tests.docs.guide import with_folders

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([\w./-]+\.(?:py|md|toml|txt)|[\w./-]+/)`", TEXT)))
PATTERNS = {"tests/passes/LEVEL/test_NAME.py"}  # what a reader fills in
HOMES = ("ipu_dynamo", "passes", "runtime", "popdist", "poptorch")
HOMES += ("tests", "docs", "benchmarks", "packaging")
PATHS = [
    path.relative_to(ROOT).as_posix() for home in HOMES for path in (ROOT / home).glob("**/*")
] + [path.name for path in ROOT.iterdir()]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PATTERNS])
def test_a_file_of_the_map_is_there(name):
    name = re.sub("^ipu_dynamo/(passes|runtime)/", r"\1/", name.rstrip("/"))
    assert any(path == name or path.endswith(f"/{name}") for path in PATHS)


def test_folders_have_the_first_lines_of_their_docstrings():
    assert with_folders(TEXT) == TEXT, "`python -m tests.docs.guide CONTRIBUTING` writes them"
