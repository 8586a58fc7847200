"""Walk the public names of the packages: the reference shows them, and tests read their docstrings.

The names of a module are those of its `__all__`. Without `__all__` they are its own classes and
functions, and the imports under the same name (`from a import b as b`).
"""

import ast
import enum
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

# the pages of the reference, each with its modules; modules that these export are added
PACKAGES = {
    "ipu_dynamo": ("ipu_dynamo",),
    "ipu_dynamo.testing": ("ipu_dynamo.testing",),
    "ipu_dynamo.optimum": ("ipu_dynamo.optimum",),
    "ipu_dynamo.keras": ("ipu_dynamo.keras",),
    "poptorch": ("poptorch",),
    "popdist": ("popdist", "popdist.poptorch"),
    "popart": ("popart",),
}
OURS = ("ipu_dynamo", "popart", "popdist", "poptorch")
_ROW = re.compile(r"^    (\*{0,2}\w[\w, *]*?):(?: |$)", re.M)
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class PublicName:
    """A name as users write it, such as `poptorch.optim.Adam`, and its value."""

    path: str
    value: Any


@dataclass(frozen=True)
class Signature:
    """A function, method or constructor, with the parameters that its docstring has to name."""

    path: str
    parameters: tuple[str, ...]
    docstring: str

    def unnamed(self) -> list[str]:
        """The parameters that are neither a row of `Args:` nor in backticks."""
        named = set(rows(self.docstring))
        for span in _CODE.findall(self.docstring):
            named |= set(re.findall(r"\w+", span))
        return [name for name in self.parameters if name not in named]


def modules_of(page: str) -> list[ModuleType]:
    """The modules of a page: those of `PACKAGES`, each followed by the modules that it exports."""
    found: dict[str, ModuleType] = {}

    def visit(module: ModuleType) -> None:
        if module.__name__ not in found:
            found[module.__name__] = module
            for name in exported(module):
                value = getattr(module, name)
                if inspect.ismodule(value):
                    visit(value)

    for name in PACKAGES[page]:
        visit(import_module(name))
    return list(found.values())


def exported(module: ModuleType) -> list[str]:
    """The names that a module exports, sorted."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
    return sorted(name for name in names if not name.startswith("_"))


def names_of(module: ModuleType) -> list[PublicName]:
    """The names that a module exports, without modules."""
    found = [PublicName(f"{module.__name__}.{n}", getattr(module, n)) for n in exported(module)]
    return [name for name in found if not inspect.ismodule(name.value)]


@cache
def signatures(page: str) -> list[Signature]:
    """The callables of a page, each once: functions, constructors, methods that are public."""
    names = [name for module in modules_of(page) for name in names_of(module)]
    found = {id(value): (path, value) for path, value in reversed([*_callables(names)])}
    return [_signature(path, value) for path, value in reversed(found.values())]


def rows(docstring: str) -> list[str]:
    """The names of the rows under `Args:`; several in one row stay one string."""
    _, _, after = docstring.partition("Args:\n")
    arguments = re.split(r"^\S", after, maxsplit=1, flags=re.M)[0]
    return [name.strip("*") for name in _ROW.findall(arguments)]


def _callables(names: list[PublicName]) -> Iterator[tuple[str, Any]]:
    """Functions, classes that are constructed, and methods, each with its path."""
    for name in names:
        kind = name.value
        if not inspect.isclass(kind):
            if inspect.isroutine(kind) and _is_ours(kind):
                yield name.path, kind
            continue
        private = name.path.rpartition(".")[2].startswith("_")  # made by an object that has it
        if not (private or issubclass(kind, enum.Enum)) and _is_ours(kind.__init__):
            yield name.path, kind
        for member, function in inspect.getmembers(kind, inspect.isroutine):
            public = member == "__call__" or not member.startswith("_")
            if public and _is_ours(function) and not _refuses(function):
                yield (
                    f"{name.path}.{member}",
                    inspect.unwrap(getattr(function, "__func__", function)),
                )


def _signature(path: str, value: Any) -> Signature:
    """Parameters and docstring; a constructor may have that of the class that defines it."""
    docstrings = [inspect.getdoc(value)]
    if inspect.isclass(value):
        owner = next(kind for kind in value.__mro__ if "__init__" in vars(kind))
        docstrings += [inspect.getdoc(owner), value.__init__.__doc__]
        value = value.__init__
    names = inspect.signature(value).parameters
    parameters = tuple(n for n in names if n not in ("self", "cls") and not n.startswith("_"))
    return Signature(path, parameters, "\n\n".join(map(inspect.cleandoc, filter(None, docstrings))))


def _is_ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] in OURS


def _refuses(function: Any) -> bool:
    """Whether it only raises an error, for any arguments."""
    return inspect.signature(function).return_annotation is NoReturn
