"""Present a user's model to the core as a module that takes and returns flat lists of tensors."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

from torch import Tensor, nn

from ipu_dynamo.capture.layers.dynamic_slices import SliceRules, slicing_by
from ipu_dynamo.capture.private.tracing import is_fake
from ipu_dynamo.whole_step.calls.no_backward import attributes_of_others
from poptorch._logging import logger
from poptorch.arg_parsers import custom_parser, rebuilt, tensors_of
from poptorch.arguments import CallArguments
from poptorch.compile_hooks import compile_hooks
from poptorch.errors import createPoptorchError
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
    _call: CallArguments
    _rebuild: Callable[[Sequence[Any]], Any]
    _training: bool
    _shown: str

    def __init__(
        self, model: Callable[..., Any], call: CallArguments, *, training: bool, shown: str = "ipu"
    ) -> None:
        super().__init__()
        self.__dict__["_model"], self.__dict__["_call"] = model, call  # no submodule
        self.__dict__.update(_rebuild=tuple, _training=training, _shown=shown)

    @property
    def call(self) -> CallArguments:
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
        self.__dict__["_rebuild"] = _rebuilding(result)
        leaves = list(tensors_of(result))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not is_fake(leaf):
                logger.warning(
                    "Output expected to be on the IPU but is on %s: it is returned as it is now",
                    leaf.device,
                )
        return leaves

    def restore(self, leaves: Sequence[Any]) -> Any:
        """The model's return value with these leaves, whose `backward` raises."""
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                attributes: dict[str, Any] = leaf.__dict__
                attributes["backward"] = _no_backward
                attributes["__getstate__"] = partial(attributes_of_others, attributes)
        return self._rebuild(leaves)

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


def _rebuilding(returned: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a structure like `returned` of leaves.

    For a tensor, and for a flat list or tuple of tensors, it is a C function.
    """
    kind = type(returned)
    if _is_leaf(returned):
        return itemgetter(0)
    if kind in (list, tuple) and custom_parser(kind) is None and all(map(_is_leaf, returned)):
        return tuple if kind is tuple else list
    return lambda leaves: rebuilt(returned, iter(leaves))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and custom_parser(type(value)) is None


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If "
        "you're using an inferenceModel, you should use a trainingModel instead.",
        id="call",
    )
