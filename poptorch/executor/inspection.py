"""Answer an executor's questions about the tensors inside its program."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ipu_dynamo.capture.capture import Placeholder, unused
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.weights.dual_view import DualView
from poptorch.errors import require
from poptorch.executor.anchors import Anchors
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.host_weights import ReplicaSlices
from poptorch.optimizer_state import StateOnDevice
from poptorch.optimizer_table import states_as_in_core
from poptorch.options import Options
from poptorch.tensor_names import tensor_names
from poptorch.translate import automatic_loss_scaling


class ExecutorInspection:
    """The part of an executor that knows names and anchors of tensors."""

    _core: CompiledModel | None
    _training: bool
    _anchors: Anchors | None
    _update: OptimizerInUse | None
    _slices: ReplicaSlices
    _weights: DualView

    def __ipu_inspect__(self) -> Inspection:
        """Inspect the model as it is compiled, for `ipu_dynamo.inspect`."""
        seen = Inspection("") if self._core is None else self._core.__ipu_inspect__()
        return replace(seen, title=self._title)

    @property
    def _title(self) -> str:
        return f"{'training' if self._training else 'inference'} executor of {self._name()}"

    def _name(self) -> str:
        """The model's name."""
        raise NotImplementedError

    def getTensorNames(self) -> list[str]:
        """The names of all tensors of the program, sorted."""
        require(self._core is not None, "Model must be compiled before calling getTensorNames")
        assert self._core is not None
        state = self._state
        own = () if state is None else (*state.numbers_now(), *state.tensors_now())
        return tensor_names(self._core, own)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The tensor that `Options.anchorTensor` calls so, from the last call.

        Args:
            short_name: the name that `Options.anchorTensor` was given.
        """
        require(self._anchors is not None, f"No tensor with name {short_name} found.")
        assert self._anchors is not None
        return self._anchors.value(short_name)

    def _state_of(self, core: CompiledModel) -> StateOnDevice | None:
        """The optimizer's state in a program that is not in use yet, if it trains."""
        if self._update is None:
            return None
        return StateOnDevice(core, self._update.reading, self._weights.lock, self._slices)

    @property
    def _state(self) -> StateOnDevice | None:
        """The optimizer's state on the device, if there is one."""
        return None if self._update is None else self._update.device

    def _read_anchors(self, options: Options, model: Any, arguments: Iterable[str]) -> Anchors:
        """The anchors of a compilation, of a model that is called with some tensors."""
        arguments, update = list(arguments), self._update
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        states: Mapping[str, str] = {}
        scale = None
        if update is not None:
            states = states_as_in_core(update.reading, names)
            if automatic_loss_scaling(options) is not None:
                roles = [Placeholder(name, "input") for name in (*names, *arguments)]
                scale = unused("loss_scale", roles)
        return Anchors(options, arguments, states, scale)
