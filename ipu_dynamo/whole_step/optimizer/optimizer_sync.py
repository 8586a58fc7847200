"""Keep a torch optimiser and the updates of a program in step with each other."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.private.tracing import mark_stepped
from ipu_dynamo.capture.swap import Model
from ipu_dynamo.errors import InputError
from ipu_dynamo.options import Options
from ipu_dynamo.passes.pipeline import retrace
from ipu_dynamo.program import JointUpdate, Program, UpdateFactors
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.optimizer.host_step import HostOptimizer
from ipu_dynamo.whole_step.optimizer.torch_optimizers import (
    Group,
    States,
    describe,
    export_loss_scale,
    export_state,
    import_loss_scale,
    import_state,
    refresh,
)
from ipu_dynamo.whole_step.optimizer.traced_optimizer import COUNTERS, TracedOptimizer
from ipu_dynamo.whole_step.weights.initial_state import initial_tensors, loss_scale_states, updates

Describe = Callable[[Any, Mapping[str, Tensor]], tuple[Group, ...]]


class GroupsSnapshot(NamedTuple):
    """An optimiser's groups at one time, and all numbers in them, by which changes are noticed."""

    groups: tuple[Group, ...]
    numbers: list[list[Any]]


class StatesSnapshot(NamedTuple):
    """States of an optimiser at one time, by which writes are noticed.

    Args:
        states: the optimiser's dict of all.
        versions: of tensors among `values`, as torch counts writes.
    """

    optimizer: torch.optim.Optimizer
    states: Any
    values: list[Any]
    versions: list[int]

    def is_overwritten(self, later: "StatesSnapshot") -> bool:
        """Whether states were written between this and a later snapshot."""
        if later.optimizer is not self.optimizer:
            return False  # a program takes the numbers of another optimiser, and no states
        if later.states is not self.states or later.versions != self.versions:
            return True
        return [*map(id, later.values)] != [*map(id, self.values)]


class OptimizerLink:
    """The optimiser of a compiled model.

    Args:
        optimizer: what updates the parameters.
        model: whose parameters it has.
        describe: reads the optimiser's groups, given the model's parameters by name.
        live: follow the optimiser: its numbers before each step, its state when compiling.
        traced: what `describe` has traced; None where it knows a rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        describe: Describe = describe,
        *,
        live: bool = True,
        traced: TracedOptimizer | None = None,
    ) -> None:
        self.optimizer, self.live, self.traced = optimizer, live, traced
        # one object: an interrupt comes before or after its change
        self._reading = GroupsSnapshot((), [])
        self._steps = self._known_steps = 0  # that began; after which the state was exchanged last
        self._model, self._describe = model, describe

    @property
    def groups(self) -> tuple[Group, ...]:
        """The optimiser's groups, with the numbers that the next step uses; none until `take`."""
        return self._reading.groups

    @property
    def has_newer_state(self) -> bool:
        """Whether the program has made steps that the optimiser does not know."""
        return self._steps != self._known_steps

    def forget(self) -> None:
        """Say that the optimiser's state is not the program's, whose states were written."""
        self._known_steps = -1

    @property
    def settled_counters(self) -> dict[str, int]:
        """See `WeightExchange.settled_counters`."""
        return {} if self.traced is None else self.traced.settled_counters

    def read(self) -> GroupsSnapshot:
        """The optimiser's groups as they are now, for a new program."""
        groups = self._describe(self.optimizer, self._parameters())
        return GroupsSnapshot(groups, self._numbers_now(self.optimizer))

    def take(self, reading: GroupsSnapshot) -> None:
        """Use these groups, now that a program is compiled for them."""
        self._reading = reading

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the numbers of `optimizer` from the next step on.

        Raises:
            InputError: the update itself would differ: another rule, or other groups.
        """
        groups = self.groups
        if groups and self.traced is not None:
            if type(optimizer) is not type(self.optimizer):
                raise InputError(
                    f"the program has the update of {type(self.optimizer).__qualname__}, not of "
                    f"{type(optimizer).__qualname__}",
                    hint="compile the model again with this optimizer",
                )
            groups = self.traced.refresh(groups, optimizer)
        elif groups:
            groups = refresh(groups, optimizer, self._parameters(), read=self._describe)
        self.optimizer = optimizer
        self._reading = GroupsSnapshot(groups, self._numbers_now(optimizer))

    def before_step(self) -> Hyperparameters:
        """Take over new numbers, as after a scheduler's step, and let schedulers know of a step.

        Returns:
            The hyperparameters of each group.
        """
        if self.live:
            if self._numbers_now(self.optimizer) != self._reading.numbers:
                self.set(self.optimizer)
            mark_stepped(self.optimizer)
            self._steps += 1
        return [group.values for group in self._reading.groups]

    def known(self, reading: GroupsSnapshot) -> tuple[States, dict[str, Tensor]]:
        """The first states of a new program: those of the optimiser, and of its loss scale."""
        if not self.live:
            return {}, {}
        if self.traced is not None:
            return self.traced.known(), import_loss_scale(self.optimizer)
        states = import_state(reading.groups, self.optimizer, self._parameters())
        return states, import_loss_scale(self.optimizer)

    def snapshot(self) -> StatesSnapshot:
        """The optimiser's states as they are now."""
        optimizer, states = self.optimizer, self.optimizer.state
        values = [v for of in states.values() if isinstance(of, Mapping) for v in of.values()]
        versions = [v._version for v in values if isinstance(v, Tensor)]
        return StatesSnapshot(optimizer, states, values, versions)

    def read_state(self, program: Program, executable: Executable) -> None:
        """Write the state on the IPUs into the torch optimiser."""
        steps = self._steps  # of another thread's meanwhile, it is not known whether they are read
        held = states_of(program, executable)
        if self.traced is not None:
            self.traced.write(held, self.optimizer, self._parameters())
        else:
            export_state(held, self.groups, self.optimizer, self._parameters())
        names = loss_scale_states(program)
        scale = {key: executable.whole(name) for key, name in names.items()}
        export_loss_scale(scale, self.optimizer)
        self._known_steps = steps

    def write_state(self, compiled: Compiled, executable: Executable) -> None:
        """Take over the state that the torch optimiser holds."""
        program = compiled.program
        if self.traced is not None:
            trained = {name for update in updates(program) for name in update.parameters}
            known = self.traced.read(self.optimizer, self._parameters(), trained)
        else:
            known = import_state(self.groups, self.optimizer, self._parameters())
        scale = import_loss_scale(self.optimizer)
        fresh = initial_tensors(compiled, known, private=True, loss_scale=scale)
        states = [name for update in updates(program) for _, names in update.states
                  for name in names]  # fmt: skip
        counters = list(_of_no_parameter(program))
        names = (*states, *counters, *loss_scale_states(program).values())
        executable.write({name: fresh[name] for name in names})
        self._known_steps = self._steps

    def _numbers_now(self, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
        """All numbers that a step reads, by which changes are noticed."""
        numbers = _numbers_of(optimizer)
        if self.traced is None:
            return numbers
        plain = [v for v in vars(optimizer).values() if isinstance(v, int | float | Tensor)]
        named = [v for k, v in optimizer.state.items() if isinstance(k, str) and not v.dim()]
        return [*numbers, [_present(value) for value in (*plain, *named)]]

    def trace_next(self, program: Program, executable: Executable, options: Options) -> Program:
        """The program with the update for the numbers of the next step."""
        assert self.traced is not None
        factors = [i for i in program.walk() if isinstance(i, UpdateFactors)]
        counters = {name: executable.whole(name) for i in factors for name in i.counters}
        traced = 1 + len(executable.other_updates)
        step = self.traced.trace_next(self.optimizer, self._parameters(), counters, traced)
        return retrace(program, step, self.groups, options)

    def host(self, executable: Executable) -> HostOptimizer:
        """The object that makes the optimiser's step in Python."""
        return HostOptimizer(lambda: self.optimizer, self._parameters, executable.whole)

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters()) if isinstance(self._model, nn.Module) else {}


def states_of(program: Program, executable: Executable) -> States:
    """The tensors of the optimiser's state on the IPUs, by parameter and name."""
    states: States = {}
    if any(isinstance(instruction, UpdateFactors) for instruction in program.walk()):
        states[COUNTERS] = {}
    for update in updates(program):
        if update.function is not None:
            states |= {name: {} for name in update.parameters}
    for (parameter, state), name in state_names(program).items():
        states.setdefault(parameter, {})[state] = executable.whole(name)
    return states


def state_names(program: Program) -> dict[tuple[str, str], str]:
    """The variables of the optimiser's state, by the parameter's name and the state's."""
    factors = any(isinstance(instruction, UpdateFactors) for instruction in program.walk())
    names = {(COUNTERS, name): name for name in _of_no_parameter(program)} if factors else {}
    for update in updates(program):
        for state, of_each in update.states:
            names |= {(p, state): name for p, name in zip(update.parameters, of_each, strict=True)}
    return names


def _of_no_parameter(program: Program) -> Iterator[str]:
    """The variables of traced updates that belong to no parameter: counters, and states."""
    for instruction in program.walk():
        match instruction:
            case UpdateFactors(counters=names) | JointUpdate(written=names):
                yield from names
            case _:
                continue


_PLAIN = frozenset({bool, float, int, type(None)})  # of most numbers; checked in every call


def _numbers_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Everything in the optimiser's groups but the parameters, tensors as their present value."""
    return [
        [
            value if type(value) in _PLAIN else _present(value)
            for key, value in group.items()
            if key != "params"
        ]
        for group in optimizer.param_groups
    ]


def _present(value: Any) -> Any:
    """A copy of `value`: a tensor may change in place later."""
    if isinstance(value, tuple):
        return tuple(map(_present, value))
    return value.tolist() if isinstance(value, Tensor) else value
