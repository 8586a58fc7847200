"""List every option with its effect; the guide's list is made from this."""

from dataclasses import dataclass

from poptorch.options.distributed import _DistributedOptions
from poptorch.options.effects import Effect, effect_of
from poptorch.options.general import Options
from poptorch.options.jit import _JitOptions
from poptorch.options.locations import TensorLocationSettings, _TensorLocationOptions
from poptorch.options.popart import _PopartOptions
from poptorch.options.precision import _PrecisionOptions
from poptorch.options.session import effect_of_key, popart_keys
from poptorch.options.training import _TrainingOptions

_CLASSES = (
    Options,
    _TrainingOptions,
    _PrecisionOptions,
    _DistributedOptions,
    _TensorLocationOptions,
    TensorLocationSettings,
    _JitOptions,
)


@dataclass(frozen=True, slots=True)
class OptionEffect:
    """One line of the table.

    Args:
        accessor: how the option is reached from an `Options`, such as "outputMode" or
            "Training.gradientAccumulation"; "_Popart." and a key for the lower layers' settings.
        effect: what it changes.
        summary: its purpose, one sentence; empty for the lower layers' settings.
    """

    accessor: str
    effect: Effect
    summary: str


def table() -> tuple[OptionEffect, ...]:
    """Every option that exists."""
    setters = [line for cls in _CLASSES for line in _lines(cls)]
    keys = [_line(f"_Popart.{key}", effect_of_key(key), "") for key in popart_keys()]
    return (*setters, *_lines(_PopartOptions, skip=("set",)), *keys)


def _lines(cls: type, skip: tuple[str, ...] = ()) -> list[OptionEffect]:
    prefix: str = cls._PREFIX  # type: ignore[attr-defined]
    lines = []
    for name in sorted(set(dir(cls)).difference(skip)):
        method = getattr(cls, name)
        effect = effect_of(method)
        if effect is not None:
            lines.append(_line(prefix + name, effect, method.__doc__.splitlines()[0]))
    return lines


def _line(accessor: str, effect: Effect, summary: str) -> OptionEffect:
    return OptionEffect(accessor, effect, summary)
