"""Follow the memory of this computer through the micro-batches of a step, without computing.

The forms of the runtime run on tensors that have a storage of known size and no contents, the tasks
one after the other in the order of the schedule. So storages live as long as they do in a step:
views and copies that share one count once, and a value ends where the runtime drops it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ipu_dynamo.errors import source_line
from ipu_dynamo.inspection.call_stand_ins import in_turn, sent_streams, stored, values_of
from ipu_dynamo.inspection.kernel_storages import made_by, nbytes_of
from ipu_dynamo.ops.private.dispatch_mode import TorchDispatchMode
from ipu_dynamo.ops.private.graphs import FakeTensorMode
from ipu_dynamo.program import Call, Collective, HostProgram, Receive, UpdateFactors
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.liveness.follow_program import ROLE_OF
from ipu_dynamo.program.liveness.live_tensors import CATEGORY_OF, CategoryName
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes
from ipu_dynamo.runtime.engines.eager_code import running_node
from ipu_dynamo.runtime.engines.engines import EagerEngine, allocating_stage, eager_stage
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.runtime.execute.fused_step import FusedStep
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams, SentStream
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import NOBODY
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import stages_of

_FUSED_STEPS = (
    2  # the first one has no values of an earlier step; each later one is like the second
)


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """One operator, or a whole function that is machine code.

    Args:
        micro_batch: of a fused step, its number in the call.
        function: that is called.
        operator: name of the node; empty: all of the function.
        source: the user's line.
        turn: number of the task, in the order in which they run.
    """

    stage: int
    ipu: int
    micro_batch: int
    function: str
    operator: str = ""
    source: str = ""
    replica: int = 0
    turn: int = 0


@dataclass(slots=True)
class FollowedStorage:
    """Memory of values, from the step that makes it to the last one that it outlives.

    Args:
        made, last: places of steps; -1: before the first one.
        passed: the last step of the task that makes it.
        is_value: it outlives the call that makes it.
        category: if it does not follow from these.
    """

    name: str
    nbytes: int
    stage: int
    made: int
    reference: StorageWeakRef = field(repr=False)
    last: int = -1
    passed: int = -1
    is_value: bool = False
    category: CategoryName | None = None
    source: str = ""


def why_not_followed(host: HostProgram) -> str:
    """Why the memory of a program is not followed; empty if it can be."""
    if host.share is not None:
        return "it is one of several ranks"
    cut = sections(host.runs)
    if any(isinstance(i, Collective) for i in cut.loop):
        return "replicas exchange values within a micro-batch"
    before = [i for i in cut.before if not isinstance(i, UpdateFactors)]
    if before or any(i.fetches for i in cut.loop):
        return "it gathers or loads variables"
    if any(recipe.replays for recipe in host.recipes.values()):
        return "steps are repeated without Python, in memory of their own"
    inputs = (n for f in host.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    if {node.meta["val"].device.type for node in inputs} - {"cpu"}:
        return "it has other devices than the CPU"
    for name, recipe in host.recipes.items():
        if recipe.compiled_parts and allocating_stage(keyed(recipe)) is None:
            return f"the allocations in the machine code of @{name} are not known"
    return ""


def follow_memory(
    host: HostProgram,
    schedule: Schedule,
    batching: Batching,
    hyperparameters: Hyperparameters = (),
) -> tuple[list[FollowedStep], list[FollowedStorage]]:
    """The steps of the micro-batches of a step, and the storages that they hold.

    Variables are left out: they are there all the time.

    Args:
        hyperparameters: of a fused step: those that it was fused for.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _Follower(host, schedule, batching).follow(hyperparameters)


class _Engine(EagerEngine):
    """Makes callables that are followed."""

    def __init__(self, watched: Callable[[FunctionRecipe], Stage]) -> None:
        super().__init__()
        self._watched = watched

    def compile(self, recipes: Sequence[FunctionRecipe]) -> list[Stage]:
        return [self._watched(recipe) for recipe in recipes]


class _Follower(TorchDispatchMode):
    """Notes steps and storages; as a mode, it sees each operator of a function not compiled."""

    def __init__(self, host: HostProgram, schedule: Schedule, batching: Batching) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host, self._schedule, self._batching = host, in_turn(schedule), batching
        self.steps: list[FollowedStep] = []
        self.storages: list[FollowedStorage] = []
        self._live: dict[int, FollowedStorage] = {}  # by the address of the storage
        self._variables: set[int] = set()
        self._given: list[Tensor] = []  # what the caller has during the call
        self._calls = self._calls_in_order()
        # that runs, with the user's lines of its function's operators
        self._call: tuple[int, RunPass, Call, Mapping[str, str]] | None = None

    def follow(
        self, hyperparameters: Hyperparameters
    ) -> tuple[list[FollowedStep], list[FollowedStorage]]:
        host, program, batching = self._host, self._host.runs, self._batching
        tensors = {variable.name: stored(host, variable) for variable in program.variables}
        storage = Storage(program, tensors, host.replicas)
        for of_each in storage.of_replicas().values():
            self._variables |= {_reference(tensor).cdata for tensor in of_each}
        engine, devices = _Engine(self._watched), [torch.device("cpu")] * program.num_ipus
        sent = sent_streams(program, batching)
        drops = [isinstance(stream, SentStream) and not all(stream.kept) for stream in sent]
        streams = HostStreams([*self._received()], sent, devices[0], seed=0, step=0)
        if host.fused is not None:
            form = FusedStep(host, engine, storage, drops, devices, None)
            for tensor in form.prepare(hyperparameters).tensors:
                self._note(tensor, "hyperparameter", category="constants and seeds")
            form.run(min(batching.iterations, _FUSED_STEPS), streams, NOBODY)
        else:
            loop = MicroBatchLoop(
                program,
                stages_of(host, engine.compile),
                storage,
                host.replicas,
                self._schedule,
                drops,
                threads=None,
                devices=devices,
                memory=StreamingMemory(),
                deferred=host.deferred,
                streams=None,
            )
            loop(0, streams, NOBODY)
        ends = {step.turn: place for place, step in enumerate(self.steps)}
        for one in self.storages:
            one.passed = ends[self.steps[one.made].turn] if one.made >= 0 else -1
        return self.steps, self.storages

    def _calls_in_order(self) -> Iterator[tuple[int, RunPass, Call]]:
        """Each call of a function, with the number of its task."""
        loop = sections(self._host.runs).loop
        calls = [[i for i in of if isinstance(i, Call)] for of in instructions_of_passes(loop)]
        if self._host.fused is not None:
            ((call,),) = calls
            yield from ((step, RunPass(step, 0, step), call) for step in count())
        for turn, run in enumerate(self._schedule.runs[0]):
            yield from ((turn, run, call) for call in calls[run.index])

    def _received(self) -> Iterator[Sequence[Tensor]]:
        """The values that each receive of a call gives, as `HostLink` brings them."""
        program, loop = self._host.runs, sections(self._host.runs).loop
        made: dict[str, Sequence[Tensor]] = {}
        for receive in (i for i in loop if isinstance(i, Receive)):
            stream = next(s for s in program.inputs if s.name == receive.stream)
            if stream.name not in made:
                calls = (i for i in loop if isinstance(i, Call))
                stage = next((i.stage for i in calls if receive.result in i.arguments), 0)
                replicas = self._host.replicas.own
                whole, made[stream.name] = values_of(stream, self._batching, replicas)
                self._given += whole
                for value in whole:
                    self._note(value, stream.name, category=CATEGORY_OF["stream"], stage=stage)
                for value in made[stream.name]:
                    self._note(value, stream.name, category=CATEGORY_OF["stream"], stage=stage)
            yield made[stream.name]

    def _watched(self, recipe: FunctionRecipe) -> Stage:
        """A stage whose operators, or whose results, are noted."""
        graph, fused = recipe.lowered.graph.graph, self._host.fused
        compiled = bool(recipe.compiled_parts)
        stage = allocating_stage(recipe) if compiled else eager_stage(recipe)
        assert stage is not None, "see `why_not_followed`"
        inputs, packed = graph.find_nodes(op="placeholder"), self._packed(recipe)
        sources = {node.name: source_line(node) for node in graph.nodes}
        kinds = {variable.name: variable.kind for variable in self._host.runs.variables}
        written = () if fused is None else tuple(kinds[name] for name in fused.state)

        def run(arguments: list[Any]) -> Any:
            self._call = (*next(self._calls), sources)
            arguments += packed
            self._note_all(inputs, arguments)
            with self:
                results = stage(arguments)
            if compiled:
                self._step(recipe.function.name, "", "")
            for place, (node, value) in enumerate(zip(_returned(graph), results, strict=False)):
                if isinstance(value, Tensor) and (storage := self._note(value, node)) is not None:
                    storage.is_value = True
                    if place < len(written):  # what a variable is from now on
                        storage.category = CATEGORY_OF[ROLE_OF[written[place]]]
            return results

        return run

    def _note_all(self, inputs: Sequence[fx.Node], arguments: Sequence[Any]) -> None:
        """Note the arguments of a function, also those that no function has made."""
        for node, value in zip(inputs, arguments, strict=True):
            if isinstance(value, Tensor):
                self._note(value, node.name)

    def _packed(self, recipe: FunctionRecipe) -> list[Tensor]:
        """The weights that a function gets in a library's own order, beside the variables."""
        inputs = recipe.lowered.graph.graph.find_nodes(op="placeholder")
        further = inputs[len(recipe.function.inputs) :] if recipe.packed else ()
        tensors = []
        for node in further:
            like = node.meta["val"]
            tensors.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))
            self._note(tensors[-1], node.name, category="weights")
        return tensors

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # asked by stand-ins of tensors only
            return results
        assert self._call is not None
        *_, call, sources = self._call
        name = running_node(sys._getframe(1))
        source = sources.get(name, "")
        fused = self._host.fused
        self._step(call.function if fused is None else fused.function.name, name, source)
        for value in made_by(func, args, results):
            storage = self._note(value, name or f"buffer of @{call.function}", source)
            if storage is not None and (nbytes := nbytes_of(func, args)) is not None:
                storage.nbytes = nbytes
        return results

    def _step(self, function: str, operator: str, source: str) -> None:
        assert self._call is not None
        turn, run, call, _ = self._call
        step = FollowedStep(
            call.stage, call.ipu, run.micro_batch, function, operator, source, run.replica, turn
        )
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

    def _note(
        self,
        value: Tensor,
        name: str,
        source: str = "",
        category: CategoryName | None = None,
        stage: int = 0,
    ) -> FollowedStorage | None:
        """The storage of a value; None: it is a variable's."""
        reference = _reference(value)
        address = reference.cdata
        if address in self._variables:
            return None
        known = self._live.get(address)
        if known is None or known.reference.expired():
            made = len(self.steps) - 1
            if self._call is not None:
                stage = self._call[2].stage
            nbytes = value.untyped_storage().nbytes()
            known = FollowedStorage(name, nbytes, stage, made, reference, made, source=source)
            known.category = category
            self._live[address] = known
            self.storages.append(known)
        return known


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _returned(graph: fx.Graph) -> list[str]:
    results = graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    return [node.name if isinstance(node, fx.Node) else "" for node in results]
