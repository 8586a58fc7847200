"""Check that repeated facts of a file agree, before memory is allocated by them."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ipu_dynamo.program import Program, Variable
from ipu_dynamo.program.ir.made_names import parameter_of
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.saved.entry import Entry
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.whole_step.ranks import batching
from ipu_dynamo.whole_step.weights.initial_state import updates

_MOST_TASKS = 10_000_000  # of a call: a schedule lists them
_MOST_IPUS = 65_536  # of all replicas
_LARGEST_COUNTER = 1 << 16  # elements of a sum that is no parameter's


def check_entry(entry: Entry, program: Program) -> None:
    """Compare an entry with its program.

    Raises:
        SavedProgramError: they do not belong together, or would take memory without bounds.
    """
    options, training = entry.options, program.kind == "training"
    if program.kind not in ("training", "inference"):
        raise _wrong(f"it is a program for {program.kind}")
    if program.num_ipus * program.replicas > _MOST_IPUS:
        raise _large(f"{program.num_ipus} IPUs and {program.replicas} replicas")
    if program.replicas != options.replicas:
        raise _wrong(f"{program.replicas} replicas, and {options.replicas} in its options")
    expected = batching(options, training=training)
    if Batching.of(program, program.replicas, expected.group_of) != expected:
        raise _wrong("its loops run another number of times than its options say")
    cut = sections(program)
    if expected.micro_batches * max(1, len(cut.loop)) > _MOST_TASKS:
        raise _large(f"{expected.micro_batches} micro-batches in a call")
    if len(entry.devices) != program.num_ipus:
        raise _wrong(f"{len(entry.devices)} devices for {program.num_ipus} IPUs")
    _check_streams(entry, program)
    _check_groups(entry, program)


def check_variant(entry: Entry, program: Program, variant: Program) -> None:
    """Compare a program with one that differs from it in its updates alone.

    Raises:
        SavedProgramError: it differs in something else.
    """
    own, other = sections(program), sections(variant)
    same = (
        program.num_ipus == variant.num_ipus
        and program.replicas == variant.replicas
        and program.variables == variant.variables
        and program.inputs == variant.inputs
        and program.outputs == variant.outputs
        and program.functions == variant.functions
        and own.loop == other.loop
        and (own.steps, own.micro_batches) == (other.steps, other.micro_batches)
    )
    if program.kind != "training" or program.kind != variant.kind or not same:
        raise _wrong("a variant of its update is of another program")
    _check_groups(entry, variant)


def _check_streams(entry: Entry, program: Program) -> None:
    values = [output.name for output in program.outputs if not output.mutates]
    printed = {output.name for output in program.outputs if output.printing is not None}
    returned, anchored = len(entry.results.tensors), len(entry.anchors)
    if values != [str(index) for index in range(returned + anchored + len(printed))]:
        raise _wrong(
            f"{len(values)} outputs for {returned} results, {anchored} anchors and {len(printed)} "
            "tensors that are printed"
        )
    if sorted([*entry.anchors.values(), *printed]) != sorted(values[returned:]):
        raise _wrong("its anchors are other outputs")
    names = entry.input_names
    changed = {output.name for output in program.outputs if output.mutates}
    fed = {stream.name for stream in program.inputs if stream.source == "host"}
    if len(set(names)) != len(names) or not (changed | fed) <= set(names):
        raise _wrong("it has other inputs than its program")


def _check_groups(entry: Entry, program: Program) -> None:
    for update in updates(program):
        fits = 0 <= update.group < len(entry.groups)
        if not fits or entry.groups[update.group].rule != update.rule:
            raise _wrong(f"no group {update.group} is updated by {update.rule}")
    if entry.groups and program.kind != "training":
        raise _wrong("a program for inference has an optimiser")


def check_tensors(entry: Entry, program: Program, tensors: Mapping[str, Tensor]) -> None:
    """Check that every variable has its tensors, in its type.

    Raises:
        SavedProgramError: one is missing or another one.
    """
    lasting = [v for v in program.variables if v.kind != "accumulator"]
    if entry.variables.keys() != {variable.name for variable in lasting}:
        odd = sorted(entry.variables.keys() ^ {variable.name for variable in lasting})
        raise _wrong(f"variables without tensors, or tensors without variables: {odd[0]}")
    for variable in lasting:
        _check_variable(variable, entry.variables[variable.name], program.replicas, tensors)
    sizes = {v.name: v.type.shape for v in lasting if v.kind == "parameter"}
    for variable in program.variables:
        if variable.kind != "accumulator":
            continue
        of = sizes.get(parameter_of(variable.name))
        if of != variable.type.shape and prod(variable.type.shape) > _LARGEST_COUNTER:
            raise _wrong(f"the sum {variable.name} has not the shape of a parameter")


def _check_variable(
    variable: Variable, keys: tuple[str, ...], replicas: int, tensors: Mapping[str, Tensor]
) -> None:
    if variable.kind == "whole":
        raise _wrong(f"%{variable.name} comes with every call")
    shared = variable.replicated or variable.groups is not None
    if len(keys) != (1 if shared else replicas):
        raise _wrong(f"%{variable.name} has {len(keys)} tensors")
    shape = variable.type.shape
    if variable.groups is not None:
        shape = (variable.groups.count(replicas), *shape)
    for key in keys:
        tensor = tensors.get(key)
        if tensor is None:
            raise _wrong(f"%{variable.name} has no tensor {key}")
        if (tensor.dtype, tensor.shape) != (variable.type.dtype, torch.Size(shape)):
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            raise _wrong(f"%{variable.name} is {variable.type}, and its tensor {key} {actual}")


def _wrong(problem: str) -> SavedProgramError:
    return SavedProgramError(Reason.CONTENT, problem)


def _large(problem: str) -> SavedProgramError:
    return SavedProgramError(Reason.LIMIT, f"{problem}: more than a reader takes")
