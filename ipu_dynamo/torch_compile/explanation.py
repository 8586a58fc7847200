"""Explain the program that a model would have, without changing the model."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from ipu_dynamo.capture.private.dynamo import skipped_frames
from ipu_dynamo.capture.private.failed_frames import FailedFrame, collected_failures
from ipu_dynamo.capture.private.tracing import pytree
from ipu_dynamo.errors import InputError, OptionError
from ipu_dynamo.inspection.inspect_model import inspect, of_graphs, title_of
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.inspection.private.dynamo_programs import (
    CompiledFrames,
    compiled_anew,
    options_of,
    unwrapped,
)
from ipu_dynamo.inspection.private.version_counters import (
    check_versions_can_be_set,
    set_versions,
)
from ipu_dynamo.progress import begin, job
from ipu_dynamo.torch_compile.backend_options import BackendOptions
from ipu_dynamo.torch_compile.compile_graph import compile_readably
from ipu_dynamo.torch_compile.graph_record import GraphRecord
from ipu_dynamo.whole_step.lowering import model_name


def explain(
    x: Any,
    *inputs: Any,
    options: BackendOptions | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Inspection:
    """Describe the program of a model; without one, the program for these inputs.

    No step runs. Through `torch.compile` the forward pass runs once, on copies of the inputs;
    parameters, buffers and attributes of the model and torch's generator are put back.

    Args:
        x: as `inspect` takes it; or a module or a function on tensors.
        inputs: the positional arguments that it is called with.
        options: as `torch.compile(options=...)` takes them; with options it is compiled anew.
        kwargs: the keyword arguments that it is called with.

    Raises:
        CompileError: the model cannot be compiled, as a call would say.
        OptionError: it has options of its own.
    """
    if (give := getattr(type(x), "__ipu_explain__", None)) is not None:
        if options is not None:
            raise OptionError("the model is compiled with options of its own; leave options out")
        explained: Inspection = give(x, inputs, kwargs)
        return explained
    seen = inspect(x)
    if seen.programs and options is None:
        return seen
    given = options_of(x) if options is None else options
    with job(f"explaining {model_name(unwrapped(x))}", show=BackendOptions.read(given).progress):
        begin("tracing")
        return _explained(x, inputs, kwargs, given)


def _explained(
    x: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], options: object
) -> Inspection:
    records: list[GraphRecord] = []
    hold: Callable[[Iterable[Any]], None]

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        records.append(GraphRecord())
        run = compile_readably(gm, examples, options, record=records[-1])

        def run_graph(*arguments: Any) -> Any:
            hold(arguments)  # they include tensors that a function closes over
            return run(*arguments)

        return run_graph

    own, named = _copies(inputs), _copies(kwargs)
    if any(map(_is_lazy, _modules_of(x, set()))):  # the call gives their parameters a shape
        x = _copied(x)
    with (
        _left_as_it_was(x) as hold,
        skipped_frames() as skipped,
        collected_failures() as failures,
        warnings.catch_warnings(action="ignore"),  # the explanation has their text
        compiled_anew(x, backend) as run,
    ):
        run(*own, **named)
    failures += CompiledFrames(x).failures
    placed = {failure.reason for failure in failures}
    reasons = (text.partition("\n")[0] for text in skipped)
    failures += [FailedFrame("", reason) for reason in reasons if reason not in placed]
    return of_graphs(title_of(unwrapped(x)), [record.entry() for record in records], failures)


def _is_lazy(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(is_lazy, own))


def _copied(x: Any) -> nn.Module:
    model = unwrapped(x)
    if not isinstance(model, nn.Module):
        raise InputError(
            "a lazy module of the function has no shapes yet, and explain changes no module",
            hint="call it once before, or explain the module itself",
        )
    return copy.deepcopy(model)


def _copies(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )


@contextmanager
def _left_as_it_was(model: object) -> Iterator[Callable[[Iterable[Any]], None]]:
    """Undo a call's effects on tensors, attributes and torch's generator, also if it fails.

    The tensors count as not written, for a pending backward pass that has kept them.

    Yields:
        A function that adds tensors from outside the modules.
    """
    check_versions_can_be_set()
    modules = [*_modules_of(model, set())]
    before: dict[int, tuple[Tensor, Tensor, int | None]] = {}

    def hold(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and not is_lazy(value) and id(value) not in before:
                version = None if value.is_inference() else value._version
                before[id(value)] = value, value.detach().clone(), version

    for module in modules:
        hold((*module.parameters(recurse=False), *module.buffers(recurse=False)))
    own = [vars(module) for module in modules]
    inside = [value for names in own for value in names.values()]  # also registered tensors
    attributes = [(of, of.copy()) for of in (*own, *inside) if type(of) in (dict, list, set)]
    try:
        with torch.random.fork_rng():
            yield hold
    finally:
        for now, then in attributes:
            now.clear()
            now.extend(then) if isinstance(now, list) else now.update(then)
        with torch.no_grad():
            for tensor, old, _ in before.values():
                if _differ(tensor, old):
                    tensor.copy_(old)
        set_versions({tensor: v for tensor, _, v in before.values() if v is not None})


def _modules_of(x: Any, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a call of `x` may change, as far as `x` names them.

    These are `x` itself, the object of a method, and modules in its closure or its globals, also in
    a list or a dictionary.
    """
    x, inside = unwrapped(x), list[Any]()
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, nn.Module):
        yield x
        inside = [*x.children()]
    elif isinstance(x, MethodType):
        owner = x.__self__
        inside = [x.__func__, owner, *(vars(owner).values() if hasattr(owner, "__dict__") else ())]
    elif isinstance(x, partial):
        inside = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, FunctionType) and not x.__module__.startswith("torch"):
        cells = (cell for cell in x.__closure__ or () if cell != CellType())
        inside = [cell.cell_contents for cell in cells]
        inside += [x.__globals__.get(name) for name in x.__code__.co_names]
    elif isinstance(x, list | tuple):
        inside = [*x]
    elif isinstance(x, dict):
        inside = [*x.values()]
    kinds = (nn.Module, MethodType, partial, FunctionType, list, tuple, dict)
    for value in inside:
        if isinstance(value, kinds):
            yield from _modules_of(value, seen)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether an element differs; a NaN is like any other."""
    return bool(((one != other) & ~(one.isnan() & other.isnan())).any())
