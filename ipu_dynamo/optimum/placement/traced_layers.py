"""Trace a model once for the order in which its layers run, and for their costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo import blocks
from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.private.tracing import pytree
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.ops.marks.markers import begin_block
from ipu_dynamo.optimum.config import IPUConfig
from ipu_dynamo.optimum.placement.block_placement import place
from ipu_dynamo.optimum.placement.find_layers import LayerList
from ipu_dynamo.optimum.serialized.serialize import Choice
from ipu_dynamo.options import Options, Strategy
from ipu_dynamo.passes.traced.stages.placement import computes
from ipu_dynamo.whole_step.measured_costs import measured_costs

Sample = tuple[Any, ...] | Mapping[str, Any]


def check_sample(sample: Any) -> None:
    """Raise TypeError unless these are arguments of a call; None is no sample."""
    if sample is not None and not isinstance(sample, tuple | Mapping):
        raise TypeError(
            "sample is the arguments of a call with one micro-batch, a tuple or a dictionary such "
            f'as (x,) or {{"x": x}}, and not a {type(sample).__name__}'
        )


class _Summed(nn.Module):
    """A model that returns one number, which training could minimise: the loss, or a sum.

    The added operators are in a block of their own, on IPU `own_ipu`.
    """

    def __init__(self, model: nn.Module, own_ipu: int) -> None:
        super().__init__()
        self.model, self.own_ipu = model, own_ipu

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.model(*args, **kwargs)
        blocks.begin("one number", self.own_ipu)
        loss = getattr(result, "loss", None)
        tensors = [loss] if loss is not None else pytree.tree_leaves(result)
        values = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
        total: Tensor = torch.stack([value.float().sum() for value in values]).sum()
        return total


@contextmanager
def _hooked(hooks: Sequence[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    """Have forward-pre-hooks for a while."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _trace(model: nn.Module, sample: Sample, *, training: bool) -> Traced:
    args = sample if isinstance(sample, tuple) else ()
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        return trace(model, read_arguments(model, args, kwargs), training=training)
    finally:
        for module, mode in modes:
            module.training = mode


def in_order_of_calls(
    model: nn.Module, lists: Sequence[LayerList], sample: Sample
) -> tuple[LayerList, ...]:
    """Lists of layers in the order in which a call first comes to them."""
    first: dict[str, None] = {}
    hooks = [
        (layer, lambda module, args, path=one.path: first.setdefault(path))
        for one in lists
        for layer in one.layers
    ]
    with _hooked(hooks):
        _trace(model, sample, training=False)
    order = list(first)
    return tuple(
        sorted(lists, key=lambda one: order.index(one.path) if one.path in first else len(order))
    )


def layer_seconds(
    model: nn.Module,
    lists: Sequence[LayerList],
    sample: Sample,
    config: IPUConfig,
    ipus: int,
) -> tuple[list[float], float]:
    """The time of each layer and the modules after it, and of modules that stay on IPU 0.

    The sum of results in place of a loss is not part of the model, and not counted.

    Args:
        config: its mode says whether the backward pass counts.
        ipus: so many share this machine's threads.
    """
    count = sum(len(one.layers) for one in lists)
    training = config.mode == "training"
    # Each layer is on an IPU of its own, so that blocks say what belongs to which.
    placed = place(model, lists, range(1, count + 1), Choice())
    hooks = [(begin.module, blocks.BlockStart(begin.name, begin.ipu)) for begin in placed.begins]
    with _hooked(hooks):
        capture = _trace(_Summed(model, count + 1), sample, training=training)
    owners = _take_markers(capture)
    core = config.to_core_options(for_inference=not training)
    options = Options(
        engine=core.engine,
        narrow=core.narrow,
        partials=core.partials,
        convolution_partials=core.convolution_partials,
        strategy=Strategy("pipelined", ipus=ipus),
    )
    costs = measured_costs(capture, options, loss=0 if training else None)
    seconds = [0.0] * (count + 2)
    for owner, (forward, backward) in zip(owners, costs, strict=True):
        seconds[owner] += forward + backward
    return seconds[1:-1], seconds[0]


def _take_markers(capture: Traced) -> list[int]:
    """Remove the marks of blocks from a traced model; the IPU of each of its operators."""
    owners, current = [], 0
    for node in list(capture.graph.graph.nodes):
        if node.target is begin_block:
            current = int(node.args[1])
            capture.graph.graph.erase_node(node)
        elif computes(node):
            owners.append(current)
    return owners
