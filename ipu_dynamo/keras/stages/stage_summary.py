"""Print an assignment as a table, one line per call and further input."""

from collections.abc import Callable, Sequence
from typing import Any

from ipu_dynamo.keras.private.keras_private import Sequential
from ipu_dynamo.keras.stages.assignments import Element, NestedAssignment
from ipu_dynamo.keras.stages.model_assignment import current_assignment


def print_summary(
    model: Any, line_length: int | None, print_fn: Callable[[str], object] | None
) -> None:
    """Print the assignment of a model.

    Args:
        model: the model.
        line_length: characters of a line; 60 for a Sequential, 89 for others, if left out.
        print_fn: called with each line; `print` if left out.
    """
    sequential = isinstance(model, Sequential)
    length = line_length if line_length is not None else (60 if sequential else 89)
    shares = (0.5, 1.0) if sequential else (0.4, 0.8, 1.0)
    ends = [int(length * share) for share in shares]
    headings = ["Layer (type)", "Pipeline Stage"]
    if not sequential:
        headings = ["Layer (type) (node index)", "Input Layers", "Pipeline Stage"]
    show = print_fn or print
    show(f'Model: "{model.name}"')
    show("_" * length)
    show(_row(headings, ends))
    show("=" * length)
    for line in _lines(current_assignment(model), sequential, length, ends):
        show(line)


def _lines(
    assignment: Sequence[Element], sequential: bool, length: int, ends: Sequence[int]
) -> list[str]:
    lines: list[str] = []
    for position, element in enumerate(assignment):
        if isinstance(element, NestedAssignment):
            lines += [f'Nested Model: "{element.nested_model.name}"', "-" * length]
            inner = element.pipeline_stage_assignments
            inside_sequential = isinstance(element.nested_model, Sequential)
            lines += _lines(inner, inside_sequential, length, ends)
            continue
        lines += [_row(fields, ends) for fields in _fields(element, sequential, len(ends))]
        following = assignment[position + 1 : position + 2]
        last = not following or following[0].is_nested_model
        lines.append(("=" if last else "_") * length)
    return lines


def _fields(element: Any, sequential: bool, columns: int) -> list[list[str]]:
    """The rows of a call; one without a graph of its own has no inputs to show."""
    name = f"{element.layer.name} ({type(element.layer).__name__})"
    stage = str(element.pipeline_stage)
    if sequential:
        return [[name, stage] if columns == 2 else [name, "", stage]]
    name += f" ({element.node_index})"
    if columns == 2:
        return [[name, stage]]
    first, *further = [layer.name for layer in element.inbound_layers] or [""]
    return [[name, first, stage], *(["", layer, ""] for layer in further)]


def _row(fields: Sequence[str], ends: Sequence[int]) -> str:
    """Fields side by side, each padded or cut to its column's end."""
    line = ""
    for position, (field, end) in enumerate(zip(fields, ends, strict=True)):
        line += field
        if len(line) > end:
            line = line[:end]
            if position < len(fields) - 1:
                line = line[:-1] + " "
        line = line.ljust(end)
    return line
