"""Check on syntax trees which names of PyTorch a folder uses: import-linter sees no attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ipu_dynamo", "passes", "runtime", "popart", "popdist", "poptorch")
LINKS = {ROOT / "ipu_dynamo" / "passes", ROOT / "ipu_dynamo" / "runtime"}


def files(folder: Path) -> list[Path]:
    """All modules under a folder, each once."""
    found = sorted(folder.rglob("*.py"))
    return [file for file in found if not LINKS & {*file.parents}]


def names(source: str) -> Iterator[tuple[int, str]]:
    """What a module imports, or reaches by attributes, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield node.lineno, name


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
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def is_fx(name: str) -> bool:
    return name == "torch.fx" or name.startswith("torch.fx.")


def wrong(folder: Path, is_wrong) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files(folder)
        if "private" not in file.parts
        for line, name in names(file.read_text())
        if is_wrong(name)
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_private_names_of_pytorch_are_in_folders_of_their_own(source):
    assert wrong(ROOT / source, is_private) == []


def test_private_names_of_keras_are_in_a_folder_of_their_own():
    keras = ROOT / "ipu_dynamo" / "keras"
    assert wrong(keras, lambda name: name.startswith("keras.src")) == []
    looked_at = [name for file in files(keras / "private") for _, name in names(file.read_text())]
    assert any(name.startswith("keras.src") for name in looked_at)


def test_what_executes_looks_at_no_graph():
    assert wrong(ROOT / "runtime" / "execute", is_fx) == []


@pytest.mark.parametrize(
    ("line", "private", "fx"),
    [
        ("import torch", False, False),
        ("from torch import Tensor, fx", False, True),
        ("import torch.fx as graphs", False, True),
        ("from torch.fx.node import map_arg", False, True),
        ("x: torch.fx.Node", False, True),
        ("import torch._inductor", True, False),
        ("from torch import _C", True, False),
        ("from torch.utils import _pytree as pytree", True, False),
        ("from torch._ops import OpOverload", True, False),
        ("torch._foreach_add_(a, b)", True, False),
        ("torch.autograd.function._SingleLevelFunction", True, False),
        ("torch.ops.aten._softmax.default", False, False),
        ("tensor._version", False, False),
        ("torch.__version__", False, False),
    ],
)
def test_the_check_sees(line, private, fx):
    assert any(is_private(name) for _, name in names(line)) == private
    assert any(is_fx(name) for _, name in names(line)) == fx


def test_every_module_is_looked_at():
    looked_at = {file for source in SOURCES for file in files(ROOT / source)}
    assert {
        ROOT / "runtime/execute/executable.py",
        ROOT / "poptorch/executor/executor.py",
    } <= looked_at
    assert not any(file.is_relative_to(link) for file in looked_at for link in LINKS)
