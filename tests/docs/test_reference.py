"""Check that the reference has an entry for all that is public, and that docstrings are whole."""

import enum
import inspect
import re
from importlib import import_module

import pytest
import yaml

from ipu_dynamo.passes.pipeline import all_passes
from tests.docs.guide import FOLDER, PAGES
from tests.docs.public_names import (
    OURS,
    PACKAGES,
    Signature,
    modules_of,
    names_of,
    rows,
    signatures,
)
from tests.docs.reference import names_page, pages, passes_page

CONFIG = yaml.safe_load((FOLDER.parent / "mkdocs.yml").read_text(encoding="utf-8"))
_ENTRY = re.compile(r"^::: (\S+)$", re.M)
_LINK = re.compile(r"\[`([\w.]+)`\]")


def public(package):
    """The public names of a package, found in another way than the reference finds them."""
    module = import_module(package)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    kinds = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {name for name, kind in kinds.items() if kind.__module__.split(".")[0] in OURS}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_has_an_entry(package):
    page = names_page(package)
    shown = {*_ENTRY.findall(page), *_LINK.findall(page)}
    names = public(package)
    assert names
    assert [name for name in sorted(names) if f"{package}.{name}" not in shown] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_function_and_class_has_one_entry(package):
    names = [name for module in modules_of(package) for name in names_of(module)]
    entries = {*_ENTRY.findall(names_page(package))}
    shown = [name.value for name in names if name.path in entries and callable(name.value)]
    assert shown
    assert sorted(map(id, shown)) == sorted({*map(id, shown)})


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_callable_has_a_docstring_that_names_its_parameters(package):
    found = list(signatures(package))
    assert found or package == "popart"  # which has only enumerations
    assert {one.path: one.unnamed() for one in found if one.unnamed()} == {}
    assert [one.path for one in found if not one.docstring.strip()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_row_of_args_has_one_name_that_is_a_parameter(package):
    wrong = {
        one.path: [row for row in rows(one.docstring) if row not in one.parameters]
        for one in signatures(package)
    }
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("docstring", "unnamed"),
    [
        ("Do.\n\nArgs:\n    a: one.\n    b: two.\n        More of `c`.\n", []),
        ("Do it with `a`.\n\nArgs:\n    *b: two.\n        c: of a continued line.\n", ["c"]),
        ("Do a, b, c.", ["a", "b", "c"]),
        ("Do.\n\nArgs:\n    a, b: two names.\n\nRaises:\n    c: no.", ["a", "b", "c"]),
    ],
)
def test_a_parameter_is_named_by_a_row_or_in_backticks(docstring, unnamed):
    assert Signature("f", ("a", "b", "c"), docstring).unnamed() == unnamed


def test_enumerations_have_an_entry_and_no_constructor():
    import poptorch

    assert issubclass(poptorch.OutputMode, enum.Enum)
    assert "poptorch.OutputMode" in _ENTRY.findall(names_page("poptorch"))
    assert "poptorch.OutputMode" not in {one.path for one in signatures("poptorch")}


def test_each_pass_has_an_entry_with_what_it_keeps():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", passes_page(), re.M | re.DOTALL))
    assert sections.keys() == {step.name for step in all_passes()}
    parts = ("Before ", "After ", "Keeps ", "Source ")
    wrong = {
        name: missing
        for name, text in sections.items()
        if (missing := [part for part in parts if not re.search(f"^{part}", text, re.M)])
    }
    assert wrong == {}


def test_each_page_is_in_the_navigation_once():
    listed = [path for section in CONFIG["nav"] for path in _paths(section)]
    assert sorted(listed) == sorted([*(page.name for page in PAGES), *pages()])


def _paths(entry):
    """The pages of an entry of the navigation: a page, or a title with a page or entries."""
    if isinstance(entry, str):
        return [entry]
    (content,) = entry.values()
    return [content] if isinstance(content, str) else [p for one in content for p in _paths(one)]
