"""Look at a compiled model, whatever compiled it.

Dynamo keeps compiled graphs by code, not by object. Models of one class have their graphs in
common, and each of them shows all. Errors are shown with the object that met them only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ipu_dynamo.capture.private.failed_frames import FailedFrame
from ipu_dynamo.errors import InputError
from ipu_dynamo.inspection.graph_entry import GraphEntry, entry_of
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.inspection.private.dynamo_programs import CompiledFrames, unwrapped
from ipu_dynamo.inspection.remark import Remark

_RNN = "torch._dynamo.config.allow_rnn = True lets it capture recurrent layers"


def inspect(x: Any) -> Inspection:
    """Say what became of a model, without compiling it, running a step, or drawing a number.

    Args:
        x: a function or module of `torch.compile(backend="ipu")`, wrapped or not; what
            `compile_training`, `compile_inference` or `load` returned; an executor of poptorch; a
            Keras model in the scope of a strategy.

    Returns:
        Its programs, cut and reasons. Without a program it says
        "not compiled yet; call it, or `explain(x, *inputs)`".

    Raises:
        InputError: it is nothing that can be compiled.
    """
    if (give := getattr(type(x), "__ipu_inspect__", None)) is not None:
        seen: Inspection = give(x)
        return seen
    if not callable(x) or isinstance(x, type):
        what = (
            f"the class {x.__name__}"
            if isinstance(x, type)
            else f"an object of class {type(x).__name__}"
        )
        raise InputError(
            f"inspect takes a compiled model, and not {what}",
            hint="give a function, a module, or what compile_training or load returned",
        )
    return captured(x)


def captured(x: Any) -> Inspection:
    """Inspect the graphs that `torch.compile` has made of a function or module so far."""
    frames = CompiledFrames(x)
    model, own = unwrapped(x), []
    for run, shared in frames.callables.items():
        graph = entry_of(run)
        if graph and (not isinstance(model, nn.Module) or _fits(graph, model, shared=shared)):
            own.append(graph)
    return of_graphs(title_of(model), own, frames.failures)


def title_of(model: Any) -> str:
    """The title of a function or module."""
    name = type(model).__name__ if isinstance(model, nn.Module) else None
    return f"torch.compile of {name or getattr(model, '__name__', type(model).__name__)}"


def of_graphs(
    title: str, graphs: Sequence[GraphEntry], failures: Sequence[FailedFrame]
) -> Inspection:
    """Put together what became of a model.

    Args:
        failures: why Dynamo gave parts of the model up.
    """
    graphs = sorted(graphs, key=lambda graph: graph.number)
    remarks = [remark for graph in graphs for remark in graph.remarks]
    known = {remark.text for remark in remarks}
    remarks += [
        Remark("not captured", failure.reason, failure.where)
        for failure in failures
        if failure.reason not in known
    ]
    remarks = [replace(remark, text=_with_hint(remark.text)) for remark in remarks]
    programs = tuple(entry for graph in graphs for entry in graph.programs)
    calls = [call for graph in graphs for call in graph.last_calls]
    last = max(range(len(programs)), key=lambda place: (calls[place], place), default=None)
    return Inspection(
        title,
        programs=programs,
        program=None if last is None else programs[last],
        reasons=tuple(dict.fromkeys(remarks)),
        graphs=tuple(graphs),
        passes=tuple(of for graph in graphs for of in graph.passes),
        settings=graphs[-1].settings if graphs else (),
    )


def _fits(graph: GraphEntry, model: nn.Module, *, shared: bool) -> bool:
    """Whether a graph may be one of this model: its parameters and buffers have the same shapes.

    Args:
        shared: it was captured from code that all modules of PyTorch's classes have in common.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    if shared and (graph.root != type(model).__name__ or not graph.shapes.keys() <= shapes.keys()):
        return False
    return all(shapes.get(name, shape) == shape for name, shape in graph.shapes.items())


def _with_hint(reason: str) -> str:
    known = "RNN, GRU, or LSTM" in reason and "allow_rnn" not in reason
    return f"{reason} ({_RNN})" if known else reason
