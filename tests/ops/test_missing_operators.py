"""Check that tables of operators survive a PyTorch that lacks some of them."""

import ast
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.aten import MissingOperator, aten
from ipu_dynamo.passes.micro_batch.batch_table import LINEAR, RULES
from tests.repository.private_names import ROOT, SOURCES, dotted, files

IMPORT = """
import sys
from importlib import import_module

import torch
import torch._functorch.aot_autograd, torch._inductor.compile_fx, torch.export, torch.testing

modules, hidden = sys.argv[1].split(), set(sys.argv[2].split())
shown = torch.ops.aten


class WithoutTables:
    def __getattr__(self, name):
        if name in hidden:
            raise AttributeError(name)
        return getattr(shown, name)


torch.ops.aten = WithoutTables()
for module in modules:
    import_module(module)
"""


def at_import(tree):
    """The nodes of a module that are evaluated when it is imported."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def tables():
    """The modules that name operators when they are imported, with these."""
    for source in SOURCES:
        for file in files(ROOT / source):
            nodes = at_import(ast.parse(file.read_text()))
            names = {dotted(node).split(".")[1] for node in nodes if is_operator(node)}
            if names and "keras" not in file.parts:
                yield module_name(file), names


def is_operator(node):
    return isinstance(node, ast.Attribute) and dotted(node).startswith("aten.")


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] not in ("passes", "runtime") else ("ipu_dynamo", *parts))


def test_tables_are_imported_without_their_operators():
    found = dict(tables())
    assert len(found) > 30
    hidden = set().union(*found.values())
    command = [sys.executable, "-c", IMPORT, " ".join(found), " ".join(hidden)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_this_pytorch_lacks_no_operator_that_sources_name():
    trees = [ast.parse(f.read_text()) for source in SOURCES for f in files(ROOT / source)]
    named = {dotted(node) for tree in trees for node in ast.walk(tree) if is_operator(node)}
    operators = {name: attrgetter(name.removeprefix("aten."))(aten) for name in sorted(named)}
    operators |= {f"batch table: {operator}": operator for operator in (*RULES, *LINEAR)}
    assert len(operators) > 500
    assert [name for name, found in operators.items() if isinstance(found, MissingOperator)] == []


def test_operators_are_those_of_pytorch():
    assert aten.mm.default is torch.ops.aten.mm.default
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert aten.add.packet is torch.ops.aten.add
    assert torch.equal(aten.neg(torch.ones(2)), -torch.ones(2))


@pytest.mark.parametrize("name", ["gone.default", "gone.packet", "mm.gone"])
def test_a_missing_operator_is_found_nowhere_and_named_where_it_is_called(name):
    packet, overload = name.split(".")
    operator = getattr(getattr(aten, packet), overload)
    assert isinstance(operator, MissingOperator)
    assert operator not in {torch.ops.aten.mm.default, torch.ops.aten.mm}
    with pytest.raises(IpuError, match=rf"has no operator aten\.{name}"):
        operator(torch.ones(2))
