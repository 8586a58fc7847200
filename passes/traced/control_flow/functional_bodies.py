"""Make functional graphs of Python functions, which loops and branches name as their bodies.

A body writes nothing, holds no constant, and its results are dense, in memory of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.private.aot import export_joint
from ipu_dynamo.capture.private.tracing import fake_mode, outside_modes
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.traced.control_flow.cut_body import describe_body
from ipu_dynamo.program.ir.function import body_of

_MOST_NUMBERS = 32  # different ones, in a constant that a body computes
Run = Callable[..., Sequence[Tensor]]


def functional(run: Run, likes: Sequence[Tensor]) -> Body:
    """Return a body that computes the same as `run`, for dense tensors like these."""
    graph = exported(run, [(like, False) for like in likes])
    joint = describe_body(graph)
    joint.output_node.args = (tuple(joint.returned),)
    return _body(graph)


def _body(module: fx.GraphModule) -> Body:
    """Make a body of a graph, without copies of dense results."""
    graph = module.graph
    returned = []
    for node in graph.output_node().args[0]:  # type: ignore[union-attr]
        assert isinstance(node, fx.Node)
        source = node.args[0]
        copies = node.target is aten.clone.default and isinstance(source, fx.Node)
        dense = copies and source.meta["val"].is_contiguous()  # type: ignore[union-attr]
        returned.append(source if dense else node)
    output = graph.output_node()
    output.args, output.meta = (tuple(returned),), {"val": None}
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    module.recompile()
    return body_of(module)


def exported(run: Run, likes: Sequence[tuple[Tensor, bool]]) -> fx.GraphModule:
    """The functional graph of `run`, joint where a tensor requires a gradient."""
    mode = fake_mode()
    with outside_modes(), torch.inference_mode(False):
        with mode:
            examples = [
                torch.empty(
                    [int(size) for size in like.shape], dtype=like.dtype, device=like.device
                ).requires_grad_(wanted)
                for like, wanted in likes
            ]
        with torch.set_grad_enabled(any(wanted for _, wanted in likes)):
            module = export_joint(_Copying(run), examples, mode)
    hold_bodies(module.graph)
    _write_constants(module)
    return module


def _write_constants(module: fx.GraphModule) -> None:
    """Compute a body's constants, such as `torch.tensor(0.5)`: a body has no variables."""
    constants = set()
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = getattr(module, str(node.target))
        if not isinstance(value, Tensor):
            continue
        with outside_modes():
            numbers = value.flatten().tolist()
        if len(set(numbers)) > 1 and len(numbers) > _MOST_NUMBERS:
            raise CompileError(
                f"the body of a loop or branch holds a constant of {len(numbers)} numbers",
                node=next(iter(node.users), node),
                hint="make it a buffer of the model, or an input",
                id="control-flow",
            )
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        with module.graph.inserting_before(node):
            if len(set(numbers)) < 2:
                full = [list(value.shape), *(numbers[:1] or [0])]
                constant = call(module.graph, aten.full.default, *full, origin=node, **options)
            else:
                parts = [
                    call(module.graph, aten.full.default, [], number, origin=node, **options)
                    for number in numbers
                ]
                flat = call(module.graph, aten.stack.default, parts, origin=node)
                shape = list(value.shape)
                constant = call(module.graph, aten.view.default, flat, shape, origin=node)
        for copy in [u for u in node.users if u.target is aten.lift_fresh_copy.default]:
            copy.replace_all_uses_with(constant)  # which is new in each iteration
            module.graph.erase_node(copy)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
        constants.add(str(node.target))
    for name in constants:  # a compiler would make inputs of a module's attributes
        delattr(module, name)


class _Copying(nn.Module):
    """Call a function; its results are dense, in their own memory."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = self.run(*tensors)
        return tuple(result.clone(memory_format=torch.contiguous_format) for result in results)
