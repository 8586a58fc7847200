"""Keep an optimiser whose step is traced from Python, and its program, in step with each other."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipu_dynamo.capture.update.record_update import RecordedUpdate, record_step, record_update
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.capture.update.world import Leaf, World, world_of
from ipu_dynamo.errors import CompileError, InputError
from ipu_dynamo.options import Options
from ipu_dynamo.passes.manager import PassManager, PassRun
from ipu_dynamo.passes.pipeline import lower_update, retrace, update_passes
from ipu_dynamo.passes.update.cut_factors import WARM_UP
from ipu_dynamo.passes.update.tensorify_scalars import OPERATORS_OF_NUMBERS
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdatePlan
from ipu_dynamo.program import Program, TracedStep
from ipu_dynamo.program.ir.update_rules import TracedRule
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, States

COUNTERS = ""  # key of `States` for values that belong to no single parameter
_NUMBERS = (int, float)
_MOST = 8  # variants; an optimiser that needs more reads numbers as values
_AGAIN = "compile the model again with this optimizer"


class TracedOptimizer:
    """The traced steps of an optimiser.

    Invariant: `variants` and `steps` are of the last `describe`.

    Args:
        options: which passes on the update are left out.

    Attributes:
        passes: a record of each pass on the steps that were traced last.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.passes: tuple[PassRun, ...] = ()
        self._variants: UpdateFunctions | None = None
        self.steps: list[TracedStep] = []
        self._without: frozenset[str] = frozenset()
        self._unstepped: frozenset[str] = frozenset()  # of these, those that have no state

    def begin(self) -> None:
        """Trace steps, from now on, in which all parameters have a gradient."""
        self._without = self._unstepped = frozenset()

    def leave_out(self, names: Collection[str]) -> None:
        """Trace steps, from now on, in which these parameters have no gradient."""
        self._without |= {*names}

    def check_read(self, names: Collection[str]) -> None:
        """Check that a program reads no parameter whose update cannot be traced.

        Raises:
            UntraceableUpdate: it reads one that has made no step, and others have made some.
        """
        if late := sorted(self._unstepped & {*names}):
            raise UntraceableUpdate(
                f"{late[0]} has made no step, and others have, with which it shares a count",
                hint=HOST,
            )

    @property
    def variants(self) -> UpdateFunctions:
        """What was traced.

        Raises:
            CompileError: nothing was.
        """
        if self._variants is None:
            raise CompileError("the optimizer's step was not traced yet", hint="call the model")
        return self._variants

    @property
    def settled_counters(self) -> dict[str, int]:
        """Counters that end, and the numbers at which they do: later programs do not have them."""
        return {WARM_UP: self.variants.plan.epochs}

    def describe(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
        """Trace the step of `optimizer`; one group for each of its own.

        Raises:
            CompileError: it cannot be traced, or trains a tensor that is not in `parameters`.
        """
        for index, group in enumerate(optimizer.param_groups):
            if group.get("differentiable"):
                raise CompileError(
                    f"parameter group {index} asks for a differentiable step",
                    hint="construct the optimizer with differentiable=False",
                )
        names = _names(optimizer, parameters)
        try:
            self._variants = self._traced(optimizer, names)
        except UntraceableUpdate:
            self._unstepped = _unstepped(optimizer, names) - self._without
            if not self._unstepped:
                raise
            self.leave_out(self._unstepped)  # they had no gradient while the others made steps
            self._variants = self._traced(optimizer, names)
        self.steps = list(self._variants.steps)
        self._note_counts(optimizer)
        return self._groups(self._variants, self.steps[-1])

    def _traced(self, optimizer: Optimizer, names: Mapping[int, str]) -> UpdateFunctions:
        """Trace the steps of an optimiser.

        Torch computes the same tensor by tensor and with lists of tensors (`foreach`). The first
        form allows few parameters to be traced for many. If it cannot be traced, the groups'
        setting of `foreach` is tried: in optimisers of others the two are different code.
        """
        try:
            world = world_of(optimizer, names, self._without)
            return self._lowered(record_update(world, OPERATORS_OF_NUMBERS))
        except UntraceableUpdate:
            if all(group.get("foreach", False) is False for group in optimizer.param_groups):
                raise
            with suppress(UntraceableUpdate):
                world = world_of(optimizer, names, self._without, own_foreach=True)
                return self._lowered(record_update(world, OPERATORS_OF_NUMBERS))
            raise

    def _lowered(
        self, recorded: RecordedUpdate, known: UpdatePlan | None = None
    ) -> UpdateFunctions:
        manager = PassManager("update", first="recorded")
        functions = lower_update(recorded, update_passes(self._options, known), manager)
        self.passes = tuple(manager.runs)
        return functions

    def _groups(self, variants: UpdateFunctions, step: TracedStep) -> tuple[Group, ...]:
        world, own = variants.first, self._hyperparameters()
        key = _key(self.steps)
        groups = []
        for index, members in enumerate(world.members):
            numbers = tuple(name for name, _ in own[index])
            kind = type(world.optimizer).__name__
            rule = TracedRule(name=kind, key=key, hyperparameters=numbers)
            names = tuple(world.names[i] for i in members)
            values = tuple(_number(leaf.value) for _, leaf in own[index])
            groups.append(Group(rule, names, values, trace=step))
        return tuple(groups)

    def _hyperparameters(self) -> list[list[tuple[str, Leaf]]]:
        """For each group its numbers, and the paths that they come from."""
        world, wanted = self.variants.first, set(self.variants.plan.hyperparameters)
        found: list[list[tuple[str, Leaf]]] = [[] for _ in world.members]
        for leaf in world.leaves:
            if leaf.path in wanted:
                group, name = leaf.hyperparameter
                found[group].append((name, leaf))
        return found

    def refresh(self, groups: Sequence[Group], optimizer: Optimizer) -> tuple[Group, ...]:
        """The groups with the numbers that the optimiser has now.

        Raises:
            InputError: something else than a number has changed.
        """
        world, now = self.variants.first, settings_of(optimizer)
        before = {x.path: x for x in world.leaves if x.parameter is None and not x.is_tensor}
        refreshed = []
        for index, (group, own) in enumerate(zip(groups, self._hyperparameters(), strict=True)):
            values: list[Any] = []
            for name, leaf in own:
                value = now.get(leaf.path)
                # a whole number for a float is one; a float for a whole number is traced anew
                if type(value) is not type(leaf.value) and not (
                    type(value) in _NUMBERS and type(leaf.value) in _NUMBERS
                ):
                    raise InputError(
                        f"{name} of the optimizer's group {index} was {leaf.value!r} when it was "
                        f"compiled, and is {value!r}",
                        hint=f"give it as a {type(leaf.value).__name__}, or {_AGAIN}",
                    )
                values.append(_number(value))
            refreshed.append(replace(group, values=tuple(values)))
        counters = self.variants.plan.counters
        for path, count in self._counts.items():
            if now.get(path) != count:
                raise InputError(
                    f"{path} of the optimizer, which its steps change, was {count!r} and is "
                    f"{now.get(path)!r}",
                    hint=f"write it with load_state_dict where it is part of that, or {_AGAIN}",
                )
        for path, leaf in before.items():
            if leaf.is_number or path in counters or not _plain(leaf.value):
                continue
            if path in now and now[path] != leaf.value and path in self._fixed_paths():
                problem = f"{path} of the optimizer was {leaf.value!r}, and is {now[path]!r}"
                raise InputError(problem, hint=_AGAIN)
        return tuple(refreshed)

    def _fixed_paths(self) -> set[str]:
        """The paths of values that no step changes by itself."""
        worlds = [{x.path: x.value for x in world.leaves} for world in self.variants.worlds]
        first, *others = worlds
        return {
            path
            for path, value in first.items()
            if _plain(value) and all(other.get(path) == value for other in others)
        }

    def known(self) -> States:
        """The states that the optimiser has, and its counters."""
        return self._states(self.variants.first, 0)

    def _states(self, world: World, epoch: int) -> States:
        plan = self.variants.plan
        owners, shared = plan.owners, plan.shared_names
        found: States = {}
        counters = {c.name: torch.tensor(c.initial, dtype=c.type.dtype) for c in self._counters()}
        for leaf in world.leaves:
            if leaf.path in plan.counters:
                counter = plan.counters[leaf.path]
                value = torch.as_tensor(leaf.value)
                counters[counter.name] = value.detach().to(counter.type.dtype, copy=True)
            elif leaf.path in owners:
                place, key = owners[leaf.path]
                found.setdefault(world.names[place], {})[key] = leaf.value.detach()
            elif leaf.path in shared:
                counters[shared[leaf.path]] = torch.as_tensor(leaf.value).detach()
        if WARM_UP in counters:
            counters[WARM_UP] = torch.tensor(epoch)
        return {**found, COUNTERS: counters}

    def _counters(self) -> Sequence[Any]:
        return self.steps[0].counters

    def read(
        self, optimizer: Optimizer, parameters: Mapping[str, Tensor], trained: Collection[str]
    ) -> States:
        """The states of an optimiser whose state was loaded.

        Args:
            trained: parameters that the program updates; others have no state here.

        Raises:
            InputError: it keeps other things than the program.
        """
        world = world_of(optimizer, _names(optimizer, parameters), self._without)
        for epoch, known in enumerate(self.variants.worlds):
            if _kinds(known, trained) == _kinds(world, trained):
                self._check_counts(world)
                self._note_counts(optimizer)
                return self._states(world, epoch)
        raise InputError("the optimizer's state is of another kind than the program's", hint=_AGAIN)

    def _note_counts(self, optimizer: Optimizer) -> None:
        """Note the optimiser's numbers that its steps change and that belong to no parameter.

        If one of them differs later, the user has changed it.
        """
        counters = self.variants.plan.counters
        self._counts = {p: v for p, v in settings_of(optimizer).items() if p in counters}

    def _check_counts(self, world: World) -> None:
        """Refuse different counts where parameters share one counter."""
        found: dict[str, float] = {}
        for leaf in world.leaves:
            counter = self.variants.plan.counters.get(leaf.path)
            if counter is not None:
                value = float(leaf.value)
                if found.setdefault(counter.name, value) != value:
                    raise InputError(
                        f"{leaf.path} of the optimizer is {value:g}, and {found[counter.name]:g} "
                        "for others that are updated together",
                        hint=_AGAIN,
                    )

    def write(self, held: States, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Write the program's states and counters into the optimiser, as torch would have them."""
        counters = held.get(COUNTERS, {})
        world, plan = self._world_at(counters), self.variants.plan
        owners, shared = plan.owners, plan.shared_names
        for leaf in world.leaves:
            place, key = owners.get(leaf.path, (leaf.parameter, leaf.key))
            name = None if place is None else world.names[place]
            if name is not None and name not in held:
                continue  # the loss does not depend on it, so it is not updated
            if leaf.path in plan.counters:
                value = _counted(leaf, counters[plan.counters[leaf.path].name])
            elif leaf.path in shared:
                value = counters[shared[leaf.path]].detach().cpu()
                value = value.clone() if leaf.is_tensor else value.item()
            elif leaf.is_tensor and name is not None:
                value = held[name][key].detach().to(leaf.value.device, copy=True)
            elif leaf.parameter is not None and not leaf.is_number:
                value = leaf.value
            else:
                continue
            parameter = None if leaf.parameter is None else parameters[world.names[leaf.parameter]]
            _put(optimizer, leaf, parameter, value)
        self._note_counts(optimizer)

    def _world_at(self, counters: Mapping[str, Tensor]) -> World:
        """Return the leaves, of the kinds that they have after so many steps."""
        last = len(self.variants.worlds) - 1
        return self.variants.worlds[int(counters[WARM_UP]) if WARM_UP in counters else last]

    def _next_world(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        counters: Mapping[str, Tensor],
    ) -> World:
        """Return the leaves before the next step, with the values of settings and counters.

        States have their kind. Their values are of no step, as no trace depends on them.
        """
        world, now = replace(self._world_at(counters), optimizer=optimizer), settings_of(optimizer)
        own = [parameters[name].detach() for name in world.names]
        plan, values = self.variants.plan, list[Any]()
        for leaf in world.leaves:
            value = leaf.value
            if leaf.refers is not None:
                value = own[leaf.refers]
            elif leaf.path in plan.counters:
                value = _counted(leaf, counters[plan.counters[leaf.path].name])
            elif leaf.parameter is None and leaf.path not in plan.shared_names:
                value = now.get(leaf.path, value)
            values.append(value)
        return world.of_changed(world.shadow(values, own, [None] * len(own)), own)

    def trace_next(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        counters: Mapping[str, Tensor],
        known: int,
    ) -> TracedStep:
        """Trace the step that the optimiser would make next with the program's state.

        No value of a state is read, except the counters: a rank has no others of other IPUs.

        Args:
            counters: of the program, by their names.
            known: the number of steps that were traced for the program.

        Raises:
            CompileError: one more would be too many, or it cannot be traced.
        """
        if known >= _MOST:
            lines = sorted({line for line in self._lines if line})
            raise CompileError(
                f"the optimizer decides by its numbers in more than {_MOST} ways",
                where=lines[0] if lines else "",
                hint='compile_training(..., update="host") runs its step in Python',
                id="update",
            )
        world = self._next_world(optimizer, parameters, counters)
        recorded = record_step(world, OPERATORS_OF_NUMBERS)
        (step,) = self._lowered(recorded, self.variants.plan).steps
        self._lines = [line for _, line in recorded.steps[0].kept_conditions]
        return step

    _lines: Sequence[str] = ()
    _counts: Mapping[str, Any] = MappingProxyType({})


def _key(steps: Sequence[TracedStep]) -> str:
    keys = [f.key for step in steps for f in (step.factors, *step.pieces.values())]
    return sha256(" ".join(keys).encode()).hexdigest()[:16]


def _names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """The names of the optimiser's parameters."""
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    for index, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            if tensor.requires_grad and id(tensor) not in names:
                raise CompileError(
                    f"parameter {place} of the optimizer's group {index}, of shape "
                    f"{list(tensor.shape)}, is not a parameter of the model",
                    hint="construct the optimizer from the parameters of the compiled model",
                )
            if tensor.requires_grad and not tensor.dtype.is_floating_point:
                raise CompileError(
                    f"{names[id(tensor)]} is {str(tensor.dtype).removeprefix('torch.')}",
                    hint="train floating-point parameters, complex numbers as pairs of them",
                )
    return names


def _unstepped(optimizer: Optimizer, names: Mapping[int, str]) -> frozenset[str]:
    """The parameters without a state, if others have one."""
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    without = [p for p in every if not optimizer.state.get(p)]
    return frozenset(names[id(p)] for p in without) if len(without) < len(every) else frozenset()


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Hyperparameters and settings of groups and attributes, by path, without looking at states."""
    bare: Any = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer))
    vars(bare)["state"] = {k: v for k, v in optimizer.state.items() if isinstance(k, str)}
    vars(bare)["param_groups"] = [{**group, "params": []} for group in optimizer.param_groups]
    return {
        leaf.path: leaf.value.clone() if leaf.is_tensor else leaf.value
        for leaf in world_of(bare, {}).leaves
    }


def _kinds(world: World, trained: Collection[str]) -> dict[str, Any]:
    """The shape or class of each state of these parameters, by path."""
    return {
        leaf.path: (tuple(leaf.value.shape) if leaf.is_tensor else type(leaf.value))
        for leaf in world.leaves
        if leaf.parameter is not None and world.names[leaf.parameter] in trained
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _counted(leaf: Leaf, counter: Tensor) -> Any:
    """The value of a counter, of the kind that its leaf has."""
    value = counter.detach().cpu()
    return value.to(leaf.value.dtype, copy=True) if leaf.is_tensor else value.item()


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | str)


def _put(optimizer: Optimizer, leaf: Leaf, parameter: Tensor | None, value: Any) -> None:
    """Write a value where its leaf is."""
    *way, last = leaf.keys
    kind, *inner = way if way else [last]
    container: Any
    if kind == "state":
        states: Any = optimizer.state
        if parameter is None:  # a state under a name of its own
            _put_under_name(states, inner, last, value)
            return
        container = states[parameter]
        inner = inner[1:]
    elif kind == "groups":
        container = optimizer.param_groups[inner[0]]
        inner = inner[1:]
    else:
        container = vars(optimizer)
    for key in inner:
        if isinstance(container, dict) and key not in container:
            container[key] = {}
        container = container[key]
    if isinstance(container, tuple):
        return  # numbers in tuples do not count
    container[last] = value


def _put_under_name(states: Any, inner: Sequence[Any], last: Any, value: Any) -> None:
    """Write a state that belongs to no parameter; a tensor keeps its memory."""
    (_, name), *rest = [*inner, last]
    if not rest:
        container, key = states, name
    else:
        container, key = states[name], rest.pop()
        for step in rest:
            container = container[step]
    if isinstance(container.get(key), Tensor) and isinstance(value, Tensor):
        with torch.no_grad():
            container[key].copy_(value)
    else:
        container[key] = value


def extra_programs(
    program: Program, optimizer: TracedOptimizer, groups: Sequence[Group], options: Options
) -> list[Program]:
    """The programs of the steps before the last one that was traced."""
    return [retrace(program, step, groups, options) for step in optimizer.steps[:-1]]
