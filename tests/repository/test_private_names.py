"""Check on syntax trees which names of PyTorch and Keras a folder uses."""

from inspect import getsource

import functorch.compile
import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.partitioners import default_partition
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import checkpoint

from ipu_dynamo.ops.private.node_meta import (
    GRADIENT_SUM,
    INPUTS,
    ONLY_BACKWARD_TAG,
    TAG,
    TANGENTS,
    TORCH_FN,
)
from tests.repository.private_names import (
    KEPT,
    LINKS,
    ROOT,
    SOURCES,
    agreements,
    attributes,
    files,
    is_fx,
    is_private,
    names,
    private_attributes,
    words,
)


def wrong(folder, is_wrong=lambda name: True, look=names):
    return [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files(folder)
        if "private" not in file.parts
        for line, name in look(file.read_text())
        if is_wrong(name)
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_private_names_of_pytorch_are_in_folders_of_their_own(source):
    assert wrong(ROOT / source, is_private) == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("look", [attributes, agreements])
def test_so_are_private_attributes_and_agreements_by_string(source, look):
    assert wrong(ROOT / source, look=look) == []


@pytest.mark.parametrize("source", SOURCES)
def test_operators_of_pytorch_are_named_so_that_they_may_be_missing(source):
    found = wrong(ROOT / source, lambda name: name.startswith("torch.ops.aten"))
    assert [line for line in found if not line.startswith("ipu_dynamo/ops/aten.py:")] == []


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
        ("from torch import nn\nnn.Module._named_members", True, False),
        ("from torch import nn\nnn.Module._version", False, False),
        ("import torch.fx as graphs\ngraphs._symbolic_trace", True, True),
        ("torch.__version__", False, False),
    ],
)
def test_the_check_sees(line, private, fx):
    assert any(is_private(name) for _, name in names(line)) == private
    assert any(is_fx(name) for _, name in names(line)) == fx


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("node.target._schema.arguments", ["node.target._schema"]),
        ("node._rename('x')", ["node._rename"]),
        ("getattr(target, '_schema', None)", ["'_schema'"]),
        ("self._schema = 1", []),
        ("aten._conj(x)", []),
        ("module._parameters", []),
        ("'_schema'", []),
    ],
)
def test_the_check_sees_attributes(line, found):
    assert [name for _, name in attributes(line)] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("node.meta['desc']", ["meta['desc']"]),
        ("node.meta.get('custom')", ["meta['custom']"]),
        ("'new_key' in node.meta", ["meta['new_key']"]),
        ("node.meta = {'seq_nr': 1}", ["meta['seq_nr']", "'seq_nr'"]),
        ("key = 'partitioner_tag'", ["'partitioner_tag'"]),
        ("name.startswith('primals_1')", ["'primals_1'"]),
        ("f'tangents_{i}'", ["'tangents_'"]),
        ("node.meta['val'], node.meta['ipu.stage'], node.meta[STAGE]", []),
        ("options['custom']", []),
    ],
)
def test_the_check_sees_agreements(line, found):
    assert [name for _, name in agreements(line)] == found


def test_no_name_is_kept_that_nobody_uses():
    texts = [file.read_text() for source in SOURCES for file in files(ROOT / source)]
    assert [name for name in KEPT if not any(name in text for text in texts)] == []
    assert {*KEPT} <= private_attributes()


class Annotated(nn.Module):
    """A layer that is called twice, in one annotated block, and a block to compute again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with fx.traceback.annotate({"key": 1}):
            h = self.layer(self.layer(x))
        return checkpoint(torch.sin, h, use_reentrant=False).sum()


def test_graphs_of_pytorch_have_the_agreements():
    graphs = []

    def partition(joint, *args, **kwargs):
        graphs.append(joint.graph)
        return default_partition(joint, *args, **kwargs)

    def backend(module, examples):
        graphs.append(module.graph)
        compiler = functorch.compile.make_boxed_compiler(lambda graph, _: graph.forward)
        return aot_autograd(fw_compiler=compiler, partition_fn=partition)(module, examples)

    torch.compile(Annotated(), backend=backend)(torch.ones(2, 4)).backward()
    nodes = [node for graph in graphs for node in graph.nodes]
    found = {key for node in nodes for key in node.meta}
    found |= {tag for node in nodes if (tag := node.meta.get(TAG))}
    found |= {name for name in (INPUTS, TANGENTS) for node in nodes if node.name == f"{name}1"}
    found |= {GRADIENT_SUM for n in nodes if GRADIENT_SUM in (n.meta.get("stack_trace") or "")}
    read_only = {ONLY_BACKWARD_TAG: partitioners, TORCH_FN: proxy_tensor}
    found |= {word for word, module in read_only.items() if f'"{word}"' in getsource(module)}
    assert {*words().values()} <= found


def test_every_module_is_looked_at():
    looked_at = {file for source in SOURCES for file in files(ROOT / source)}
    assert {
        ROOT / "runtime/execute/executable.py",
        ROOT / "poptorch/executor/executor.py",
    } <= looked_at
    assert not any(file.is_relative_to(link) for file in looked_at for link in LINKS)
