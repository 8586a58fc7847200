"""Offer compiled models to users: `compile_training`, `compile_inference`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.swap import Model
from ipu_dynamo.capture.torch_private import mark_stepped, outside_modes
from ipu_dynamo.capture.trace import Arguments, read_arguments
from ipu_dynamo.checkpoints import follow_checkpoints
from ipu_dynamo.driver import Compiled, batching, compile_model
from ipu_dynamo.errors import CompileError, InputError, IpuError, OptionError
from ipu_dynamo.expected import ExpectedArguments
from ipu_dynamo.optimizers import (
    Group,
    States,
    describe,
    export_loss_scale,
    export_state,
    import_loss_scale,
    import_state,
    refresh,
)
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.program import Program
from ipu_dynamo.program.narrowing import narrowed
from ipu_dynamo.recent import remember
from ipu_dynamo.runtime.batching import micro_batch_size
from ipu_dynamo.runtime.engines import Engine, make_engine
from ipu_dynamo.runtime.executable import Executable
from ipu_dynamo.runtime.schedule import Schedule
from ipu_dynamo.sharing import refuse_what_cannot_be_shared
from ipu_dynamo.threads import micro_batches_apart, threads_for
from ipu_dynamo.variables import (
    initial_tensors,
    loss_scale_states,
    loss_scale_variable,
    updates,
)

Describe = Callable[[Any, Mapping[str, Tensor]], tuple[Group, ...]]


class CompiledModel:
    """A model that runs as a program. Make it with `compile_training` or `compile_inference`.

    The first call compiles; the program is bound to the shapes, types and Python values of that
    call, and later calls must match them.

    Invariant: with `own_weights` the program computes on copies of the model's tensors, which
    `read_weights` and `write_weights` exchange; otherwise on the model's tensors themselves.

    Args:
        model, options: what to compile, and how.
        optimizer: what updates the parameters; None: nothing does, this is no training.
        loss: index of the returned tensor to minimise; None: the value marked as the loss.
        own_weights: compute on copies.
        describe: reads the optimiser's groups, given the model's parameters by name.
        live: follow the optimiser: its numbers before each call, and its state when compiling.
            Otherwise its numbers are read when compiling and by `set_optimizer` only.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        optimizer: torch.optim.Optimizer | None,
        loss: int | None = None,
        own_weights: bool = False,
        describe: Describe = describe,
        live: bool = True,
    ) -> None:
        self.model, self.options = model, options
        self.training = optimizer is not None
        self._optimizer, self._loss, self._own_weights = optimizer, loss, own_weights
        self._describe, self._live = describe, live
        self._batching = batching(options, training=self.training)
        self._groups: tuple[Group, ...] = ()
        self._seen: list[list[Any]] = []
        self._expected: ExpectedArguments | None = None
        self._compiled: Compiled | None = None
        self._executable: Executable | None = None
        self._engine: Engine | None = None
        self._stepped = False
        self._changed_inputs: set[str] = set()  # inputs that the model changes in place
        self._watched: list[tuple[str, Tensor, int]] = []  # tensors that the program shares

    @property
    def program(self) -> Program:
        """The program, once compiled."""
        return self._ready()[0].program

    @property
    def costs(self) -> Costs:
        """Seconds of each operator, forward and backward, by which a strategy with `ipus` has cut
        the model; empty for any other."""
        return self._ready()[0].costs

    @property
    def is_compiled(self) -> bool:
        """Whether there is a program yet."""
        return self._executable is not None

    @property
    def has_newer_state(self) -> bool:
        """Whether the program has made steps that the torch optimiser knows nothing of."""
        return self._stepped

    @property
    def executable(self) -> Executable:
        """What runs the program, once compiled: its schedule, its timeline when recorded."""
        return self._ready()[1]

    @property
    def schedule(self) -> Schedule:
        """What each IPU does when, once compiled: printed as text, drawn by its `svg()`.

        It has a row for each IPU of every replica. `executable.schedule` is the one that the
        threads of this computer follow; several IPUs may share one.
        """
        return self.executable.schedule_for(None)

    @property
    def functions_compiled(self) -> int:
        """How many stage functions the engine has compiled so far."""
        return self._engine.compiled if self._engine else 0

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward pass of the next step."""
        name = loss_scale_variable(self.program)
        return self.options.loss_scale if name is None else self.executable.whole(name).item()

    @property
    def last_loss_scale(self) -> float | None:
        """The factor on the loss in the last step, if it is automatic; the first one before."""
        return self.executable.last_loss_scale

    def set_loss_scale(self, value: float) -> None:
        """Use another factor on the loss from the next call on; automatic scaling goes on from it.

        Raises:
            OptionError: the loss scale is part of the program, or `value` is not a positive number.
        """
        replace(self.options, loss_scale=value)  # checks it
        name = loss_scale_variable(self.program)
        if name is None:
            raise OptionError(
                f"the loss scale {self.options.loss_scale} is part of the program; compile it with "
                "Options(loss_scale_is_variable=True)"
            )
        self.executable.whole(name).fill_(value)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls with arguments like these; they are not run."""
        self._compile(self._read(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: `device_iterations` steps, or micro-batches when not training.

        Args:
            args, kwargs: what the model's forward takes, with as many rows in each tensor as all
                micro-batches of the call have together.

        Returns:
            What forward returns, with tensors joined by the output mode.
        """
        if self._expected is None:
            given = self._read(args, kwargs)
            self._compile(given)
            tensors = given.tensors
        else:
            tensors = self._expected.tensors(args, kwargs)
        return self.run(tensors)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run one call of the compiled program, without comparing Python values.

        Args:
            tensors: those of the arguments, in the order in which flattening finds them.
        """
        compiled, executable = self._ready()
        for name, tensor, address in self._watched:
            if tensor.data_ptr() != address:
                raise InputError(
                    f"{name} lies in other memory than when the program was compiled",
                    hint="change it in place (copy_, load_state_dict), or compile again",
                )
        if self._optimizer is not None and self._live:
            self._follow_optimizer()
            mark_stepped(self._optimizer)
            self._stepped = True
        names = compiled.input_names
        fed = {name: self._prepared(t) for name, t in zip(names, tensors, strict=True)}
        if self._changed_inputs:
            _refuse_shared_inputs(names, tensors, self._changed_inputs)
        results = executable(fed, [group.values for group in self._groups])
        for output in compiled.program.outputs:
            if output.mutates:
                tensors[names.index(output.name)].copy_(results[output.name])
        positions = range(len(compiled.structure.tensors))
        return compiled.structure.rebuild([results[str(i)] for i in positions])

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the numbers of `optimizer` from the next call on, without compiling again.

        Raises:
            InputError: the update itself would differ: another rule, or other groups.
        """
        self._training_optimizer()
        if self._compiled is not None:
            parameters = self._parameters()
            self._groups = refresh(self._groups, optimizer, parameters, read=self._describe)
        self._optimizer = optimizer
        self._seen = _numbers_of(optimizer)

    def read_weights(self) -> None:
        """Copy parameters and buffers from the program to the model."""
        self._exchange(to_model=True)

    def write_weights(self, names: Collection[str] | None = None) -> None:
        """Copy parameters and buffers, or those with the given names, to the program."""
        self._exchange(to_model=False, names=names)

    def read_optimizer_state(self) -> None:
        """Write the optimiser's state on the IPUs into the torch optimiser, for a checkpoint."""
        optimizer = self._training_optimizer()
        export_state(self.states(), self._groups, optimizer, self._parameters())
        _, executable = self._ready()
        names = loss_scale_states(self.program)
        export_loss_scale({key: executable.whole(name) for key, name in names.items()}, optimizer)
        self._stepped = False

    def write_optimizer_state(self) -> None:
        """Take over the state that the torch optimiser holds, for instance from a checkpoint."""
        optimizer = self._training_optimizer()
        known = import_state(self._groups, optimizer, self._parameters())
        compiled, executable = self._ready()
        scale = import_loss_scale(optimizer)
        fresh = initial_tensors(compiled, known, private=True, loss_scale=scale)
        states = [name for update in updates(compiled.program) for _, names in update.states
                  for name in names]  # fmt: skip
        for name in (*states, *loss_scale_states(compiled.program).values()):
            executable.whole(name).copy_(fresh[name])
        executable.reload_states()
        self._stepped = False

    def reload_states(self) -> None:
        """Take notice that tensors of `states` were overwritten."""
        self.executable.reload_states()

    def _training_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise IpuError("the model was compiled for inference: it has no optimizer")
        return self._optimizer

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return read_arguments(self.model, args, kwargs)

    def _prepared(self, tensor: Tensor) -> Tensor:
        """The tensor that a stream reads: contiguous, without gradient, narrowed if wanted."""
        tensor = tensor.detach().contiguous()
        return narrowed(tensor) if self.options.narrow else tensor

    @torch.inference_mode(False)  # what is made here outlives the call
    def _compile(self, given: Arguments) -> None:
        options = self.options
        example = _first_micro_batch(given, self._batching.splits)
        groups: tuple[Group, ...] = ()
        if self._optimizer is not None:
            if self._live and self._executable is not None:
                self.read_optimizer_state()  # the new program goes on from there
            groups = self._describe(self._optimizer, self._parameters())
            self._seen = _numbers_of(self._optimizer)
        compiled = compile_model(
            self.model, example, options, groups, training=self.training, loss=self._loss
        )
        engine = self._engine or make_engine(options.stage_engine)
        if not self._own_weights:
            refuse_what_cannot_be_shared(compiled)
        known: States = {}
        scale: dict[str, Tensor] = {}
        if self._optimizer is not None and self._live:
            known = import_state(groups, self._optimizer, self._parameters())
            scale = import_loss_scale(self._optimizer)
        tensors = initial_tensors(compiled, known, private=self._own_weights, loss_scale=scale)
        seed = _seed(compiled.program) if options.seed is None else options.seed
        workers, threads = threads_for(compiled.program, options)
        executable = Executable(
            compiled.program,
            tensors,
            engine,
            self._batching,
            seed=seed,
            workers=workers,
            threads=threads,
            devices=compiled.devices,
            numbers=[group.values for group in groups],
            apart=micro_batches_apart(compiled.program, options),
            own_tensors=self._own_weights,
        )
        remember(compiled.program)
        self._changed_inputs = {o.name for o in compiled.program.outputs if o.mutates}
        self._watched = [
            (name, given, given.data_ptr())
            for name, given in compiled.tensors.items()
            if name in tensors and tensors[name].data_ptr() == given.data_ptr() != 0
        ]
        self._engine, self._groups, self._expected = engine, groups, ExpectedArguments(given)
        self._compiled, self._executable = compiled, executable

    def _follow_optimizer(self) -> None:
        """Take over new numbers from the optimiser's groups, as after a scheduler's step."""
        assert self._optimizer is not None
        if _numbers_of(self._optimizer) != self._seen:
            self.set_optimizer(self._optimizer)

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) if isinstance(self.model, nn.Module) else {}

    @property
    def groups(self) -> tuple[Group, ...]:
        """The optimiser's groups, with the numbers that are in force."""
        return self._groups

    def states(self) -> States:
        """The tensors of the optimiser's state, by parameter and name; after a change of them
        call `reload_states`."""
        states: States = {}
        compiled, executable = self._ready()
        for update in updates(compiled.program):
            for state, names in update.states:
                for parameter, name in zip(update.parameters, names, strict=True):
                    states.setdefault(parameter, {})[state] = executable.whole(name)
        return states

    def _exchange(self, *, to_model: bool, names: Collection[str] | None = None) -> None:
        compiled, executable = self._ready()
        with torch.no_grad(), outside_modes():  # Python may free an executor within a trace
            for variable in compiled.program.variables:
                if variable.kind not in ("parameter", "buffer"):
                    continue
                if names is not None and variable.name not in names:
                    continue
                ours, theirs = executable.whole(variable.name), compiled.tensors
                target, source = theirs[variable.name], ours
                if not to_model:
                    target, source = source, target
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
        if not to_model:
            executable.spread()

    def _ready(self) -> tuple[Compiled, Executable]:
        if self._compiled is None or self._executable is None:
            raise IpuError("the model is not compiled yet: call it, or its `compile`, first")
        return self._compiled, self._executable


def compile_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options | dict[str, Any] | None = None,
    *,
    loss: int | None = None,
) -> CompiledModel:
    """Make a whole training step one program: forward, loss, backward, accumulation, update.

    Each call trains the model's parameters in place.

    Args:
        model: its forward computes the loss, with a torch loss function or `identity_loss`.
        optimizer: torch.optim.SGD, Adam, AdamW or RMSprop over the model's parameters. Changes of
            its numbers, by a scheduler for instance, act from the next call on.
        options: see `ipu_dynamo.Options`.
        loss: index of the returned tensor to minimise, instead of the marked value.

    Example:
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in data:
            loss = step(x, y)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CompileError(
            f"training needs an optimizer, got {optimizer!r}",
            hint="pass torch.optim.SGD, Adam, AdamW or RMSprop, or use compile_inference",
        )
    if loss is not None and not isinstance(loss, int):
        raise CompileError(
            f"loss is {loss!r}, not the index of a returned tensor",
            hint="count the returned tensors from 0, nested ones in order",
        )
    step = CompiledModel(model, Options.read(options), optimizer=optimizer, loss=loss)
    follow_checkpoints(step, optimizer)
    return step


def compile_inference(
    model: Model,
    options: Options | dict[str, Any] | None = None,
    *,
    own_weights: bool = False,
) -> CompiledModel:
    """Make the forward pass one program, on the model's own parameters or on copies of them.

    Args:
        model: a module or a function on tensors; its train or eval mode is read when compiling.
        options: see `ipu_dynamo.Options`.
        own_weights: compute on copies of parameters and buffers, which `write_weights` renews
            when the model's have changed. What only the program can write may also be kept in the
            order that its matrix products read fastest.
    """
    return CompiledModel(model, Options.read(options), optimizer=None, own_weights=own_weights)


def _first_micro_batch(given: Arguments, splits: int) -> Arguments:
    """The rows of the first micro-batch of every tensor."""
    leaves = []
    for name, leaf in zip(given.names, given.leaves, strict=True):
        if isinstance(leaf, Tensor):
            rows = micro_batch_size(name, leaf.shape, splits)
            leaf = leaf.detach().contiguous()
            leaf = leaf.narrow(0, 0, rows) if leaf.dim() else leaf
        leaves.append(leaf)
    return Arguments(tuple(leaves), given.spec, given.names)


def _refuse_shared_inputs(
    names: Sequence[str], tensors: Sequence[Tensor], changed: Collection[str]
) -> None:
    """Raise when an input that the model changes in place shares memory with another one."""
    owner: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        other = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
        if other != name and (name in changed or other in changed):
            raise InputError(
                f"inputs {other} and {name} share memory, and the model changes one in place",
                hint="pass a clone of one of them",
            )


def _seed(program: Program) -> int:
    """A seed from torch's generator, for a program that draws random numbers."""
    draws = any(stream.source == "random" for stream in program.inputs)
    return int(torch.randint(2**62, ()).item()) if draws else 0


def _numbers_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Everything in the optimiser's groups but the parameters, tensors as their present value."""
    return [
        [_present(value) for key, value in group.items() if key != "params"]
        for group in optimizer.param_groups
    ]


def _present(value: Any) -> Any:
    """`value` as it is now: a tensor may change in place later."""
    if isinstance(value, tuple):
        return tuple(map(_present, value))
    return value.tolist() if isinstance(value, Tensor) else value
