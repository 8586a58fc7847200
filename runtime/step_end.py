"""Do what comes before and after the micro-batches of a step: gradients go home, are summed over
replicas, and update the parameters; what lies off the chip is loaded and stored."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ipu_dynamo.program import (
    Copy,
    Gather,
    Instruction,
    Load,
    Program,
    Reduce,
    ReplicaGroups,
    Scatter,
    Store,
    Update,
)
from ipu_dynamo.runtime.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.torch_private import foreach_add_, foreach_copy_, foreach_zero_
from ipu_dynamo.runtime.update import ParameterUpdate
from ipu_dynamo.runtime.update_rounding import StochasticRounding
from ipu_dynamo.runtime.update_scale import GradientScale
from ipu_dynamo.runtime.update_tensors import distinct

Numbers = Sequence[Sequence[float]]


class StepEnd:
    """The instructions before the loop over micro-batches or those after it, prepared.

    Args:
        program: what the instructions belong to.
        instructions: in order; copies are of gradients.
        tensors: for every variable, its tensor on each replica.
        devices: of the IPUs.
        rounding: of updates that round at random.
        memory: where variables are loaded from and stored.
    """

    def __init__(
        self,
        program: Program,
        instructions: Sequence[Instruction],
        tensors: Mapping[str, Sequence[Tensor]],
        devices: Sequence[torch.device],
        rounding: StochasticRounding,
        memory: StreamingMemory,
    ) -> None:
        self._replicas = program.replicas
        self._variables = {variable.name: variable for variable in program.variables}
        self._tensors = dict(tensors)
        self._devices, self._rounding, self._memory = devices, rounding, memory
        self._origins: dict[str, str] = {}  # what a copy made -> where it came from
        self._updates: list[ParameterUpdate] = []
        self._run: list[Callable[[Numbers], None]] = []
        for instruction in instructions:
            match instruction:
                case Copy():
                    self._copy(instruction)
                case Reduce():
                    self._reduce(instruction)
                case Scatter():
                    self._reduce(instruction)
                    self._count_scatter(instruction)
                case Update():
                    self._update(instruction)
                case Load() | Store() | Gather():
                    self._transfer(instruction)

    def __call__(self, numbers: Numbers) -> None:
        """Run the instructions; `numbers` are those of every update group."""
        for run in self._run:
            run(numbers)

    def reload_states(self) -> None:
        """Take notice that optimiser states were overwritten."""
        for update in self._updates:
            update.reload()

    def _copy(self, copy: Copy) -> None:
        sources, device = self._tensors[copy.value], self._devices[copy.dst]
        self._origins[copy.result] = copy.value
        if device == self._devices[copy.src]:
            self._tensors[copy.result] = sources
            return
        targets = [torch.empty_like(source, device=device) for source in sources]
        self._tensors[copy.result] = targets
        self._run.append(lambda _: foreach_copy_(targets, sources))

    def _reduce(self, reduce: Reduce | Scatter) -> None:
        """Sum into the tensors of each group's first replica, for all of them: also in shards,
        which lie there one behind the other."""
        groups = reduce.groups or ReplicaGroups(self._replicas)
        sums = [
            [[self._tensors[name][replica] for name in reduce.values] for replica in members]
            for members in groups.members(self._replicas)
        ]

        def run(_: Numbers) -> None:
            for first, *others in sums:
                for tensors in others:
                    foreach_add_(first, tensors)

        self._run.append(run)

    def _update(self, update: Update) -> None:
        places = [  # of each parameter the copies that differ: where, and on which replica
            (place, replica)
            for place, name in enumerate(update.parameters)
            for replica in self._first_of_groups(name)
        ]

        def copies(names: Sequence[str]) -> list[Tensor]:
            return [self._tensors[names[place]][replica] for place, replica in places]

        parameters, gradients = copies(update.parameters), copies(update.gradients)
        for parameter, (place, replica) in zip(parameters, places, strict=True):
            self._rounding.name(parameter, f"{update.parameters[place]} {replica}")
        scale = None
        if update.divisor != 1:
            scale = GradientScale(update.divisor, device=parameters[0].device)
        step = ParameterUpdate(
            update.rule,
            parameters,
            gradients,
            {state: copies(names) for state, names in update.states},
            scale=scale,
            zero_gradients=update.clear,
            rounding=self._rounding if update.rounding == "stochastic" else None,
        )
        self._updates.append(step)
        group, others = update.group, self._others(update, gradients) if update.clear else []

        def run(numbers: Numbers) -> None:
            step(numbers[group])
            if others:
                foreach_zero_(others)

        self._run.append(run)

    def _others(self, update: Update, cleared: Sequence[Tensor]) -> list[Tensor]:
        """The accumulators of an update that the update itself does not set to zero."""
        names = [n for g in update.gradients for n in (g, self._origins.get(g, g))]
        known = {tensor.data_ptr() for tensor in cleared}
        found = distinct([tensor for name in names for tensor in self._tensors[name]])
        return [tensor for tensor in found if tensor.data_ptr() not in known]

    def _first_of_groups(self, name: str) -> tuple[int, ...]:
        """The first replica of every group that has a variable for itself."""
        variable = self._variables[name]
        return (0,) if variable.groups is None else variable.holders(self._replicas)

    def _count_scatter(self, scatter: Scatter) -> None:
        tensors = [tensor for name in scatter.values for tensor in self._tensors[name]]
        self._count(self._memory.scatter, tensors, scatter.shards)

    def _transfer(self, instruction: Load | Store | Gather) -> None:
        """Move a variable, or its shards, on every replica."""
        name = instruction.value
        match instruction:
            case Gather(shards=shards):
                self._count(self._memory.gather, self._tensors[name], shards)
            case Load():
                self._count(self._memory.fetch, self._tensors[name], self._variables[name].shards)
            case Store():
                shards = self._variables[name].shards
                self._count(self._memory.write_back, self._tensors[name], shards)

    def _count(
        self, move: Callable[[Tensor, int], None], tensors: Sequence[Tensor], shards: int
    ) -> None:
        def run(_: Numbers) -> None:
            for tensor in tensors:
                move(tensor, shards)

        self._run.append(run)
