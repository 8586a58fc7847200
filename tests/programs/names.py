"""Say of public programs which names of PopTorch they use that are not here.

    python -m tests.programs.names --source examples=FOLDER --source poptorch=FOLDER ...

A program is a folder of a repository with all that lies in it, or one script, as `PROGRAMS` says.
Nothing of them is run: their syntax trees are read. A name counts as missing where the program
imports it, reads it of a module, calls it with a keyword that it does not take, or reads it of an
object while only PopTorch's classes have it.
"""

import argparse
import ast
import functools
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.programs.name_lists import METHODS, PROGRAMS, ROOTS, SHARED
from tests.programs.sources import NotFetched, Sources


def main(arguments: list[str] | None = None) -> int:
    """Print each program with what it lacks; 0 if at least 95 lack nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.names", description=__doc__)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    chosen = parser.parse_args(arguments)
    local = {name: Path(folder) for name, _, folder in (s.partition("=") for s in chosen.source)}
    free = whole = 0
    for repository, paths in PROGRAMS.items():
        with tempfile.TemporaryDirectory(prefix="names_") as folder:
            root, sources = Path(folder), Sources(repository, local.get(repository.name))
            library = SHARED.get(repository)
            try:
                for part in {
                    path.partition("/*")[0] for path in (*paths, library) if path is not None
                }:
                    sources.copy(part, root / part)
            except NotFetched as error:
                print(f"{repository.name}: {error}", file=sys.stderr)
                whole += len(paths)
                continue
            shared = set(missing_names(root / library)) if library else set()
            for file in (file for path in paths for file in _expanded(root, path)):
                missing = sorted(shared | set(missing_names(file)))
                whole += 1
                free += not missing
                lacks = f"lacks {', '.join(missing)}" if missing else "free"
                print(f"{lacks}  {repository.name}/{file.relative_to(root)}")
    print(f"{free} of {whole} programs find every name")
    return 0 if free >= 95 else 1


def _expanded(folder: Path, path: str) -> list[Path]:
    return sorted(folder.glob(path)) if "*" in path else [folder / path]


def missing_names(path: Path) -> Iterator[str]:
    """What the files of a program, or one of its own, use that is not here."""
    files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.ipynb")])
    for file in files:
        for tree in _trees(file):
            yield from _File(tree).missing()


def _trees(file: Path) -> Iterator[ast.Module]:
    text = file.read_text(errors="replace")
    if file.suffix == ".ipynb":
        try:
            cells = json.loads(text).get("cells", [])
        except json.JSONDecodeError:
            return
        sources = ["".join(c["source"]) for c in cells if c.get("cell_type") == "code"]
        text = "\n".join(
            line for s in sources for line in s.splitlines() if line.lstrip()[:1] not in "!%"
        )
    try:
        yield ast.parse(text)
    except SyntaxError:
        return


class _File:
    """One file: what its names stand for, as dotted names that begin with a root of ours."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _root(alias.name):
                        name = alias.asname or alias.name.partition(".")[0]
                        self._names[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom) and node.module and _root(node.module):
                for alias in node.names:
                    self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def missing(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                yield from (a.name for a in node.names if _root(a.name) and not _has(a.name))
            elif isinstance(node, ast.ImportFrom) and node.module and _root(node.module):
                names = (f"{node.module}.{a.name}" for a in node.names if a.name != "*")
                yield from (name for name in names if not _has(name))
            elif isinstance(node, ast.Attribute):
                dotted = self._dotted(node)
                if dotted and not _has(dotted):
                    yield dotted
                elif not dotted and self._names and node.attr in METHODS - _here():
                    yield f".{node.attr}"
            elif isinstance(node, ast.Call) and (dotted := self._dotted(node.func)):
                yield from _unknown_keywords(dotted, node)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self._dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""


def _root(name: str) -> bool:
    return name.partition(".")[0] in ROOTS


def _found(dotted: str) -> Any:
    """What a dotted name stands for.

    Raises:
        AttributeError, ImportError: it is not there.
    """
    first, *rest = dotted.split(".")
    value: Any = importlib.import_module(first)
    path = first
    for name in rest:
        path = f"{path}.{name}"
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(path)
    return value


def _has(dotted: str) -> bool:
    try:
        _found(dotted)
    except (AttributeError, ImportError):
        return False
    return True


def _unknown_keywords(dotted: str, call: ast.Call) -> Iterator[str]:
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(_found(dotted)).parameters
    except (AttributeError, ImportError, TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"{dotted}({keyword.arg}=)"


@functools.cache
def _here() -> frozenset[str]:
    """The names of all members of the façade's classes, those that their methods set as well."""
    folder = Path(str(importlib.import_module("poptorch").__file__)).parent
    modules = [m for name, m in sys.modules.items() if _root(name)]
    classes = {c for m in modules for c in vars(m).values() if inspect.isclass(c)}
    members = {name for c in classes for name in dir(c)}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                members.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                members.add(node.arg)  # options declare theirs so
    return frozenset(members)


if __name__ == "__main__":
    sys.exit(main())
