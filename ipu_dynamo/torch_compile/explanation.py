"""Explain what becomes of a model, without changing it, for both front ends."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.private.dynamo import skipped_frames
from ipu_dynamo.capture.private.tracing import pytree
from ipu_dynamo.capture.unplaceable import Unplaceable
from ipu_dynamo.errors import OptionError, source_line
from ipu_dynamo.inspection.inspection import Inspection, Setting
from ipu_dynamo.passes.manager import PassRun, summary
from ipu_dynamo.program import Decision, HostProgram, Program, Repeat
from ipu_dynamo.progress import begin, job
from ipu_dynamo.runtime.engines.engines import ENGINE
from ipu_dynamo.torch_compile.backend_options import BackendOptions
from ipu_dynamo.torch_compile.compile_graph import GraphRecord, compile_readably
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.lowering import model_name


@dataclass(frozen=True, slots=True)
class Break:
    """Where PyTorch ended a graph, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block went; `operators` are those of the captured graph in it."""

    block: str
    stage: int
    ipu: int
    operators: int

    def __str__(self) -> str:
        return f"{self.block} -> stage {self.stage} -> ipu{self.ipu}  ({self.operators} operators)"


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """One captured graph.

    Args:
        operators: how many calls it holds.
        first_line: where its first operator is in the model.
        ended_by: the break at its end, or None.
        blocks: in the order of the model.
        passes: what each pass did, in order, to the `captured` graph and to those that AOTAutograd
            made of it: `forward` and `backward`, or `inference`.
        programs: what was compiled, in the order in which it runs.
        unplaceable: why PyTorch runs the graph itself, when it does.
    """

    operators: int
    first_line: str
    ended_by: Break | None
    blocks: tuple[BlockPlace, ...]
    passes: tuple[tuple[str, tuple[PassRun, ...]], ...]
    programs: tuple[Program, ...]
    unplaceable: tuple[Unplaceable, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.operators} operators from {self.first_line}"]
        lines += [
            f"  cannot be placed: {_first_line(str(problem))}" for problem in self.unplaceable
        ]
        lines += [f"  block {place}" for place in self.blocks]
        lines += [f"  {kind}: {summary(runs)}" for kind, runs in self.passes]
        for program in self.programs:
            count = max((i.count for i in program.walk() if isinstance(i, Repeat)), default=1)
            times = f", for each of {count} micro-batches" if count > 1 else ""
            lines.append(f"  {_first_line(str(program))}{times}")
        if self.ended_by is not None:
            lines.append(f"  ends at a graph break: {self.ended_by}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a model; `str` makes a report of it.

    Args:
        graphs: in the order of their capture.
        skipped: reasons why PyTorch ran parts of the model itself, without a graph.
        settings: options in force.
        matmuls: which library computes the matmuls of a micro-batch; with the engine
            `inductor`, which asks.
        convolutions: the same for small convolutions, one by one.
    """

    graphs: tuple[GraphExplanation, ...]
    skipped: tuple[str, ...]
    settings: tuple[Setting, ...]
    matmuls: tuple[Decision, ...] = ()
    convolutions: tuple[Decision, ...] = ()

    @property
    def breaks(self) -> tuple[Break, ...]:
        return tuple(graph.ended_by for graph in self.graphs if graph.ended_by is not None)

    def __str__(self) -> str:
        count = len(self.graphs)
        programs = sum(len(graph.programs) for graph in self.graphs)
        lines = [
            f"{count} graph{'s' * (count != 1)}, {len(self.breaks)} breaks, {programs} programs"
        ]
        for number, graph in enumerate(self.graphs):
            first, *rest = str(graph).split("\n")
            lines += [f"graph {number}: {first}", *rest]
        if self.skipped:
            lines += ["not captured, so PyTorch runs it itself:"]
            lines += [f"  {reason}" for reason in self.skipped]
        if self.matmuls:
            lines += ["matmuls:", *(f"  {one.about}" for one in self.matmuls)]
        if self.convolutions:
            lines += ["small convolutions:", *(f"  {one.about}" for one in self.convolutions)]
        return "\n".join([*lines, "options:", *(f"  {one}" for one in self.settings)])


@overload
def explain(model: CompiledModel, *inputs: Any, **kwargs: Any) -> Inspection: ...


@overload
def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: BackendOptions | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation: ...


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: BackendOptions | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation | Inspection:
    """Compile `model` for these inputs and say what became of it.

    The model runs once. Its parameters and buffers, the inputs and torch's generator are as before
    afterwards. Of what `compile_training` or `compile_inference` returned nothing runs.

    Args:
        model: a module or a function on tensors, or a `CompiledModel`, which has its own options.
        inputs, kwargs: what it is called with.
        options: as `torch.compile(options=...)` takes them.

    Raises:
        CompileError: the model cannot be compiled, as `torch.compile` would say.
    """
    if isinstance(model, CompiledModel):
        if options is not None:
            raise OptionError("the model is compiled with options of its own; leave options out")
        return model.__ipu_explain__(inputs, kwargs)
    read = BackendOptions.read(options)
    with job(f"explaining {model_name(model)}", show=read.progress):
        begin("tracing")
        return _explained(model, inputs, kwargs, options, read)


def _explained(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: BackendOptions | Mapping[str, Any] | None,
    read: BackendOptions,
) -> Explanation:
    """What became of a model; arguments as in `explain`."""
    records: list[GraphRecord] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        records.append(GraphRecord())
        return compile_readably(gm, examples, read, record=records[-1])

    given, named = _copies(inputs), _copies(kwargs)
    with _left_as_it_was(model), skipped_frames() as skipped, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is in the explanation
        torch.compile(model, backend=backend)(*given, **named)
    graphs = tuple(map(_describe, records))
    hosts = [host for record in records for host in record.hosts]
    known = {graph.ended_by.reason for graph in graphs if graph.ended_by is not None}
    return Explanation(
        graphs=graphs,
        skipped=tuple(text for text in (_first_line(s) for s in skipped) if text not in known),
        settings=tuple(_settings(options, read, {record.engine for record in records} - {""})),
        matmuls=_decided(hosts, "PrepackWeights", "ChooseMatmuls"),
        convolutions=_decided(hosts, "UnfoldConvolutions"),
    )


def _decided(hosts: Sequence[HostProgram], *passes: str) -> tuple[Decision, ...]:
    """What passes decided for the operators of a micro-batch, equal ones together."""
    counts: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], Decision] = {}
    for host in hosts:
        for call in host.runs.calls:
            for decision in host.decisions:
                if decision.by in passes and decision.function == call.function:
                    key = decision.by, decision.of, decision.choice
                    counts[key] += decision.count
                    first.setdefault(key, decision)
    return tuple(replace(first[key], count=count) for key, count in counts.items())


def _describe(record: GraphRecord) -> GraphExplanation:
    lines = [line for line in map(source_line, record.operators) if line != "unknown source"]
    return GraphExplanation(
        operators=len(record.operators),
        first_line=lines[0] if lines else "no line of the model",
        ended_by=Break(*record.ended_by) if record.ended_by else None,
        blocks=tuple(BlockPlace(*place, count) for place, count in record.blocks.items()),
        passes=tuple((kind, tuple(runs)) for kind, runs in record.passes.items()),
        programs=tuple(record.programs),
        unplaceable=record.unplaceable,
    )


def _settings(given: object, read: BackendOptions, engines: set[str]) -> Iterator[Setting]:
    """Every option with its value in force, and whether the caller or somebody else chose it."""
    default = BackendOptions()
    for name in (f.name for f in fields(read)):
        value = getattr(read, name)
        named = isinstance(given, Mapping) and name in given
        by = "given" if named or value != getattr(default, name) else "default"
        if name == "engine" and value == "auto" and engines:
            (value,) = engines
            by = f"environment variable {ENGINE}" if os.environ.get(ENGINE) else "found here"
        if name == "strategy" and value != read.core().strategy:
            value, by = read.core().strategy, f"{by}, made pipelined by micro_batches"
        yield Setting(name, value, by)


def _copies(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )


@contextmanager
def _left_as_it_was(model: object) -> Iterator[None]:
    """Put back what a call changes in a module: parameters, buffers, torch's random numbers."""
    owner = getattr(model, "__self__", model)
    held = [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []
    before = [tensor.detach().clone() for tensor in held]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for tensor, old in zip(held, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.copy_(old)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
