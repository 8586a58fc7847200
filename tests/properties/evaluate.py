"""Run captures and parts on real tensors, to compare them before and after a pass."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, Capture, Joint, Traced, pytree
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.debug.stepping import apply_writes
from ipu_dynamo.errors import source_line
from ipu_dynamo.options import Options
from ipu_dynamo.passes import invariants
from ipu_dynamo.passes.joint.partition import accumulator
from ipu_dynamo.passes.levels import Partitioned, level_of
from ipu_dynamo.passes.pipeline import whole_step


def captured(model, data, options=None, *, training=True, before=None):
    """Trace `model` and run the passes of the pipeline up to, not including, the one `before`.

    Args:
        data: what the model is called with, by position or, in a dict, by name.
        before: name of the pass; None runs all up to the cut into parts.

    Returns:
        The capture, and the pass that comes next, or None.
    """
    data = pytree.tree_map_only(Tensor, lambda t: t.contiguous(), data)
    capture = trace(model, _arguments(model, data), training=training)
    done = []
    for one in whole_step(options or Options(), training=training):
        if one.name == (before or "Partition"):
            return capture, None if before is None else one
        capture = left_by(one, capture)
        done.append(one.name)
        invariants.check(capture, level_of(capture), done)
    raise AssertionError(f"there is no pass {before}")


def left_by(step, model):
    """The model that a pass leaves: the same one, or one of the next level."""
    result = step(model)
    return model if isinstance(result, bool) else result


def _arguments(model, data):
    by_name = isinstance(data, Mapping)
    return read_arguments(model, () if by_name else data, data if by_name else {})


def check(capture: Capture) -> None:
    """Assert what holds of a capture from its level's first passes on."""
    invariants.check(capture, level_of(capture), ("Differentiate", "LiftJointConstants"))


def bound_tensors(capture: Capture, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """A copy of the tensor of every placeholder."""
    held = {**capture.report.tensors, **inputs}
    return [
        held[role.name].detach().contiguous().clone().to(node.meta["val"].dtype)
        for node, role in capture.roles().items()
    ]


class _Recorder(fx.Interpreter):
    """Keep every node's value, and hold it against what its meta["val"] promises.

    Args:
        strict: strides must be the promised ones too.
    """

    def __init__(self, graph: fx.GraphModule, *, strict: bool = False) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, object] = {}
        self.strict = strict

    def run_node(self, n: fx.Node) -> object:
        result = self.values[n] = super().run_node(n)
        promised = n.meta.get("val")
        if isinstance(result, Tensor) and n.op != "output":
            assert promised is not None, f"%{n.name} has no value"
            assert promised.dtype == result.dtype, f"%{n.name}: {promised.dtype}, {result.dtype}"
            assert promised.shape == result.shape, f"%{n.name}: {promised.shape}, {result.shape}"
            schema = getattr(n.target, "_schema", None)
            written = schema is not None and schema.is_mutable
            if self.strict and not written:
                layouts = [
                    [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
                    for t in (promised, result)
                ]
                assert layouts[0] == layouts[1], f"%{n.name}: strides {layouts}"
        return result


def evaluate(capture: Capture, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `capture` computes on copies of its tensors: by role, `value 0`, `gradient fc.weight`.

    `final NAME` is what a placeholder holds afterwards. A capture whose loss is known but that is
    not differentiated yet is differentiated by autograd.
    """
    roles = list(capture.roles().values())
    tensors = bound_tensors(capture, inputs)
    loss = capture.loss if isinstance(capture, Traced) else None
    differentiate = capture.training and isinstance(capture, Traced)
    for tensor, role in zip(tensors, roles, strict=True):
        tensor.requires_grad_(differentiate and role.trainable)
    leaves = dict(zip((role.name for role in roles), tensors, strict=True))
    recorder = _Recorder(capture.graph)
    with torch.set_grad_enabled(differentiate):
        results = recorder.run(*tensors, enable_io_processing=False)
        if loss is not None:
            recorder.values[loss].sum().backward()
    found = {f"final {name}": tensor.detach() for name, tensor in leaves.items()}
    found |= {
        f"gradient {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None
    }
    for role, result in zip(capture.outputs, results, strict=True):
        if result is not None:
            kind = "final" if role.kind == "mutation" else role.kind
            found[f"{kind} {role.name}"] = result.detach()
    return dict(sorted(found.items()))


def evaluate_parts(
    capture: Joint, partitioned: Partitioned, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What the parts compute one after the other, in the form of `evaluate`."""
    names = [role.name for role in capture.placeholders]
    values = dict(zip(names, bound_tensors(capture, inputs), strict=True))
    values[ACCUMULATION_WEIGHT] = torch.tensor(1.0)
    trained = [name for part in partitioned.parts for name in part.gradients]
    values |= {accumulator(name): torch.zeros_like(values[name]) for name in trained}
    with torch.no_grad():
        for part in partitioned.parts:
            arguments = [values[name] for name in part.inputs]
            results = _Recorder(part.graph, strict=True).run(*arguments)
            values |= dict(zip(part.outputs, results, strict=True))
            apply_writes(part, values)
    found = {f"final {name}": values[name] for name in names}
    found |= {f"final {name}": values[new] for name, new in partitioned.changed.items()}
    found |= {f"gradient {name}": values[accumulator(name)] for name in trained}
    kinds = [role.name for role in capture.outputs if role.kind == "value"]
    results = zip(kinds, partitioned.returned, strict=True)
    found |= {f"value {name}": values[value] for name, value in results}
    return dict(sorted(found.items()))


def named_inputs(model, data) -> dict[str, Tensor]:
    """The tensors of a call by the names that captures give them."""
    arguments = _arguments(model, data)
    return dict(zip(arguments.tensor_names, arguments.tensors, strict=True))


def lines_of(nodes: Sequence[fx.Node]) -> set[str]:
    """The source lines that `nodes` have."""
    return {source_line(n) for n in nodes if n.meta.get("stack_trace")}
