"""Find on syntax trees what sources use of PyTorch's private names and agreements.

import-linter sees imports only: no attributes, and no strings.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import fx, nn

from ipu_dynamo.ops.private import node_meta
from ipu_dynamo.ops.private.graphs import ShapeEnv

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ipu_dynamo", "passes", "runtime", "popart", "popdist", "poptorch")
LINKS = {ROOT / "ipu_dynamo" / "passes", ROOT / "ipu_dynamo" / "runtime"}

_PICKLED = "every pickled module has it in its `__dict__`"
_OVERRIDDEN = "modules of others override it"
# private attributes of PyTorch's objects that are used everywhere, each with the reason
KEPT = {
    "_backward_hooks": _PICKLED,
    "_backward_pre_hooks": _PICKLED,
    "_buffers": _PICKLED,
    "_forward_hooks": _PICKLED,
    "_forward_pre_hooks": _PICKLED,
    "_forward_hooks_always_called": _PICKLED,
    "_forward_hooks_with_kwargs": _PICKLED,
    "_forward_pre_hooks_with_kwargs": _PICKLED,
    "_get_name": _OVERRIDDEN,
    "_is_full_backward_hook": _PICKLED,
    "_iterator": "`batches` stands on nothing; a copied loader must not share processes",
    "_load_from_state_dict": _OVERRIDDEN,
    "_modules": _PICKLED,
    "_name": "of Keras' layers",
    "_next": "of `poptorch.AsynchronousDataAccessor`",
    "_non_persistent_buffers_set": _PICKLED,
    "_parameters": _PICKLED,
    "_save_to_state_dict": _OVERRIDDEN,
    "_step_count": "schedules of learning rates count calls there; it is no number of an optimiser",
    "_validate_args": "`Distribution.set_default_validate_args` has no getter",
    "_values": "of `poptorch.Options`",
    "_version": "PyTorch's notes on autograd describe it",
}
# attributes of others that are called as some of PyTorch's
_OTHERS = ("_name", "_next", "_values")
# keys of node.meta that PyTorch documents
DOCUMENTED = {"stack_trace", "val"}


def files(folder: Path) -> list[Path]:
    """All modules under a folder, each once."""
    found = sorted(folder.rglob("*.py"))
    return [file for file in found if not LINKS & {*file.parents}]


def names(source: str) -> Iterator[tuple[int, str]]:
    """What a module imports, or reaches by attributes, with the line."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((node.lineno, name) for name in full.values())
            imported |= {alias.asname or alias.name: name for alias, name in full.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            yield node.lineno, f"{imported.get(first, first)}.{rest}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of attributes of a name; empty for those of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Whether a name is PyTorch's own business; operators are not, however they are called."""
    package, *parts = name.split(".")
    if package != "torch" or parts[:1] == ["ops"]:
        return False
    return any(_hidden(part) and part not in KEPT for part in parts)


def is_fx(name: str) -> bool:
    return name == "torch.fx" or name.startswith("torch.fx.")


@cache
def private_attributes() -> frozenset[str]:
    """The private attributes of the objects of PyTorch that sources have in their hands."""
    layer = nn.Linear(1, 1)
    graph = fx.symbolic_trace(layer)
    (node, *_) = graph.graph.nodes
    normal = torch.distributions.Normal(0.0, 1.0)
    mm, loader = torch.ops.aten.mm, torch.utils.data.DataLoader([1])
    optimizer = torch.optim.SGD(layer.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    objects = (layer.weight, layer.weight.untyped_storage(), layer, graph, graph.graph, node, mm,
        mm.default, fx.Interpreter(graph), fx.Tracer(), optimizer, schedule, normal, loader,
        torch.Generator(), torch.autograd.Function, ShapeEnv())  # fmt: skip
    found = {name for each in objects for name in (*dir(each), *getattr(each, "__dict__", ()))}
    return frozenset({name for name in found if _hidden(name)} | {"_boxed_call", "_dynamo_source"})


def attributes(source: str) -> Iterator[tuple[int, str]]:
    """Private attributes of PyTorch's objects, by the dot or by their names in strings.

    A class that calls its own attribute so is not one of PyTorch's.
    """
    tree = ast.parse(source)
    known = private_attributes() - KEPT.keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in known:
            owner = ast.unparse(node.value)
            if owner not in ("aten", "cls", "self", "super()", "torch.ops.aten"):
                yield node.lineno, f"{owner}.{node.attr}"
    yield from ((line, repr(text)) for line, text in strings(tree) if text in known)


def agreements(source: str) -> Iterator[tuple[int, str]]:
    """Keys of node.meta that PyTorch writes, and other words that its internals write in graphs."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for key in _keys_of_meta(node):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                own = key.value.startswith("ipu.") or key.value in DOCUMENTED
                yield from [] if own else [(key.lineno, f"meta[{key.value!r}]")]
    distinct = {word for word in words().values() if not word.isalpha()}
    for line, text in strings(tree):
        if any(text == word or (word[-1] == "_" and text.startswith(word)) for word in distinct):
            yield line, repr(text)


def words() -> dict[str, str]:
    """The constants of `node_meta.py`, by name."""
    public = {name: word for name, word in vars(node_meta).items() if name.isupper()}
    return {name: word for name, word in public.items() if isinstance(word, str)}


def page_table(section: str) -> str:
    """A table of docs/new_pytorch.md."""
    if section == "private names":
        modules = (file for source in SOURCES for file in files(ROOT / source))
        rows = [_row(file) for file in modules if "private" in file.parts]
        return _table(("Module", "What it does", "Names"), [row for row in rows if row[-1]])
    if section == "agreements":
        lines = Path(node_meta.__file__).read_text().splitlines()
        noted = {line.split(" = ")[0]: line.partition("  # ")[2] for line in lines}
        rows = [(f"`{name}`", f"`{word}`", noted[name]) for name, word in words().items()]
        return _table(("Name", "String", "What it says"), rows)
    return _table(
        ("Attribute", "Reason"),
        [(f"`{name}`", reason) for name, reason in sorted(KEPT.items()) if name not in _OTHERS],
    )


def _row(file: Path) -> tuple[str, str, str]:
    source = file.read_text()
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    found = {name for _, name in names(source) if is_private(name)}
    whole = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    parts = {part for name in whole for part in name.split(".")}
    words = set() if "keras" in file.parts else _hidden_words(source) - parts
    listed = ", ".join(f"`{name}`" for name in sorted(whole | words))
    return f"`{file.relative_to(ROOT)}`", first, listed


def _hidden_words(source: str) -> set[str]:
    """Private attributes that a module reads of others, by the dot or by their names in strings."""
    tree = ast.parse(source)
    read = {text for _, text in strings(tree) if re.fullmatch(r"_[a-z]\w*", text)}
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("cls", "self"):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and not dotted(node).startswith("torch."):
            read.add(node.attr)
    return {name for name in read - own - KEPT.keys() if _hidden(name)}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(["\n", *(f"| {' | '.join(cells)} |\n" for cells in lines), "\n"])


def _keys_of_meta(node: ast.AST) -> list[ast.expr]:
    def is_meta(of: ast.expr) -> bool:
        return isinstance(of, ast.Attribute) and of.attr == "meta"

    match node:
        case ast.Subscript(value=of, slice=key) if is_meta(of):
            return [key]
        case ast.Call(func=ast.Attribute(value=of), args=[key, *_]) if is_meta(of):
            return [key]
        case ast.Compare(left=key, comparators=[of]) if is_meta(of):
            return [key]
        case ast.Assign(targets=[of], value=ast.Dict(keys=keys)) if is_meta(of):
            return [key for key in keys if key is not None]
    return []


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a module, without those that stand alone, as docstrings do."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def _hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
