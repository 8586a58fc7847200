"""Present a user's model to the core as a module that takes and returns flat lists of tensors."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ipu_dynamo.capture.layers.dynamic_slices import SliceRules, slicing_by
from ipu_dynamo.capture.private.tracing import is_fake
from poptorch._logging import logger
from poptorch.arg_parsers import rebuilt, tensors_of
from poptorch.arguments import Call
from poptorch.compile_hooks import compile_hooks
from poptorch.slicing import dynamic_slice
from poptorch.substitutions import substitutions
from poptorch.tracing import tracing

_SLICES = SliceRules(
    dynamic_slice,
    reading="poptorch.dynamic_slice(tensor, dim, start, size, step)",
    writing="poptorch.dynamic_update(input, src, dim, start, size)",
)


class TracedModel(nn.Module):
    """A model with the arguments of one call.

    Its submodules, parameters and buffers are the model's own, under the model's own names.

    Args:
        model: the user's module or function.
        call: the arguments that it is traced with.
        training: a program is made that trains.
        shown: the type of device that tensors show while forward runs.
    """

    _model: Callable[..., Any]
    _call: Call
    _returned: Any
    _training: bool
    _shown: str

    def __init__(
        self, model: Callable[..., Any], call: Call, *, training: bool, shown: str = "ipu"
    ) -> None:
        super().__init__()
        self.__dict__["_model"], self.__dict__["_call"] = model, call  # no submodule
        self.__dict__.update(_returned=None, _training=training, _shown=shown)

    @property
    def call(self) -> Call:
        """The arguments that it is traced with."""
        return self._call

    def forward(self, **tensors: Tensor) -> list[Any]:
        """Call the model with `tensors` in place of the call's; return its leaves."""
        args, kwargs = self._call.rebuild(tensors.values())
        seen = next(iter([*tensors.values(), *self.parameters()]), None)
        device = "cpu" if seen is None else seen.device
        traced = tracing(device, training=self._training, shown=self._shown)
        with traced, compile_hooks(), substitutions(), slicing_by(_SLICES):
            result = self._model(*args, **kwargs)
        self.__dict__["_returned"] = result
        leaves = list(tensors_of(result))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not is_fake(leaf):
                logger.warning(
                    "Output expected to be on the IPU but is on %s: it is returned as it is now",
                    leaf.device,
                )
        return leaves

    def restore(self, leaves: list[Any]) -> Any:
        """The model's return value with these leaves."""
        return rebuilt(self._returned, iter(leaves))

    def _get_name(self) -> str:
        return str(getattr(self._model, "__name__", type(self._model).__name__))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(self._model, nn.Module):
            yield from self._model.named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if isinstance(self._model, nn.Module):
            yield from self._model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self._model, nn.Module):
            yield from self._model.named_buffers(*args, **kwargs)
