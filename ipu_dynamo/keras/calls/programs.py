"""Keep the programs of a model, and run them: whole executions on Keras' own variables."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar

import keras
from keras.layers import BatchNormalization
from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.keras.attach.model_state import STATE, state_of
from ipu_dynamo.keras.calls.call_buffers import CallBuffers, leaves
from ipu_dynamo.keras.calls.core_options import accumulator_dtypes, core_options, reduced_loss
from ipu_dynamo.keras.calls.joined_results import JoinedResults, Results
from ipu_dynamo.keras.calls.model_memory import ModelMemory, memory_of
from ipu_dynamo.keras.calls.program_origin import origin_of
from ipu_dynamo.keras.calls.python_values import different, python_values
from ipu_dynamo.keras.private.keras_graphs import flat_layers
from ipu_dynamo.keras.private.stateless_names import (
    build_for,
    tensor_of,
)
from ipu_dynamo.keras.settings.notices import notice
from ipu_dynamo.keras.stages.stage_plan import StagePlan, stage_plan
from ipu_dynamo.keras.step.assigned_weights import Receivers, receivers_of
from ipu_dynamo.keras.step.machine_shape import (
    CallShape as CallShape,
)
from ipu_dynamo.keras.step.machine_shape import (
    call_shape as call_shape,
)
from ipu_dynamo.keras.step.machine_shape import (
    micro_batches_needed as micro_batches_needed,
)
from ipu_dynamo.keras.step.machine_shape import (
    replica_count as replica_count,
)
from ipu_dynamo.keras.step.machine_shape import (
    stage_ipus,
)
from ipu_dynamo.keras.step.step_module import StepModule
from ipu_dynamo.keras.step.step_variables import Kind, StepVariable, step_variables
from ipu_dynamo.keras.step.update import UpdateTrace, optimizer_states, traced_update
from ipu_dynamo.progress import begin, job
from ipu_dynamo.whole_step.api import compile_inference, compile_training
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.weights.dual_view import DualView

OnStep = Callable[[int, Sequence[Results]], None]

Made = TypeVar("Made")
_calls = count()


def program_for(model: Any, kind: Kind, batch: Any, shape: CallShape) -> "StepProgram":
    """The program of a model for batches like this one; compiled if none fits.

    It is compiled again if `compile` was called, a variable has another tensor, a layer was frozen,
    or an attribute of the optimiser that is constant in the program has changed.

    Args:
        batch: `x`, or a tuple `(x, y, sample_weight)` of which some may be missing or None.
        shape: as `call_shape` gives it.
    """
    batch, shape, plan = _planned(model, kind, batch, shape)
    programs = state_of(model).programs
    signature = tuple(
        None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in leaves(batch)
    )
    key = kind, shape, signature
    program = programs.get(key)
    if program is None or not program.fits():
        program = StepProgram(model, kind, batch, shape, plan)
        program.compile(batch)
        programs[key] = program
    return program


def _planned(
    model: Any, kind: Kind, batch: Any, shape: CallShape
) -> tuple[Any, CallShape, StagePlan | None]:
    """The parts of a batch, the shape of an execution on it, and the stages of the model."""
    batch = keras.utils.unpack_x_y_sample_weight(batch)
    build_for(model, batch, compiled=kind != "predict")
    plan = stage_plan(model, batch[0], training=kind == "fit")
    if (plan is not None) != shape.pipelined:  # a subclass may tell of its stages in `call` only
        other = call_shape(model, kind, shape.steps)
        if other.replicas != shape.replicas:
            raise RuntimeError(
                f"{model.name} turns out to have {plan and plan.num_stages} pipeline stages, which "
                "leaves another number of replicas: build the model before its first call"
            )
        shape = other
    if plan is not None and kind == "fit":
        _notice_moving_statistics(model)
    return batch, shape, plan


def _notice_moving_statistics(model: Any) -> None:
    """Say once that micro-batches in flight move statistics that others still read."""
    norms = [layer for layer in flat_layers(model) if isinstance(layer, BatchNormalization)]
    names = ", ".join(layer.name for layer in norms if 0 < layer.momentum < 1)
    if names:
        text = (
            f"the moving statistics of {names} in the pipelined model {model.name} are not "
            "properly updated: each micro-batch moves them, and not the batch of an update"
        )
        notice(state_of(model).notices, "moving statistics", text)


def _changes(model: Any, paths: Iterable[str]) -> str:
    return (
        f"a step of {model.name} changes {', '.join(sorted(paths))} in Python, which runs once, "
        "while the step is traced: keep it in a keras.Variable to change it for each batch"
    )


def explain_step(model: Any, kind: Kind, batch: Any, shape: CallShape) -> Inspection:
    """Describe the program that `program_for` would return, without compiling it."""
    batch, shape, plan = _planned(model, kind, batch, shape)
    return StepProgram(model, kind, batch, shape, plan).explain(batch)


def inspected(model: Any) -> Inspection:
    """Describe the programs of a model's steps so far."""
    state = vars(model).get(STATE)
    programs = [] if state is None else [*state.programs.values()]
    last = max(range(len(programs)), key=lambda place: programs[place].last_call, default=0)
    parts = [program.compiled.__ipu_inspect__() for program in programs]
    return Inspection.joined(f"Keras model {model.name}", parts, last)


class StepProgram:
    """A compiled step of a model, for batches of one shape.

    Invariant: between calls Keras' variables hold the program's values. For values of several
    replicas, it is the value that the host shall see.
    """

    def __init__(
        self, model: Any, kind: Kind, batch: Any, shape: CallShape, plan: StagePlan | None
    ) -> None:
        self.model, self.kind, self.shape, self._plan = model, kind, shape, plan
        self.last_call = next(_calls)  # grows with each call of any program
        self._memory: ModelMemory = memory_of(model)
        self._ipus = stage_ipus(model)
        self._buffers = CallBuffers(batch, shape.steps * shape.replicas)
        self._variables: tuple[StepVariable, ...] = ()
        self._module: StepModule
        self._update: UpdateTrace | None = None
        self._states = DualView(self)  # of the optimizer

    def compile(self, batch: Any) -> None:
        """Compile for batches like this one."""
        model, kind, shape = self.model, self.kind, self.shape
        before = python_values(model, kind)
        with job(f"compiling {kind} of {model.name}"):
            begin("tracing")
            self._program, _ = self._traced_by(CompiledModel.prepare, batch)
        self._module.constants.keep()
        if self._update is not None:
            self._update.constants.keep()
        self._origin = origin_of(model, kind, self._variables, self._read_by_update)
        # values that the step itself changes in Python would never be the same again
        self._traced = different(before, self._origin.values) & before.keys()
        if self._traced:
            notice(state_of(model).notices, "values of Python", _changes(model, self._traced))
        # an input that a layer or a metric writes in place is an output, too, by its own name
        outputs = [o for o in self._program.program.outputs if o.name.isdigit()]
        shapes = [output.type.shape for output in outputs]
        self._results = JoinedResults(shapes, shape.replicas, behind_loss=kind == "fit")

    @property
    def compiled(self) -> CompiledModel:
        """The core's program: to print, to explain, to save."""
        return self._program

    def fits(self) -> bool:
        """Whether the model is unchanged since it was traced."""
        variables = self._list_variables()
        present = origin_of(self.model, self.kind, variables, self._read_by_update)
        return self._origin.is_same(present, self._traced) and self._constants_same()

    def _constants_same(self) -> bool:
        update = self._update
        return self._module.constants.same() and (update is None or update.constants.same())

    def run(
        self, batches: Sequence[Any], on_step: OnStep | None = None
    ) -> Sequence[Sequence[Results]]:
        """Run one execution.

        Args:
            batches: as many as the steps of all replicas, in turn: batch i on replica i mod r.
            on_step: is called with each step and its results, in order, on this thread, as soon as
                they are there.

        Returns:
            For each step the results of every replica: logs by name, or outputs.
        """
        self.last_call = next(_calls)
        inputs = self._buffers.filled(batches)
        send = None if on_step is None else self._sender(on_step)
        results = self._states.lock.run(partial(self._run, inputs, send))
        return self._results.steps(results)

    def _run(self, inputs: Sequence[Any], send: Callable[[int, Any], None] | None) -> Any:
        with self._exchanged():
            return self._program(*inputs, on_send=send)

    def _sender(self, on_step: OnStep) -> Callable[[int, Any], None]:
        """Make the function that the core calls with each device iteration."""

        def sent(iteration: int, results: Any) -> None:
            first = iteration * self.shape.accumulation
            for number, results_of_step in enumerate(self._results.steps(results)):
                on_step(first + number, results_of_step)

        return sent

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        """Copy the host's assignments to the program, and afterwards the program's values to the
        host, also if it fails."""
        own, training = self._own_of_replicas, self.kind == "fit"
        replicated = self._memory.replicas(self.shape.replicas)
        if own:
            replicated.take(own)
        if training:
            self._states.modify_host(self._states.count_host_writes())
            self._states.sync_device()
            self._states.modify_device()
        try:
            yield
        finally:
            if training and self._program.has_weights():
                try:
                    self._states.sync_host()
                finally:
                    self._states.count_host_writes()  # its own, also of an interrupted copy
            if own:
                replicated.publish(own, state_of(self.model).settings.metric_reduction)

    @property
    def _own_of_replicas(self) -> list[StepVariable]:
        """Variables of which each replica has its own."""
        if self.shape.replicas == 1:
            return []
        return [v for v in self._variables if not v.is_parameter]

    @property
    def _read_by_update(self) -> list[Any]:
        return list(self._memory.read_by_update.values())

    def _list_variables(self) -> tuple[StepVariable, ...]:
        return step_variables(self.model, self.kind, outside=self._memory.step_variables)

    def explain(self, batch: Any) -> Inspection:
        """Describe the program of the step for batches like this one; compile nothing."""

        def explained(program: CompiledModel, *inputs: Any) -> Inspection:
            return program.__ipu_explain__(inputs, {})

        return self._traced_by(explained, batch)[1]

    def _traced_by(self, trace: Callable[..., Made], batch: Any) -> tuple[CompiledModel, Made]:
        """Trace the step, and again each time that a trace needs another variable.

        A draw without a seed needs a generator of its stage. A weight that the step assigns needs
        an input of the update for its value.

        Args:
            trace: gets a program that is not compiled yet, and the inputs of a call.
        """
        inputs = self._buffers.filled([batch] * (self.shape.steps * self.shape.replicas))
        while True:
            self._module = module = self._new_module()
            program = self._core_program(module)
            try:
                made = trace(program, *inputs)
            except Exception:
                if not self._supplies(module):
                    raise
                continue
            self._check_update(module)
            return program, made

    def _check_update(self, module: StepModule) -> None:
        """Refuse an update that reads a variable which its step assigns: it has an old copy.

        Raises:
            CompileError: the update reads such a variable.
        """
        for variable in self._read_by_update:
            if id(variable) in module.written:
                raise CompileError(
                    f"the update of {self.model.optimizer.name} reads {variable.path}, which the "
                    "step assigns",
                    hint="assign it in a callback, or read optimizer.iterations",
                )

    def _supplies(self, module: StepModule) -> bool:
        """Add the variable or generator that a trace has missed; whether there was one."""
        memory, stage, assigned = self._memory, module.without_generator, module.without_receiver
        read = module.without_tensor
        if read is not None and id(read) not in memory.outside:
            memory.outside[id(read)] = read
            return True
        of_update = None if self._update is None else self._update.without_state
        if of_update is not None and id(of_update) not in memory.read_by_update:
            memory.read_by_update[id(of_update)] = of_update
            return True
        if stage is not None and stage not in memory.generators:
            memory.make_generator(stage)
            return True
        if assigned is not None and id(assigned) not in memory.assigned:
            memory.assigned[id(assigned)] = assigned
            return True
        return False

    def _new_module(self) -> StepModule:
        self._variables = self._list_variables()
        own = {id(v) for v in self._own_of_replicas}
        replicated = self._memory.replicas(self.shape.replicas)
        return StepModule(
            self.model,
            self.kind,
            [
                (v, replicated.tensor(v) if id(v) in own else tensor_of(v.variable))
                for v in self._variables
            ],
            reduced=reduced_loss(self.model, self.shape),
            generators=self._memory.generators,
            plan=self._plan,
            receivers=self._receivers(),
            shape=self.shape,
        )

    def _receivers(self) -> Receivers:
        return receivers_of(self._variables, self._memory.assigned)

    def _core_program(self, module: StepModule) -> CompiledModel:
        model, shape, variables = self.model, self.shape, self._variables
        options = core_options(model, self.kind, shape, self._ipus, variables)
        if self.kind != "fit":
            return compile_inference(module, options)
        update, self._update = traced_update(
            model.optimizer, variables, self._receivers(), self._read_by_update
        )
        program = compile_training(
            module,
            update,
            options,
            loss=0,
            accumulator_dtypes=accumulator_dtypes(model, shape.pipelined, variables),
        )
        states = optimizer_states(model.optimizer, variables, self._read_by_update)
        tensors = {name: tensor_of(variable) for name, variable in states.items()}
        self._states.connect(_OptimizerStates(program, tensors))
        self._states.count_host_writes()
        return program


class _OptimizerStates:
    """The states of an optimizer in Keras' variables, and in a program.

    A program computes on Keras' own tensors, except for these. Its optimizer writes all of them.

    Args:
        tensors: of the variables. A program fits no model that has others, so copies always take
            all states.
    """

    def __init__(self, program: CompiledModel, tensors: Mapping[str, Tensor]) -> None:
        self._program, self._tensors = program, tensors
        self.written = frozenset(tensors)

    def weights(self) -> Mapping[str, Tensor]:
        """Keras' tensors by the names of the states."""
        return self._tensors

    def has_weights(self) -> bool:
        """Whether the program's states are those of a complete step."""
        return self._program.has_weights()

    def read_weights(self, names: Collection[str]) -> None:
        """Copy all states to Keras' variables."""
        self._program.read_optimizer_state()

    def write_weights(self, names: Collection[str]) -> None:
        """Copy all states to the program."""
        self._program.write_optimizer_state()
