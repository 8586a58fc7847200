"""List the statements that raise an error of this package, and those that no test has reached.

`python -m pytest --record-raises` records a run; then `python -m tests.docs.errors --coverage`.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.raise_record import FOLDER, recorded
from tests.repository.private_names import ROOT, files

_HOMES = ("ipu_dynamo", "passes", "runtime", "popdist", "poptorch")
_OF_POPTORCH = {"createPoptorchError", "Error", "RecoverableError", "UnrecoverableError"}


@dataclass(frozen=True, order=True)
class Site:
    """A statement `raise X(...)`, where X is an error of this package or a function that makes one.

    Args:
        file: relative to the root.
        first, last: its lines.
        text: the beginning of its source.
    """

    file: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first}: {self.text}"


@cache
def sites() -> list[Site]:
    """All such statements, by file and line."""
    trees = {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for home in _HOMES
        for file in files(ROOT / home)
    }
    makers = _makers(trees)
    return sorted(site for file, tree in trees.items() for site in _in_file(file, tree, makers))


def _in_file(file: str, tree: ast.Module, makers: set[str]) -> Iterator[Site]:
    known = makers | _OF_POPTORCH if file.startswith("poptorch/") else makers
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        if _last_name(node.exc.func) in known:
            text = ast.unparse(node).partition("\n")[0][:100]
            yield Site(file, node.lineno, node.end_lineno or node.lineno, text)


def _makers(trees: Mapping[str, ast.Module]) -> set[str]:
    """The names of the errors, and of functions that return one by their annotation."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names, before = {"IpuError"}, 0
    while len(names) > before:
        before = len(names)
        names |= {of.name for of in classes if any(_last_name(base) in names for base in of.bases)}
    returning = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns]
    return names | {of.name for of in returning if _last_name(of.returns) in names}


def _last_name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def unreached() -> list[Site]:
    """The statements that the last recorded run did not reach."""
    lines: dict[str, set[int]] = {}
    for file, line in recorded():
        lines.setdefault(file, set()).add(line)
    return [
        site
        for site in sites()
        if lines.get(site.file, set()).isdisjoint(range(site.first, site.last + 1))
    ]


def main() -> int:
    """Print the statements; 2: no run is recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.errors", description=__doc__)
    parser.add_argument("--coverage", action="store_true", help="only those not reached")
    if not parser.parse_args().coverage:
        print(*sites(), sep="\n")
        return 0
    records = list(FOLDER.glob("*.txt"))
    if not records:
        print("no run is recorded: python -m pytest --record-raises", file=sys.stderr)
        return 2
    written = min(record.stat().st_mtime for record in records)
    left, total = unreached(), sites()
    print(*left, sep="\n")
    print(f"{len(total) - len(left)} of {len(total)} raise statements were reached")
    changed = [file for file in {site.file for site in total} if _time(file) > written]
    if changed:
        print("changed since, so that lines may differ:", *sorted(changed), sep="\n  ")
    return 0


def _time(file: str) -> float:
    return Path(ROOT, file).stat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
