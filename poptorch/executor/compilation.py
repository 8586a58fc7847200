"""Trace and compile the model of an executor."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.progress import job
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.arguments import (
    CallArguments,
    ExpectedCall,
    Parameters,
    bind,
    check_batches,
    warn_about_dictionaries,
)
from poptorch.checks import check_model, check_optimizer, check_program
from poptorch.core_errors import core_errors
from poptorch.enums import ConnectionType
from poptorch.executor.anchors import Anchors
from poptorch.executor.executable import ExecutableInfo, ExecutableInputs, inputs_of
from poptorch.executor.inspection import ExecutorInspection
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.executor.predictions import Predictions
from poptorch.executor.program_export import export_program, log_program
from poptorch.executor.replica_grouping import Grouping, groups_of_model, slices_of_model
from poptorch.executor.traced_model import TracedModel
from poptorch.host_weights import HostWeights
from poptorch.options import check_session
from poptorch.tracebacks import ShortTracebacks
from poptorch.translate import batching_factors, core_options
from poptorch.weights import DeviceWeights
from poptorch.wrapping import Wrapping


class Compilation(DeviceWeights, ExecutorInspection, Predictions):
    """The part of an executor that makes its program."""

    PoptorchParameter: type[nn.Parameter]
    PoptorchBuffer: type[Tensor]
    per_replica_params: dict[str, Grouping]
    _adapter: TracedModel | None
    _compile_seconds: float | None
    _executable: ExecutableInfo | None
    _executable_inputs: ExecutableInputs | None
    _expected: ExpectedCall | None
    _made_from: Any
    _parameters: Parameters
    _traced: Any
    _training: bool
    _update: OptimizerInUse | None
    _wrapping: Wrapping | None

    def _compile(self, call: CallArguments, ready: ReadyMade | None = None) -> None:
        with compile_lock(), self._trainers.followed():
            adapter, inputs = self._checked(call)
            started = time.perf_counter()
            with (
                ShortTracebacks(),
                self._attaching(),
                job("Graph compilation", show=self._options._show_progress_bar, at_once=True),
                core_errors(f"compiling {self._name()}", self._options),
            ):
                anchors = self._read_anchors(self._options, adapter, inputs)
                core = self._new_core(adapter, anchors, ready)
                with self._slices.one_for_each_group():
                    core.prepare(**inputs)
                core.executable.transfers = TransferTimes()
                buffers = [name for name, _ in adapter.named_buffers()]
                replicas = core.options.replicas
                check_program(core.program, self._traced, self._options, buffers, replicas=replicas)
                anchors.check(self._state_of(core))
            self._compile_seconds = time.perf_counter() - started
            if self._update is not None and self._options.connection_type != ConnectionType.Never:
                self._update.connect(self._state_of(core))
            self._weights.connect(HostWeights(core, self._slices))
            self._adapter, self._expected, self._anchors = adapter, ExpectedCall(call), anchors
            self._executable = ExecutableInfo(
                self._name(), core.program, self._training, self._options.replication_factor
            )
            self._executable_inputs = inputs_of(call)
            self._predicted, self._has_run = None, False
            self._core = core  # last: an interrupted compilation leaves no program
            if self._options.connection_type == ConnectionType.OnDemand:
                self.attachToDevice()  # where it fails, a later call of it attaches the program
            logger.debug("compiled %s:\n%s", self._name(), core.program.short())
            self._write_profile()
            export_program(core.program)
            kind = "training" if self._training else "inference"
            log_program(core.executable, self._options.log_dir, f"{self._name()}_{kind}")

    def __ipu_explain__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inspection:
        """Inspect the model as it is compiled, or would be for these arguments."""
        if self._core is not None:
            return self.__ipu_inspect__()

        def lowered() -> Inspection:
            call = bind(self._parameters, args, dict(kwargs))
            with (
                compile_lock(),
                self._trainers.followed(),
                ShortTracebacks(),
                core_errors(f"compiling {self._name()}", self._options),
            ):
                adapter, inputs = self._checked(call)
                anchors = self._read_anchors(self._options, adapter, inputs)
                core = self._new_core(adapter, anchors, None)
                with self._slices.one_for_each_group():
                    return core.__ipu_explain__((), inputs)

        return replace(self._weights.lock.run(lowered), title=self._title)

    def _checked(self, call: CallArguments) -> tuple[TracedModel, dict[str, Tensor]]:
        """The model to trace for a call, and the call's tensors by name."""
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
        inputs = dict(zip(named, self._prepared(named.values()), strict=True))
        shown = self._options._device_of_tensors
        adapter = TracedModel(self._traced, call, training=self._training, shown=shown)
        return adapter, inputs

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
            saved=ready is not None,
        )
        groups = groups_of_model(adapter, self.per_replica_params, options.replicas)
        self._slices = slices_of_model(adapter, self.per_replica_params, options.replicas)
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

    def _wrap(self) -> None:
        """Let the module fetch its weights; no-op when it does so already, or is a function."""
        if not isinstance(self._made_from, nn.Module):
            return
        if self._wrapping is not None:
            if self._wrapping.complete:
                return
            self._wrapping.remove()  # an interrupt has left a part of it
        wrapping = Wrapping(self._made_from, self._weights)
        self.PoptorchParameter = wrapping.parameter_class
        self.PoptorchBuffer = wrapping.buffer_class
        try:
            self._wrapping = wrapping
            wrapping.install()
        except BaseException:
            wrapping.remove()
            self._wrapping = None
            raise

    def _prepared(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors without gradient; warns if the caller's need one."""
        prepared = []
        for tensor in tensors:
            if tensor.requires_grad:
                logger.warning(
                    "Input tensor has requires_grad=True set. This tensor will be detached "
                    "because backward pass via inputs is not supported."
                )
                tensor = tensor.detach()
            prepared.append(tensor)
        return prepared

    def _name(self) -> str:
        return type(self._traced).__name__
