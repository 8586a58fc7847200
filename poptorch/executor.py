"""Run a model on IPUs: compile at the first call, then keep weights and optimizer in step."""

import datetime
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.anchors import Anchors
from poptorch.arguments import (
    Call,
    ExpectedCall,
    bind,
    check_batches,
    parameters_of,
    warn_about_dictionaries,
)
from poptorch.checks import check_model, check_optimizer, check_program
from poptorch.core_errors import core_errors
from poptorch.enums import CommGroupType, ConnectionType, MeanReductionStrategy
from poptorch.errors import createPoptorchError, require
from poptorch.executable import Executable, ExecutableInputs, inputs_of
from poptorch.executor_module import ExecutorModule
from poptorch.inspection import Inspection
from poptorch.missing import executor_member
from poptorch.optimizer_in_use import OptimizerInUse
from poptorch.options import Options, check_session, mean_reduction_strategy
from poptorch.outputs import refuse_backward
from poptorch.perf_counters import PerfCounters
from poptorch.printing import module_repr
from poptorch.program_export import export_program, log_program, program_json
from poptorch.progress import compilation_bar
from poptorch.random_state import DeviceRandomState
from poptorch.replica_grouping import (
    ExecutorParameter,
    Grouping,
    groups_of_model,
    read_grouping,
    slices_of_model,
)
from poptorch.saving.executor_part import SavedPrograms
from poptorch.tracebacks import ShortTracebacks
from poptorch.traced_model import TracedModel
from poptorch.trainers import note_trainers
from poptorch.translate import automatic_loss_scaling, batching_factors, core_options
from poptorch.unwrapping import rewrap_model
from poptorch.wrapping import Wrapping


class PoplarExecutor(SavedPrograms, DeviceRandomState, PerfCounters, Inspection):
    """A model on IPUs. Made by `trainingModel` and `inferenceModel`.

    Args:
        model: what is called while tracing; shares its tensors with `user_model`.
        options: the executor's own, complete and frozen.
        training: whether calls train.
        poptorch_version: of the package that made it.
        optimizer: what trains.
        user_model: the user's module or function.

    Attributes:
        per_replica_params: what `replicaGrouping` was called with, by the parameter's dotted name.
    """

    def __init__(
        self,
        model: Any,
        options: Options,
        training: bool,
        poptorch_version: str,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: Any = None,
    ) -> None:
        made_from = model if user_model is None else user_model
        super().__init__(options, model)
        self._traced, self._training, self._made_from = model, training, made_from
        self._poptorch_version = poptorch_version
        self._parameters = parameters_of(model)
        self.per_replica_params: dict[str, Grouping] = {}
        self._adapter: TracedModel | None = None
        self._anchors: Anchors | None = None
        self._expected: ExpectedCall | None = None
        self._warned_about_layout = self._warned_about_mode = False
        self._executable: Executable | None = None
        self._executable_inputs: ExecutableInputs | None = None
        self._compile_seconds: float | None = None
        self._wrapping: Wrapping | None = None
        self._update: OptimizerInUse | None = None
        if training:
            assert optimizer is not None, "training needs an optimizer"
            self._update = OptimizerInUse(
                optimizer,
                relaxed=options._relax_optimizer_checks,
                automatic_loss_scaling=automatic_loss_scaling(options) is not None,
            )
            self._wrap()

    # what it is

    @property
    def model(self) -> Any:
        """The wrapped module."""
        return self._made_from if self._training else self._traced

    @property
    def options(self) -> Options:
        """The executor's own options, frozen."""
        return self._options

    @property
    def _user_model(self) -> Any:
        """As libraries for PopTorch call it."""
        return self.model

    @property
    def _model(self) -> Any:
        """What is called while tracing, as libraries for PopTorch call it."""
        return self._traced

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """What trains, as libraries for PopTorch call it."""
        return None if self._update is None else self._update.optimizer

    def compilationTime(self) -> datetime.timedelta:
        """How long the last compilation took."""
        if self._compile_seconds is None:
            raise createPoptorchError(
                "Please compile the model before obtaining compilation time.", id="call"
            )
        if not self._options._show_progress_bar:
            raise createPoptorchError(
                "Please set showCompilationProgressBar option to obtain compilation time.",
                id="option",
            )
        return datetime.timedelta(seconds=self._compile_seconds)

    def __repr__(self) -> str:
        model = self.model
        return module_repr(model) if isinstance(model, nn.Module) else repr(model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_made_from" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if (missing := executor_member(name)) is not None:
            raise missing
        value = getattr(self.model, name)
        if isinstance(value, nn.Parameter):
            return ExecutorParameter(value, partial(self._group_replicas, name))
        return self._present(value)

    def _present(self, value: Any) -> Any:
        """A module or parameter inside the model as users get it; anything else as it is."""
        if isinstance(value, nn.Module):
            return ExecutorModule(value, self._present)
        if isinstance(value, nn.Parameter):
            names = (name for name, x in self._traced.named_parameters() if x is value)
            if name := next(names, ""):
                return ExecutorParameter(value, partial(self._group_replicas, name))
        return value

    def _group_replicas(self, name: str, *grouping: Any) -> None:
        if self.isCompiled():
            raise createPoptorchError(
                f"replicaGrouping of {name}: the model is compiled already; call it before, or "
                "after destroy()",
                id="call",
            )
        if CommGroupType(grouping[0]) is CommGroupType.All:
            return  # all replicas share it, as they do anyway
        replicas = self._options.replication_factor
        self.per_replica_params[name] = read_grouping(name, *grouping, replicas=replicas)

    # running

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls with arguments like these, without running them."""
        if self.isCompiled():
            logger.warning("The model is compiled already: call destroy() to compile it again")
            return
        self._follow()
        self._weights.alone(lambda: self._compile(bind(self._parameters, args, kwargs)), long=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, compiling it first if needed.

        Args:
            args, kwargs: as the model's forward takes them, with dim 0 of each tensor multiplied
                by device iterations, gradient accumulation and input groups.

        Returns:
            what forward returned while it was traced, with the tensors of this call.
        """
        require(
            self._options.connection_type != ConnectionType.Never,
            "Trying to run a model on an offline device (ConnectionType.Never): use "
            "model.compile(inputs) instead of model(inputs)",
        )
        self._follow()

        def run() -> Any:
            call = bind(self._parameters, args, kwargs)
            if not self.isCompiled():
                self._compile(call)
            if not self._attached:
                self._attach()
            return self._run(call)

        return self._weights.alone(run, long=True)

    def _debugGetPopartIR(self) -> str:
        """What was compiled, as JSON: see `program_json`."""
        return program_json(self._ready().program)

    def destroy(self) -> None:
        """Drop the program; the host keeps the newest weights, in the classes they had first."""

        def drop() -> None:
            self.copyWeightsToHostIfNeeded()
            if self._update is not None:
                self._update.connect(None)
            self._core = self._adapter = self._expected = self._executable = None
            self._anchors = None
            self._compile_seconds = None
            self._detach()
            if self._wrapping is not None:
                self._wrapping.remove()
                self._wrapping = None

        if self._wrapping is not None:
            rewrap_model(self._made_from)  # what is removed is there
            note_trainers()  # the classes will not show any more that this one has trained
        self._weights.alone(drop)

    def __del__(self) -> None:
        if self.__dict__.get("_wrapping") is not None and not sys.is_finalizing():
            with unrecorded():  # it may be freed while a model is traced
                self.destroy()

    def _compile(self, call: Call, ready: ReadyMade | None = None) -> None:
        check_session(self._options.toDict())
        splits, factors = batching_factors(self._options)
        check_batches(call, splits=splits, factors=factors)
        check_model(self._traced)
        warn_about_dictionaries(call)
        if self._update is not None:
            check_optimizer(self._traced, self._update.optimizer)
            self._wrap()
            self._update.read_again()
        named = {name: x for name, x in call.leaves() if isinstance(x, Tensor)}
        inputs = self._prepared(named.values())
        adapter = TracedModel(self._traced, call, training=self._training)
        started = time.perf_counter()
        with (
            ShortTracebacks(),
            self._attaching(),
            compilation_bar(show=self._options._show_progress_bar),
            core_errors(f"compiling {self._name()}", self._options),
        ):
            anchors = self._read_anchors(self._options, adapter, named)
            core = self._new_core(adapter, anchors, ready)
            with self._weights.slices.one_for_each_group():
                core.compile(**dict(zip(named, inputs, strict=True)))
            core.executable.transfers = TransferTimes()
            buffers = [name for name, _ in adapter.named_buffers()]
            check_program(core.program, self._traced, self._options, buffers)
            anchors.check(self._state_of(core))
        self._compile_seconds = time.perf_counter() - started
        if self._update is not None and self._options.connection_type != ConnectionType.Never:
            self._update.connect(core, self._weights)
        self._weights.compiled(core)
        self._adapter, self._expected, self._anchors = adapter, ExpectedCall(call), anchors
        self._executable = Executable(
            self._name(), core.program, self._training, self._options.replication_factor
        )
        self._executable_inputs = inputs_of(call)
        self._core = core  # last: an interrupted compilation is none
        if self._options.connection_type == ConnectionType.OnDemand:
            self.attachToDevice()  # where it fails, there is a program that can be attached later
        logger.debug("compiled %s:\n%s", self._name(), core.program.short())
        export_program(core.program)
        kind = "training" if self._training else "inference"
        log_program(core.executable, self._options.log_dir, f"{self._name()}_{kind}")

    def _new_core(
        self, adapter: TracedModel, anchors: Anchors, ready: ReadyMade | None
    ) -> CompiledModel:
        update = self._update
        options = core_options(
            self._options,
            training=self._training,
            loss_scale=update.loss_scale if update else 1.0,
            loss_scale_is_variable=update is not None and update.loss_scale_is_variable,
            combined_accumulator=update is not None and update.combined_accumulator,
        )
        groups = groups_of_model(adapter, self.per_replica_params, options.replicas)
        self._weights.slices = slices_of_model(adapter, self.per_replica_params, options.replicas)
        options = replace(options, replica_groups=groups, anchors=anchors.of_core)
        if update is None:
            return CompiledModel(
                adapter,
                options,
                optimizer=None,
                own_weights=True,
                settings_stay=True,
                ready=ready,
            )
        return CompiledModel(
            adapter,
            options,
            optimizer=update.optimizer,
            own_weights=True,
            describe=update.groups,
            live=False,
            settings_stay=True,
            may_train_nothing=True,
            ready=ready,
        )

    def _run(self, call: Call) -> Any:
        assert self._core is not None
        assert self._adapter is not None
        assert self._anchors is not None
        assert self._expected is not None
        inputs = self._prepared(self._expected.tensors(call))
        self._say_changed_mode(self._core)
        self._send(self._core)
        if self._update is not None:
            self._update.upload()
            self._weights.steps_begin()  # first: a call that fails may have made some of its steps
            self._update.steps_begin()
        with core_errors(f"running {self._name()}", self._options):
            leaves = self._core.run(inputs)
            self._anchors.follow(self._core, self._state)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                refuse_backward(leaf)
        return self._adapter.restore(leaves)

    # optimizer

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the numbers of an optimizer, the same or another, from the next call on."""
        if self._update is None:
            raise createPoptorchError(
                "setOptimizer is for training: this model infers only", id="optimizer"
            )
        update = self._update

        def use() -> None:
            self._check_strategy(optimizer)
            update.replace(optimizer, compiled=self.isCompiled())
            if self._core is not None:
                with core_errors("setting the optimizer", self._options):
                    self._core.set_optimizer(optimizer)

        self._weights.alone(use, long=True)

    def _check_strategy(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt the mean reduction strategy that an optimizer's accumulators ask for."""
        training = self._options.Training
        wanted = mean_reduction_strategy(self._options, optimizer)
        if wanted == training.meanAccumulationAndReplicationReductionStrategy:
            return
        if self.isCompiled():
            raise ValueError(
                "Invalid optimizer: the new optimizer would require changing "
                "options.Training.meanAccumulationAndReplicationReductionStrategy to "
                f"poptorch.MeanReductionStrategy.{MeanReductionStrategy(wanted).name} but the "
                "executable is already compiled."
            )
        self._options._unfreeze()
        training.set(meanAccumulationAndReplicationReductionStrategy=wanted)
        self._options._freeze()

    # parts

    def _wrap(self) -> None:
        """Let the module fetch its weights; no-op when it does so already, or is a function."""
        if self._wrapping is not None or not isinstance(self._made_from, nn.Module):
            return
        wrapping = self._wrapping = Wrapping(self._made_from, self._weights)
        try:
            wrapping.install()
        except BaseException:
            wrapping.remove()
            self._wrapping = None
            raise
        self.PoptorchParameter = wrapping.parameter_class
        self.PoptorchBuffer = wrapping.buffer_class

    def _prepared(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors without gradient; a warning where the caller's have one, or gaps."""
        prepared = []
        for tensor in tensors:
            if tensor.requires_grad:
                if not self.isCompiled():
                    logger.warning(
                        "Input tensor has requires_grad=True set. This tensor will be detached "
                        "because backward pass via inputs is not supported."
                    )
                tensor = tensor.detach()
            if not tensor.is_contiguous() and not self._warned_about_layout:
                logger.warning("An input is not contiguous: it is copied at every call")
                self._warned_about_layout = True
            prepared.append(tensor)
        return prepared

    def _say_changed_mode(self, core: CompiledModel) -> None:
        """Warn once where train() or eval() was called since: PopTorch takes no notice."""
        if not self._warned_about_mode and (change := core.changed_mode) is not None:
            self._warned_about_mode = True
            logger.warning(
                "%s: the program goes on in the mode that it was compiled in. Call destroy() on "
                "the executor to compile for the other one, or make an executor for each",
                change[0].upper() + change[1:],
            )

    def _name(self) -> str:
        return type(self._traced).__name__
