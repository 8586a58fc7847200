"""Check that each event in the guide's table of failures names a test that exists."""

import ast
import re

import pytest

from tests.docs.guide import FOLDER

RANKS = FOLDER.parent / "tests" / "ranks"
ROWS = re.findall(
    r"^\| (?!Event).*\|$", (FOLDER / "scale_out.md").read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_of_the_table_names_a_test(row):
    _, event, effect, test, _ = (cell.strip() for cell in row.split("|"))
    file, name = test.strip("`").split("::")
    body = ast.parse((RANKS / file).read_text(encoding="utf-8")).body
    assert name in {each.name for each in body if isinstance(each, ast.FunctionDef)}
    assert event
    assert effect


def test_the_page_has_a_table():
    assert len(ROWS) > 10
