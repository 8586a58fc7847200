"""Name everything that decides the program of a traced model, for the cache of programs."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.capture.private.tracing import is_fake
from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.control_flow import FLOW, control_flow_op
from ipu_dynamo.ops.library.host_call import host_call
from ipu_dynamo.ops.marks.inner_gradients import hook_op
from ipu_dynamo.ops.marks.markers import autograd_function_op
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.private.node_meta import NOTES
from ipu_dynamo.options import Options
from ipu_dynamo.passes.manager import WITHOUT
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.tune.machine_name import machine_name
from ipu_dynamo.version import __version__

_NAMESPACES = frozenset({"aten", "prims", "ipu"})  # whose operators the versions name
_PYTHON = frozenset({autograd_function_op, hook_op, host_call})  # of others
_IGNORED = NOTES | {FLOW}  # all other entries of meta are part of the key; bodies follow their node


def program_key(
    capture: Traced,
    options: Options,
    groups: Sequence[UpdateGroup],
    devices: Sequence[torch.device],
    **more: object,
) -> str | None:
    """A digest of graph, shapes, constants, options, devices and versions; never of weights.

    Integers that the model has may become constants, so their values count.

    None if something in the graph has no text: its effect is not known.

    Args:
        capture: fresh from tracing.
        more: all other inputs of the passes. An input that is missing here makes the key wrong.
    """
    try:
        parts = [
            *_lines(capture),
            repr(capture.training),
            repr([_group(group) for group in groups]),
            repr([digest(t) for t in capture.report.tensors.values() if not t.is_floating_point()]),
            repr(of_program(options)),
            repr([str(device) for device in devices]),
            repr(sorted(more.items())),
            repr(_settings()),
            _sources(),
        ]
    except ValueError:
        return None
    return sha256("\n".join(parts).encode()).hexdigest()


def _lines(capture: Traced) -> Iterator[str]:
    """A text of all operators of a capture, with the bodies of loops and branches after them.

    Raises:
        ValueError: something in it has no text.
    """
    nodes = list(capture.graph.graph.nodes)
    numbers = {node: str(index) for index, node in enumerate(nodes)}
    for node in nodes:
        yield _node(node, capture, numbers)
        if (flow := node.meta.get(FLOW)) is not None:
            assert isinstance(flow, ControlFlow)
            yield repr((flow.kind, flow.carried, flow.scanned, flow.count, flow.where))
            for body in flow.bodies:
                yield from _lines(body)
    yield repr(capture.placeholders)
    yield repr(capture.outputs)


def _group(group: UpdateGroup) -> tuple[object, ...]:
    """A group of the optimiser, without its numbers."""
    dtypes = group.accumulator_dtype, sorted(group.accumulator_dtypes.items())
    return str(group.rule), group.parameters, group.clip, dtypes


def of_program(options: Options) -> Options:
    """`options` without those that only this process has."""
    return replace(
        options,
        seed=None,
        workers=None,
        program_cache=None,
        program_cache_limit=0,
        check_compiled="auto",
        start="auto",
        enforce_memory=None,
        progress=True,
        record=None,
        mesh=None,
    )


def _node(node: fx.Node, capture: Traced, numbers: dict[fx.Node, str]) -> str:
    """All of a node that a program depends on.

    Raises:
        ValueError: something in it has no text.
    """
    text = partial(write, name_of=numbers.__getitem__)
    marks = {key: value for key, value in node.meta.items() if key not in _IGNORED}
    target = _target(node, capture)
    value = _value(node.meta.get("val"))
    # the handle of a loop is of this process
    args = node.args[:1] if node.target is control_flow_op else node.args
    arguments = text((tuple(args), dict(node.kwargs)))
    return f"{node.name} {value} {target} {arguments} {text(marks)} {source_line(node)}"


def _target(node: fx.Node, capture: Traced) -> str:
    if node.op == "get_attr":
        held = capture.graph
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if not isinstance(held, Tensor) or is_fake(held):
            raise ValueError("a graph in the graph")
        name, _ = capture.report.attributes.get(id(held), ("", None))
        return f"constant {name} {digest(held)}"
    if isinstance(node.target, str):
        return f"{node.op} {node.target}"
    if isinstance(node.target, OpOverload):
        if node.target.namespace not in _NAMESPACES or node.target in _PYTHON:
            raise ValueError("an operator of others")
        return str(node.target)
    module = getattr(node.target, "__module__", None) or ""
    if module.partition(".")[0] not in ("torch", "_operator", "builtins", "math"):
        raise ValueError("Python of others")
    return f"{module}.{getattr(node.target, '__qualname__', node.target)}"


def _value(value: Any) -> str:
    """The layout of a node's value, or of several."""
    if isinstance(value, Tensor):
        return str(Layout.of(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return write(value)


def _settings() -> tuple[object, ...]:
    """The settings of the process and of PyTorch that passes may depend on."""
    cuda = torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return (
        os.environ.get(WITHOUT),
        (__version__, torch.__version__, torch.version.git_version),
        machine_name(),
        attention,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


@cache
def _sources() -> str:
    """A digest of which files this package consists of: another version has others."""
    root = Path(__file__).parents[2]
    hashed = sha256()
    for folder, _, files in sorted(os.walk(root, followlinks=True)):
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(folder, name).stat()
                hashed.update(f"{folder}/{name} {file.st_size} {file.st_mtime_ns}\n".encode())
    return hashed.hexdigest()
