"""Follow the memory of this computer through the micro-batches of a step, without computing.

The task of each stage pass runs on tensors that have a storage of known size and no contents, in
the order of the schedule. So storages live as long as they do in a step: views and copies that
share one count once, and a value ends where the task drops it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ipu_dynamo.errors import source_line
from ipu_dynamo.inspection.private.dispatch_mode import TorchDispatchMode
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import FakeTensorMode, pytree
from ipu_dynamo.program import Collective, HostProgram, Input, Receive
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.values import blocks
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.eager_code import running_node
from ipu_dynamo.runtime.engines.engines import eager_stage
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.host_io.host_streams import SentStream
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import bind_passes, failure_of
from ipu_dynamo.runtime.execute.tasks.task_code import Binding

# Losses that PyTorch's kernels sum up in the memory of their elements, which the result keeps.
_SUMMED_IN_PLACE = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """One operator, or a whole function that is machine code.

    Args:
        function: that is called.
        operator: name of the node; empty: all of the function.
        source: the user's line.
    """

    stage: int
    ipu: int
    micro_batch: int
    function: str
    operator: str = ""
    source: str = ""


@dataclass(slots=True)
class FollowedStorage:
    """Memory of values, from the step that makes it to the last one that it outlives.

    Args:
        made, last: places of steps; -1: before the first one.
        passed: the last step of the pass that makes it.
        is_value: it outlives the call that makes it.
    """

    name: str
    nbytes: int
    stage: int
    made: int
    reference: StorageWeakRef = field(repr=False)
    last: int = -1
    passed: int = -1
    is_value: bool = False
    is_stream: bool = False
    source: str = ""


def why_not_followed(host: HostProgram) -> str:
    """Why the memory of a program is not followed; empty if it can be."""
    if host.program.kind != "training" or host.program.order != "pipelined":
        return "only pipelines that train are followed"
    if host.fused is not None:
        return "a step and its update are one function"
    if host.deferred is not None:
        return "micro-batches run side by side, and their gradients are added later"
    if host.share is not None or host.program.replicas > 1:
        return "it has several replicas or ranks"
    loop = sections(host.runs).loop
    if any(isinstance(i, Collective) or i.fetches for i in loop) or sections(host.runs).before:
        return "it gathers or loads variables"
    inputs = (n for f in host.runs.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    if {node.meta["val"].device.type for node in inputs} - {"cpu"}:
        return "it has other devices than the CPU"
    return ""


def follow_memory(
    host: HostProgram, schedule: Schedule
) -> tuple[list[FollowedStep], list[FollowedStorage]]:
    """The steps of the micro-batches of a step, and the storages that they hold.

    Variables are left out: they are there all the time.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _Follower(host, schedule).follow()


class _Follower(TorchDispatchMode):
    """Notes steps and storages; as a mode, it sees each operator of a function not compiled."""

    def __init__(self, host: HostProgram, schedule: Schedule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host, self._schedule = host, schedule
        self.steps: list[FollowedStep] = []
        self.storages: list[FollowedStorage] = []
        self._live: dict[int, FollowedStorage] = {}  # by the address of the storage
        self._variables: set[int] = set()
        self._run = RunPass(0, 0, 0)
        self._call: tuple[str, fx.Graph] | None = None

    def follow(self) -> tuple[list[FollowedStep], list[FollowedStorage]]:
        program = self._host.runs
        registers = number_registers(program)
        receives = [i for i in sections(program).loop if isinstance(i, Receive)]
        batching = Batching.of(program, 1)
        kept = [[k for row in batching.kept(o) for k in row] for o in program.outputs]
        stages = {
            name: (recipe, self._watched(name, eager_stage(recipe), recipe.lowered.graph.graph))
            for name, recipe in self._host.recipes.items()
        }
        binding = Binding(
            program,
            registers,
            {registers[variable.name] for variable in program.variables},
            stages,
            failure_of(program),
            received={receive.result: place for place, receive in enumerate(receives)},
            sent={o.name: (place, not all(kept[place])) for place, o in enumerate(program.outputs)},
        )
        tasks = bind_passes(binding)
        blank: list[Any] = [None] * (max(registers.values(), default=-1) + 1)
        for variable in program.variables:
            tensor = _empty(variable.type, variable.strides)
            blank[registers[variable.name]] = tensor
            self._variables.add(_reference(tensor).cdata)
        streams = {
            stream.name: self._received(stream, batching.micro_batches) for stream in program.inputs
        }
        received = [streams[receive.stream] for receive in receives]
        sent: list[Any] = [
            _nobody_prints if output.printing else SentStream(flags, batching.micro_batches)
            for output, flags in zip(program.outputs, kept, strict=True)
        ]
        frames: dict[int, list[Any]] = {}
        last = len(self._schedule.passes) - 1
        for run in self._runs():
            frame = frames.setdefault(run.micro_batch, blank.copy())
            self._run, first = run, len(self.steps)
            tasks[run.index](frame, run.micro_batch, received, sent)
            self._end_pass(first)
            if run.index == last:
                del frames[run.micro_batch], frame
        return self.steps, self.storages

    def _runs(self) -> Iterator[RunPass]:
        """All passes, by their time; of several workers, as if each took its turn."""
        timed = self._schedule.timed()
        placed = [(run.cycle, worker, run) for worker, of in enumerate(timed.runs) for run in of]
        yield from (run for _, _, run in sorted(placed, key=lambda each: each[:2]))

    def _received(self, stream: Input, count: int) -> Sequence[Tensor]:
        if stream.source != "host":
            values = [_empty(stream.type) for _ in range(count)]
        else:
            shape = list(stream.type.shape)
            if shape:
                shape[stream.dim] *= count
            whole = _empty(TensorType(stream.type.dtype, tuple(shape)))
            values = [*blocks(whole, stream.dim, stream.outer, count)] if shape else [whole] * count
        for value in values:
            storage = self._note(value, stream.name)
            if storage is not None:
                storage.is_stream = True
        return values

    def _watched(self, name: str, stage: Stage, graph: fx.Graph) -> Stage:
        """Wrap a stage: note its operators, or its results only if it is compiled."""
        compiled = bool(self._host.recipes[name].compiled_parts)

        def run(arguments: list[Any]) -> Any:
            self._call = name, graph
            if compiled:
                results = stage(arguments)
                self._step("", "")
            else:
                with self:
                    results = stage(arguments)
            for node, value in zip(_returned(graph), results, strict=False):
                if isinstance(value, Tensor) and (storage := self._note(value, node)) is not None:
                    storage.is_value = True
            return results

        return run

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # asked by stand-ins of tensors only
            return results
        assert self._call is not None
        _, graph = self._call
        name = running_node(sys._getframe(1))
        node = next((node for node in graph.nodes if node.name == name), None)
        source = "" if node is None else source_line(node)
        self._step(name, source)
        for value in pytree.tree_leaves(results):
            if isinstance(value, Tensor):
                storage = self._note(value, name, source)
                if storage is not None and func in _SUMMED_IN_PLACE:
                    storage.nbytes = args[0].nbytes
        return results

    def _step(self, operator: str, source: str) -> None:
        assert self._call is not None
        of, micro_batch = self._schedule.passes[self._run.index], self._run.micro_batch
        function, _ = self._call
        step = FollowedStep(of.stage, of.ipu, micro_batch, function, operator, source)
        self.steps.append(step)
        self._look()

    def _look(self) -> None:
        """Note which storages the last step has outlived: those that are still there."""
        here = len(self.steps) - 1
        for address, storage in [*self._live.items()]:
            if storage.reference.expired():
                del self._live[address]
            else:
                storage.last = here

    def _end_pass(self, first: int) -> None:
        for storage in self.storages:
            if storage.made >= first and storage.passed < 0:
                storage.passed = len(self.steps) - 1

    def _note(self, value: Tensor, name: str, source: str = "") -> FollowedStorage | None:
        """The storage of a value; None: it is a variable's."""
        reference = _reference(value)
        address = reference.cdata
        if address in self._variables:
            return None
        known = self._live.get(address)
        if known is None or known.reference.expired():
            made = len(self.steps) - 1
            stage = self._schedule.passes[self._run.index].stage
            nbytes = value.untyped_storage().nbytes()
            known = FollowedStorage(name, nbytes, stage, made, reference, made, source=source)
            self._live[address] = known
            self.storages.append(known)
        return known


def _nobody_prints(micro_batch: int, value: Tensor) -> None:
    """Stand in for what prints values, which have none here."""


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _empty(type_: TensorType, strides: tuple[int, ...] | None = None) -> Tensor:
    if strides is not None:
        return torch.empty_strided(type_.shape, strides, dtype=type_.dtype)
    return torch.empty(type_.shape, dtype=type_.dtype)


def _returned(graph: fx.Graph) -> list[str]:
    results = graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    return [node.name if isinstance(node, fx.Node) else "" for node in results]
