"""Write the core's options as JSON and read them back; an option with its default is left out."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from ipu_dynamo.errors import OptionError
from ipu_dynamo.options import Anchor, Location, Locations, Options, StageSpec, Strategy
from ipu_dynamo.options.loss_scaling import AutomaticLossScaling
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.saved.json_text import expect
from ipu_dynamo.saved.refusal import Reason, SavedProgramError

# of the process that saves
_HERE = {
    "program_cache",
    "program_cache_limit",
    "check_compiled",
    "start",
    "enforce_memory",
    "progress",
    "record",
    "mesh",
}
_STAGE = {"blocks", "ipu"}  # its fields


def write_options(options: Options) -> dict[str, Any]:
    """`options` as JSON."""
    return _changed(options, without=_HERE)


def _changed(value: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that have not their default."""
    plain = type(value)()
    names = [field.name for field in fields(value) if field.name not in without]
    pairs = ((name, getattr(value, name)) for name in names)
    return {name: _written(one) for name, one in pairs if one != getattr(plain, name)}


def _written(value: Any) -> Any:
    match value:
        case StageSpec():
            return {"blocks": list(value.blocks), "ipu": value.ipu}
        case ReplicaGroups():
            return str(value)
        case Anchor():
            return {field.name: getattr(value, field.name) for field in fields(value)}
        case Strategy() | Locations() | Location() | AutomaticLossScaling():
            return _changed(value)
        case list() | tuple():
            return [_written(part) for part in value]
        case Mapping():
            return {name: _written(part) for name, part in value.items()}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"an option of type {type(value).__name__}")


def read_options(written: Any) -> Options:
    """Inverse of `write_options`.

    Raises:
        SavedProgramError: an option is unknown, or cannot have its value.
    """
    try:
        if "start" in expect(written, dict, "options"):
            raise ValueError("a saved program has no option start: its first step is compiled")
        options: Options = _read(Options, written, _OPTIONS)
    except (OptionError, ValueError, TypeError) as error:
        problem = f"options that cannot be: {error}"
        raise SavedProgramError(Reason.CONTENT, problem) from error
    return options


Convert = Callable[[Any], Any]


def _read(kind: Callable[..., Any], written: Any, converters: Mapping[str, Convert]) -> Any:
    entries = expect(written, dict, "options")
    return kind(**{name: converters.get(name, _plain)(value) for name, value in entries.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("an option is an object")
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _stage(written: Any) -> StageSpec:
    entries = expect(written, dict, "a stage")
    blocks = _plain(entries["blocks"]) if entries.keys() == _STAGE else None
    if type(blocks) is not tuple or not all(type(block) is str for block in blocks):
        raise ValueError("a stage has other fields")
    return StageSpec(blocks, expect(entries["ipu"], (int, type(None)), "an IPU"))


def _stages(written: Any) -> tuple[StageSpec, ...]:
    return tuple(map(_stage, expect(written, list, "stages")))


def _location(written: Any) -> Location:
    location: Location = _read(Location, written, {})
    return location


def _anchors(written: Any) -> dict[str, Anchor]:
    entries = expect(written, dict, "anchors")
    return {name: _read(Anchor, anchor, {}) for name, anchor in entries.items()}


_STRATEGY: dict[str, Convert] = {
    "stages": _stages,
    "phases": lambda phases: tuple(map(_stages, expect(phases, list, "phases"))),
}
_LOCATIONS: dict[str, Convert] = {field.name: _location for field in fields(Locations)}
_OPTIONS: dict[str, Convert] = {
    "strategy": lambda one: _read(Strategy, one, _STRATEGY),
    "locations": lambda one: _read(Locations, one, _LOCATIONS),
    "anchors": _anchors,
    "automatic_loss_scaling": lambda one: _read(AutomaticLossScaling, one, {}),
    "memory_proportion": lambda one: (
        {int(ipu): share for ipu, share in one.items()} if isinstance(one, dict) else one
    ),
    "force": lambda one: dict(expect(one, dict, "forced decisions")),
    "replica_groups": lambda one: {
        name: ReplicaGroups.parse(expect(text, str, "a group"))
        for name, text in expect(one, dict, "groups").items()
    },
}
