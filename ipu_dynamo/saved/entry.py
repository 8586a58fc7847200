"""Describe one entry point of a saved program, apart from its program and tensors, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.capture import Structure
from ipu_dynamo.capture.private.tracing import flatten
from ipu_dynamo.capture.trace import Arguments
from ipu_dynamo.options import Options
from ipu_dynamo.program.ir.update_rules import Rule
from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.options_json import read_options, write_options
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.values import read_value, write_value

MOST_VARIANTS = 16  # of a traced update


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group of parameters that are updated alike.

    Args:
        rule: how.
        parameters: their names.
        values: the numbers of `rule.hyperparameters`.
    """

    rule: Rule
    parameters: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """The saved data of a compiled model, without its program and its tensors.

    Args:
        arguments: of a call; of tensors only the dtypes.
        results: how a call's return value is made of outputs.
        input_names: the program's names of the caller's tensors, in order.
        values: names of the values that operators make, and which of them, and of the parameters,
            have a gradient.
        anchors: the output stream of each anchor that is one.
        options: as they were given.
        own_weights: only the program writes the tensors that it computes on.
        groups: of the optimiser, when training.
        variables: for each variable that lasts, the key of its tensor; on each replica, where these
            differ.
        seed, step: where the random numbers go on; None: with a seed of their own.
        loss_scale: the first one.
        devices: of the IPUs.
        variants: how many further programs there are, whose updates were traced for other numbers.
        decided: by which figures functions were compiled, and where; not checked here.
        free_rows: it is called with any number of rows.
    """

    arguments: Arguments
    results: Structure
    input_names: tuple[str, ...]
    values: tuple[tuple[str, ...], tuple[str, ...]]
    anchors: Mapping[str, str]
    options: Options
    own_weights: bool
    groups: tuple[SavedGroup, ...]
    variables: Mapping[str, tuple[str, ...]]
    seed: int | None
    step: int
    loss_scale: float
    devices: tuple[str, ...]
    variants: int
    decided: Mapping[str, Any]
    free_rows: bool = False


def write_entry(entry: Entry) -> dict[str, Any]:
    """An entry as JSON.

    Raises:
        SavedProgramError: an argument or a result is nothing that files hold.
    """
    args, kwargs = entry.arguments.rebuild(entry.arguments.tensors)
    results = entry.results.rebuild([torch.empty(0)] * len(entry.results.tensors))
    return {
        "positional": [write_value(x, f"argument {i}") for i, x in enumerate(args)],
        "keywords": [[name, write_value(x, f"argument {name}")] for name, x in kwargs.items()],
        "names": list(entry.arguments.names),
        "results": write_value(results, "what the model returns"),
        "inputs": list(entry.input_names),
        "values": [list(names) for names in entry.values],
        "anchors": dict(entry.anchors),
        "options": write_options(entry.options),
        "own_weights": entry.own_weights,
        "groups": [
            {
                "rule": str(group.rule),
                "parameters": list(group.parameters),
                "values": [repr(value) for value in group.values],
            }
            for group in entry.groups
        ],
        "variables": {name: list(keys) for name, keys in entry.variables.items()},
        "seed": entry.seed,
        "step": entry.step,
        "loss_scale": entry.loss_scale,
        "devices": list(entry.devices),
        "variants": entry.variants,
        "decided": dict(entry.decided),
        "free_rows": entry.free_rows,
    }


def read_entry(written: Any) -> Entry:
    """Inverse of `write_entry`.

    Raises:
        SavedProgramError: it is none.
    """
    (
        positional, keywords, names, results, inputs, values, anchors, options, own_weights, groups,
        variables, seed, step, loss_scale, devices, variants, decided, free,
    ) = fields_of(
        written, "the entry", positional=list, keywords=list, names=list, results=_ANY, inputs=list,
        values=list, anchors=dict, options=dict, own_weights=bool, groups=list, variables=dict,
        seed=(int, type(None)), step=int, loss_scale=float, devices=list, variants=int,
        decided=dict, free_rows=bool,
    )  # fmt: skip
    arguments = _arguments(positional, keywords, names)
    structure, read = _structure(results), read_options(options)
    if len(inputs) != len(arguments.tensors):
        raise SavedProgramError(Reason.CONTENT, "it has other inputs than tensors in its arguments")
    if not (isfinite(loss_scale) and loss_scale > 0 and 0 <= step < 1 << 62):
        raise SavedProgramError(Reason.CONTENT, "its loss scale or its step cannot be")
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise SavedProgramError(Reason.CONTENT, "its seed cannot be")
    if not 0 <= variants <= MOST_VARIANTS:
        raise SavedProgramError(Reason.LIMIT, f"its update has {variants} other variants")
    return Entry(
        arguments=arguments,
        results=structure,
        input_names=_strings(inputs, "inputs"),
        values=_values(values),
        anchors=_anchors(anchors, read),
        options=read,
        own_weights=own_weights,
        groups=tuple(map(_group, groups)),
        variables={name: _strings(keys, name) for name, keys in variables.items()},
        seed=seed,
        step=step,
        loss_scale=loss_scale,
        devices=_strings(devices, "devices"),
        variants=variants,
        decided=decided,
        free_rows=free,
    )


_ANY = (dict, str, bool, type(None))


def _values(written: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if len(written) != 2 or not all(type(names) is list for names in written):
        raise SavedProgramError(Reason.CONTENT, "its values are not two lists of names")
    operators, gradients = (_strings(names, "values") for names in written)
    return operators, gradients


def _anchors(written: dict[str, Any], options: Options) -> dict[str, str]:
    if not all(type(stream) is str for stream in written.values()):
        raise SavedProgramError(Reason.CONTENT, "an anchor is no output")
    if unknown := written.keys() - options.anchors.keys():
        raise SavedProgramError(Reason.CONTENT, f"its options have no anchor {sorted(unknown)}")
    return written


def _example(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def _arguments(positional: list[Any], keywords: list[Any], names: list[Any]) -> Arguments:
    args = tuple(read_value(argument, _example) for argument in positional)
    kwargs: dict[str, Any] = {}
    for pair in keywords:
        name, argument = pair if type(pair) is list and len(pair) == 2 else (None, None)
        if type(name) is not str or name in kwargs:
            raise SavedProgramError(Reason.CONTENT, "keyword arguments that cannot be")
        kwargs[name] = read_value(argument, _example)
    leaves, spec = flatten((args, kwargs))
    if len(names) != len(leaves):
        raise SavedProgramError(Reason.CONTENT, "it has other names than arguments")
    return Arguments(tuple(leaves), spec, _strings(names, "names"))


def _structure(written: Any) -> Structure:
    leaves, spec = flatten(read_value(written, _example))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    kept = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Structure(spec, kept, positions)


def _group(written: Any) -> SavedGroup:
    text, parameters, values = fields_of(written, "a group", rule=str, parameters=list, values=list)
    try:
        rule = Rule.parse(text)
        numbers = tuple(float(value) for value in _strings(values, "values"))
    except ValueError as error:
        raise SavedProgramError(Reason.CONTENT, f"a group that cannot be: {error}") from error
    if str(rule) != text or len(numbers) != len(rule.hyperparameters):
        raise SavedProgramError(Reason.CONTENT, f"a group that cannot be: {text}")
    return SavedGroup(rule, _strings(parameters, "parameters"), numbers)


def _strings(values: Any, what: str) -> tuple[str, ...]:
    for value in expect(values, list, what):
        expect(value, str, what)
    return tuple(values)
