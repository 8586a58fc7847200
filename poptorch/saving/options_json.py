"""Write PopTorch's options as JSON, and read them back."""

from enum import Enum
from typing import Any

from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from poptorch import enums, strategies
from poptorch.options import Options
from poptorch.stages import Phase, Stage

_PARTS = ("Training", "Precision", "Distributed", "TensorLocations", "Jit")
_FLAGS = (
    "_source_location_excludes",
    "_relax_optimizer_checks",
    "_show_progress_bar",
    "_module_namescope_enabled",
    "_device_of_tensors",
)
_STRATEGIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        strategies.PipelinedExecution,
        strategies.ShardedExecution,
        strategies.SerialPhasedExecution,
        strategies.ParallelPhasedExecution,
    )
}
_DEEPEST = 16


def write_options(options: Options) -> dict[str, Any]:
    """An executor's options as JSON.

    Raises:
        SavedProgramError: one has a value that JSON has not.
    """
    return {
        "values": _write(options._values, "options"),
        "parts": {name: _write(getattr(options, name)._values, name) for name in _PARTS},
        "popart": _write(options._Popart.options, "_Popart"),
        "strategy": _write_strategy(options._execution_strategy),
        "flags": {name: _write(getattr(options, name), name) for name in _FLAGS},
        "mean_strategy_given": options.Training._mean_strategy_given,
    }


def read_options(written: Any) -> Options:
    """Inverse of `write_options`; the result can be changed.

    Raises:
        SavedProgramError: they are none.
    """
    values, parts, popart, strategy, flags, given = fields_of(
        written, "options", values=dict, parts=dict, popart=dict, strategy=dict, flags=dict,
        mean_strategy_given=bool,
    )  # fmt: skip
    options = Options()
    _set(options._values, _read(values), "options")
    for name, part in zip(_PARTS, fields_of(parts, "parts", **dict.fromkeys(_PARTS, dict)),
                          strict=True):  # fmt: skip
        _set(getattr(options, name)._values, _read(part), name)
    options._Popart.options = _read(popart)
    options.__dict__["_execution_strategy"] = _read_strategy(strategy)
    flags = {"_device_of_tensors": "ipu", **flags}  # older files lack it
    kinds = dict.fromkeys(_FLAGS, (dict, list, bool, str))
    for name, flag in zip(_FLAGS, fields_of(flags, "flags", **kinds), strict=True):
        options.__dict__[name] = _read(flag)
    options.Training.__dict__["_mean_strategy_given"] = given
    return options


def _set(held: dict[str, Any], values: dict[str, Any], what: str) -> None:
    """Replace the values of options; refuse a value of another type."""
    for name, value in values.items():
        if name in held and not isinstance(value, type(held[name])):
            raise SavedProgramError(Reason.CONTENT, f"{what}: {name} cannot be {value!r}")
    held.clear()
    held.update(values)


def _write(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_write(one, where) for one in value]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _write(one, f"{where}.{key}")] for key, one in value.items()]}
    raise SavedProgramError(
        Reason.CANNOT_SAVE, f"option {where} is a {type(value).__name__}: {value!r}"
    )


def _read(written: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise SavedProgramError(Reason.LIMIT, "an option is nested too deeply")
    match written:
        case None | bool() | int() | str():
            return written
        case {"enum": str(kind), "name": str(name)}:
            found = vars(enums).get(kind)
            if isinstance(found, type) and issubclass(found, Enum) and name in found.__members__:
                return found[name]
        case {"float": str(text)}:
            try:
                return float(text)
            except ValueError:
                pass
        case {"list": list(parts)}:
            return [_read(one, depth + 1) for one in parts]
        case {"tuple": list(parts)}:
            return tuple(_read(one, depth + 1) for one in parts)
        case {"dict": list(pairs)}:
            return {
                expect(key, (str, int), "a name"): _read(one, depth + 1)
                for key, one in (expect(pair, list, "a pair") for pair in pairs)
            }
    raise SavedProgramError(Reason.CONTENT, "an option has a value that cannot be")


def _write_strategy(strategy: strategies.ExecutionStrategy) -> dict[str, Any]:
    kind = type(strategy).__name__
    if _STRATEGIES.get(kind) is not type(strategy):
        raise SavedProgramError(Reason.CANNOT_SAVE, f"the execution strategy is a {kind}")
    plain = {key: _write(one, "strategy") for key, one in strategy.core_strategy().items()}
    return {"kind": kind, "plain": plain, "auto_stage": strategy.auto_stage.name}


def _read_strategy(written: Any) -> strategies.ExecutionStrategy:
    kind, plain, automatic = fields_of(written, "strategy", kind=str, plain=dict, auto_stage=str)
    read = {key: _read(one) for key, one in plain.items()}
    try:
        made = _STRATEGIES[kind]
        stages = []
        for blocks, ipu in read["stages"]:
            stages.append(Stage(*blocks) if ipu is None else Stage(*blocks).ipu(ipu))
        if not issubclass(made, strategies._PhasedExecution):
            unphased: strategies.ExecutionStrategy = (
                made(*stages) if stages else made(enums.AutoStage[automatic])
            )
            return unphased
        rest = iter(stages)
        phases = [Phase(*(next(rest) for _ in range(count))) for count in read["phases"]]
        phased: strategies._PhasedExecution = made(*phases)
        phased.useSeparateBackwardPhase(read["separate_backward_phase"])
        phased._liveness = enums.Liveness[read["liveness"]]
    except (KeyError, ValueError, TypeError, AssertionError, StopIteration, RuntimeError) as error:
        raise SavedProgramError(Reason.CONTENT, f"no execution strategy: {error}") from error
    return phased
