"""Write frozen dataclasses as lines of text and read them back, as the types of their fields say.

A record is one line, `Repeat(over="micro_batch", count=4)`; fields that have their default are left
out. A field that holds several records, a record with such a field, or a graph, stands below it
under its name, indented. New dataclasses need nothing here as long as their fields have types that
`field_kinds` accepts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import fx

from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.text.graph_text import FUNCTION, GraphForm, read_graph, write_graph
from ipu_dynamo.program.text.indented import Line, in_line, indented
from ipu_dynamo.program.text.literals import word_of, write, write_record
from ipu_dynamo.program.text.reader import Pairs, Reader, Record

_PLAIN = (str, int, float, bool, NoneType, torch.dtype, torch.device, TensorType, Layout)
Check = Callable[[Any], None]


def write_lines(record: Any, form: GraphForm = FUNCTION) -> list[str]:
    """A dataclass as lines of text.

    Args:
        form: of the graphs in it.

    Raises:
        ValueError: it holds something that cannot be written.
    """
    kind: Any = type(record)
    kinds, (inline, below) = field_kinds(kind), _parted(kind)
    lines = [write_record(record, inline)]
    for field in below:
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            if kinds[field.name] is fx.GraphModule:
                parts = write_graph(value, form)
            else:
                records = value if isinstance(value, tuple) else (value,)
                parts = [line for record in records for line in write_lines(record, form)]
            lines += indented([field.name, *indented(parts)])
    return lines


def read_lines(line: Line, kind: Any, check: Check, form: GraphForm = FUNCTION) -> Any:
    """Inverse of `write_lines`.

    Args:
        kind: the expected class: a dataclass, or a union of some.
        check: is called with every record that has lines of its own, inner ones first; raises
            ValueError for a record that is not valid.
        form: of the graphs in it.
    """
    with in_line(line):
        reader = Reader(line.text)
        record = reader.value()
        reader.end()
        type_ = _class_of(record, kind)
        blocks: dict[str, Any] = {}
        for block in line.below:
            with in_line(block):
                if block.text in blocks or block.text in record.fields:
                    raise ValueError(f"{block.text} is there already")
                blocks[block.text] = _read_block(block, type_, check, form)
        result = _make(type_, record.fields, blocks)
        check(result)
    return result


@cache
def field_kinds(record: Any) -> dict[str, Any]:
    """The type of every field.

    Raises:
        TypeError: a field has a type that cannot be read.
    """
    hints = get_type_hints(record)
    kinds = {field.name: hints[field.name] for field in fields(record)}
    for name, kind in kinds.items():
        if not _is_known(kind):
            raise TypeError(f"{record.__name__}.{name} is {kind}, which no text can be read as")
    return kinds


@cache
def _parted(record: Any) -> tuple[list[Field[Any]], list[Field[Any]]]:
    """The fields that stand in the line of a dataclass, and those below it."""
    kinds, every = field_kinds(record), fields(record)
    inline = [field for field in every if not _is_block(kinds[field.name])]
    return inline, [field for field in every if field not in inline]


@cache
def _needed(record: Any) -> list[str]:
    """The fields that have no default."""
    return [f.name for f in fields(record) if f.default is f.default_factory is MISSING]


def _is_known(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (tuple, Union, UnionType, Mapping, Sequence):
        return all(part is ... or _is_known(part) for part in get_args(kind))
    return origin is Literal or kind in _PLAIN or kind is fx.GraphModule or is_dataclass(kind)


def _is_block(kind: Any) -> bool:
    """Whether values of this type stand below the line: graphs, tuples of records, and records with
    such parts."""
    match get_args(kind):
        case (part, ellipsis) if ellipsis is ... and get_origin(kind) is tuple:
            return all(
                is_dataclass(alternative) and alternative not in _PLAIN
                for alternative in _alternatives(part)
            )
    if is_dataclass(kind) and isinstance(kind, type) and kind not in _PLAIN:
        return any(map(_is_block, field_kinds(kind).values()))
    return kind is fx.GraphModule


def _read_block(block: Line, record: type, check: Check, form: GraphForm) -> Any:
    """Read the lines below the name of a field."""
    kind = field_kinds(record).get(block.text)
    if not _is_block(kind):
        raise ValueError(f"{record.__name__} has no part {block.text}")
    if kind is fx.GraphModule:
        return read_graph(block.below, form)
    if is_dataclass(kind):
        if len(block.below) != 1:
            raise ValueError(f"{block.text} is one record, not {len(block.below)}")
        return read_lines(block.below[0], kind, check, form)
    part, _ = get_args(kind)
    return tuple(read_lines(line, part, check, form) for line in block.below)


def _make(type_: type, values: Mapping[str, Any], blocks: Mapping[str, Any]) -> Any:
    """A dataclass with these fields, of which `blocks` are built already."""
    kinds = field_kinds(type_)
    if unknown := values.keys() - kinds.keys():
        raise ValueError(f"{type_.__name__} has no field {min(unknown)}")
    built = {name: build(value, kinds[name], name) for name, value in values.items()}
    built.update(blocks)
    for name in _needed(type_):
        if name not in built:
            raise ValueError(f"{type_.__name__} needs {name}")
    return type_(**built)


def build(value: Any, kind: Any, field: str) -> Any:
    """`value`, which was read, as a field of type `kind` holds it.

    Raises:
        ValueError: such a field cannot hold it; `field` is named.
    """
    if type(value) is kind:
        return value
    if isinstance(value, Record):
        return _make(_class_of(value, kind), value.fields, {})
    for alternative, origin, args in _forms(kind):
        if origin is tuple and isinstance(value, tuple):
            if args[1:] == (...,) and {*map(type, value)} <= {args[0]}:
                return value
            kinds = args[:1] * len(value) if args[1:] == (...,) else args
            if len(kinds) == len(value):
                return tuple(build(*pair, field) for pair in zip(value, kinds, strict=True))
        elif origin is Sequence and isinstance(value, list | tuple):
            return type(value)(build(part, args[0], field) for part in value)
        elif origin is Mapping and isinstance(value, dict | Pairs):
            entries = value.items() if isinstance(value, dict) else value.entries
            return {build(k, args[0], field): build(v, args[1], field) for k, v in entries}
        elif origin is Literal:
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
        elif type(value) is alternative or (type(value) is int and alternative is float):
            return value
        elif alternative is TensorType and isinstance(value, Layout) and _is_dense(value):
            return value.type
    raise ValueError(f"{field} is {write(value)}, which is not {_named(kind)}")


def _named(kind: Any) -> str:
    """The name of a type in errors."""
    if get_origin(kind) is Literal:
        return " or ".join(map(write, get_args(kind)))
    return str(getattr(kind, "__name__", kind))


@lru_cache(maxsize=4096)
def _is_dense(layout: Layout) -> bool:
    """Whether it is a type's, and nothing more."""
    return str(layout) == str(layout.type)


def _class_of(record: object, kind: Any) -> type:
    """The dataclass of a record, among those that may stand there."""
    if not isinstance(record, Record):
        raise ValueError("not a record, such as Name(field=1)")
    classes = _classes(kind)
    if record.name not in classes:
        _classes.cache_clear()  # it may have been defined since
        classes = _classes(kind)
    if record.name not in classes:
        raise ValueError(f"{record.name} cannot stand here; {', '.join(classes) or 'nothing'} can")
    return classes[record.name]


@cache
def _classes(kind: Any) -> dict[str, type]:
    """The dataclasses that may stand for a type, by name."""
    return {word_of(leaf): leaf for part in _alternatives(kind) for leaf in _leaves(part)}


def _leaves(kind: Any) -> list[type]:
    """The dataclasses that a dataclass stands for: itself, or all that derive from it."""
    if not is_dataclass(kind) or not isinstance(kind, type) or kind in _PLAIN:
        return []
    below = [leaf for derived in kind.__subclasses__() for leaf in _leaves(derived)]
    return below or [kind]


@cache
def _forms(kind: Any) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """Each alternative of a type, with its origin and its arguments."""
    return [(part, get_origin(part), get_args(part)) for part in _alternatives(kind)]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
