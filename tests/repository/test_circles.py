"""Check that no files import each other in a circle, wherever their import statements are."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.repository.private_names import ROOT, SOURCES, files

CORE = ("passes.", "runtime.")  # packages inside `ipu_dynamo` whose folders are beside it
CLIENT = "ipu_dynamo.keras"  # has circles of its own, and nothing else imports it


def modules(*folders):
    """Every module in `folders`, with its file."""
    found = {}
    for file in (file for folder in folders for file in files(ROOT / folder)):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[f"ipu_dynamo.{name}" if f"{name}.".startswith(CORE) else name] = file.read_text()
    return found


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports in any place, except those for types and of names that are loaded on first use."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_types and getattr(node, "name", "") != "__getattr__":
            yield from statements(node)


def imported(source, known):
    """The modules of `known` that a module imports."""
    names = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in known else node.module for name in full}
    return names & known.keys()


def circle(sources):
    """The modules of a circle, or none."""
    arrows = {name: imported(text, sources) - {name} for name, text in sources.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("folders", [SOURCES, ["benchmarks"]], ids=["packages", "benchmarks"])
def test_no_imports_run_in_a_circle(folders):
    found = modules(*folders)
    assert circle({n: text for n, text in found.items() if not n.startswith(CLIENT)}) == []


def test_a_circle_is_found_in_functions_and_not_for_types():
    circular = {"a": "import b", "b": "def f():\n    from c import g", "c": "import a"}
    assert sorted({*circle(circular)}) == ["a", "b", "c"]
    typed = "if TYPE_CHECKING:\n    import a"
    assert circle(circular | {"c": typed}) == []
