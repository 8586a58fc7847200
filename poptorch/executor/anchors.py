"""Bring inner tensors of a program to the host, by PopTorch's names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ipu_dynamo.options.anchors import Anchor, AnchorKind, AnchorReturns
from ipu_dynamo.program import Output, TensorType
from ipu_dynamo.runtime.execute.host_io.batching import join
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.enums import OutputMode
from poptorch.errors import createPoptorchError, require
from poptorch.optimizer_state import StateOnDevice
from poptorch.options import Options
from poptorch.tensor_names import (
    FINAL_LOSS_SCALE,
    GRADIENT,
    UPDATED,
    input_names,
    is_of_optimizer,
)

_RETURNS: dict[int, AnchorReturns] = {
    OutputMode.All: "all",
    OutputMode.EveryN: "every",
    OutputMode.Final: "final",
    OutputMode.Sum: "sum",
}
_LOGGED = {"all": "ALL", "every": "EVERYN", "final": "FINAL", "sum": "Sum"}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A tensor, and of which micro-batches it is wanted."""

    name: str
    returns: AnchorReturns
    period: int


class Anchors:
    """The anchors of one compilation.

    Args:
        options: of the executor.
        arguments: names of the tensors among the call's arguments, in order.
        states: the core's names of states that are the same in PopTorch, by PopTorch's names.
        loss_scale: the core's name of a loss scale that follows the gradients; None: none does.

    Attributes:
        asked: the tensors that are asked for, by short name.
        of_core: those that the core knows, by short name.

    Raises:
        poptorch.Error: there is no loss scale that follows the gradients, and one is wanted.
    """

    def __init__(
        self,
        options: Options,
        arguments: Iterable[str],
        states: Mapping[str, str],
        loss_scale: str | None,
    ) -> None:
        asked = {
            short: _asked(options, *wanted) for short, wanted in options.anchored_tensors.items()
        }
        self.asked, self._last = asked, dict[str, Tensor]()
        values = {**input_names(arguments), **states}
        if loss_scale is not None:
            values[FINAL_LOSS_SCALE] = loss_scale
        elif any(one.name == FINAL_LOSS_SCALE for one in asked.values()):
            raise createPoptorchError(
                f"there is no tensor {FINAL_LOSS_SCALE} without automatic loss scaling: set "
                "Training.setAutomaticLossScaling(True)",
                id="option",
            )
        own = {s for s, one in asked.items() if is_of_optimizer(one.name)}
        self._of_optimizer = {s for s in own if asked[s].name not in values}
        self.of_core = {
            short: _anchor(one, values)
            for short, one in asked.items()
            if short not in self._of_optimizer
        }

    def check(self, state: StateOnDevice | None) -> None:
        """Log the anchors of a compiled model.

        Raises:
            poptorch.Error: the optimizer does not have the tensor, or not for every micro-batch.
        """
        numbers = state.numbers_now() if state is not None else {}
        tensors = state.tensors_now() if state is not None else {}
        for short, one in self.asked.items():
            if short in self._of_optimizer and one.name not in {**numbers, **tensors}:
                raise createPoptorchError(
                    f"anchorTensor {short}: the program has no tensor {one.name}; getTensorNames() "
                    "of the compiled model lists those that it has",
                    id="option",
                )
            if short in self._of_optimizer and one.name in tensors and one.returns != "final":
                raise createPoptorchError(
                    f"anchorTensor {short}: {one.name} can be had as it is when a call ends: use "
                    "poptorch.OutputMode.Final",
                    id="option",
                )
            logger.debug("anchor ( %s %s/%s )", one.name, _LOGGED[one.returns], one.period)

    def follow(self, core: CompiledModel, state: StateOnDevice | None) -> None:
        """Take the values of a call that is complete."""
        values = {short: core.anchored(short) for short in self.of_core}
        if self._of_optimizer and state is not None:
            tensors = {**state.numbers_now(), **state.tensors_now()}
            for short in self._of_optimizer:
                values[short] = _repeated(tensors[self.asked[short].name], self.asked[short], core)
        self._last = values

    def value(self, short: str) -> Tensor:
        """The value that an anchor had in the last call.

        Raises:
            AssertionError: there is no anchor of this name, or was no call.
        """
        require(short in self._last, f"No tensor with name {short} found.")
        return self._last[short]


def _asked(options: Options, name: str, default: bool, mode: int, period: int) -> _Asked:
    if default:
        mode, period = options.output_mode, options.output_return_period
    return _Asked(name, _RETURNS[mode], period)


def _anchor(one: _Asked, values: Mapping[str, str]) -> Anchor:
    """The core's form of an anchor."""
    kinds: dict[str, AnchorKind] = {GRADIENT: "gradient", UPDATED: "update"}
    for prefix, kind in kinds.items():
        if one.name.startswith(prefix):
            return Anchor(one.name.removeprefix(prefix), kind, one.returns, one.period)
    return Anchor(values.get(one.name, one.name), "value", one.returns, one.period)


def _repeated(value: Tensor, one: _Asked, core: CompiledModel) -> Tensor:
    """A value that is the same in all micro-batches of a call, as an output of them would be."""
    batching, type_ = core.executable.batching, TensorType.of(value)
    output = Output(one.name, type_, one.returns, one.period)
    count = sum(map(sum, batching.kept(output))) * batching.replicas
    return join(output, [value.clone() for _ in range(count)], batching)
