"""Compare how graphs are read with an independent parser, on the same bytes."""

from pathlib import Path

import pytest
from tensorboard.compat.proto import meta_graph_pb2

from ipu_dynamo.saved_model.tf_graphs.messages import parse_message

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*/saved_model.pb"))


def varint(content, at):
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def meta_graphs(content):
    """The bytes of each meta graph: field 2 of a SavedModel, read by hand."""
    at, found = 0, []
    while at < len(content):
        key, at = varint(content, at)
        size, at = varint(content, at)
        if key & 7 == 2:
            if key >> 3 == 2:
                found.append(content[at : at + size])
            at += size
    return found


def sizes(shape):
    return shape.unknown_rank, [dim.size for dim in shape.dim]


LISTS = ("half", "float", "double", "int", "string", "int64", "bool", "uint32", "uint64")


def tensor(value):
    shape = value.tensor_shape if hasattr(value, "tensor_shape") else value.shape
    values = {name: list(getattr(value, f"{name}_val")) for name in LISTS}
    return value.dtype, sizes(shape), value.tensor_content, values


def attribute(value):
    plain = value.s, value.i, value.f, value.b, value.type
    lists = value.list
    return (
        plain,
        sizes(value.shape),
        tensor(value.tensor),
        (list(lists.s), list(lists.i), list(lists.f), list(lists.b), list(lists.type)),
        [sizes(shape) for shape in lists.shape],
        (value.func.name, attributes(value.func.attr)),
    )


def attributes(entries):
    if hasattr(entries, "items"):
        return {key: attribute(value) for key, value in entries.items()}
    return {entry.key: attribute(entry.value) for entry in entries}


def nodes(listed):
    return [(n.name, n.op, list(n.input), attributes(n.attr)) for n in listed]


def texts(entries):
    return dict(entries) if hasattr(entries, "items") else {e.key: e.value for e in entries}


def border(entries):
    pairs = entries.items() if hasattr(entries, "items") else [(e.key, e.value) for e in entries]
    return {
        key: (
            info.name,
            info.dtype,
            sizes(info.tensor_shape if hasattr(info, "tensor_shape") else info.shape),
        )
        for key, info in pairs
    }


def signatures(entries):
    pairs = entries.items() if hasattr(entries, "items") else [(e.key, e.value) for e in entries]
    return {key: (border(s.inputs), border(s.outputs), s.method_name) for key, s in pairs}


def functions(library):
    return [
        (
            f.signature.name,
            [(a.name, a.type) for a in f.signature.input_arg],
            [(a.name, a.type) for a in f.signature.output_arg],
            nodes(f.node_def),
            texts(f.ret),
        )
        for f in library.function
    ]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.parent.name)
def test_graphs_are_read_as_another_parser_reads_them(path):
    content = path.read_bytes()
    ours = parse_message("SavedModel", content, str(path)).meta_graphs
    theirs = [meta_graph_pb2.MetaGraphDef.FromString(part) for part in meta_graphs(content)]
    assert len(ours) == len(theirs) > 0
    for own, other in zip(ours, theirs, strict=True):
        assert list(own.meta_info.tags) == list(other.meta_info_def.tags)
        assert nodes(own.graph.node) == nodes(other.graph_def.node)
        assert functions(own.graph.library) == functions(other.graph_def.library)
        assert signatures(own.signatures) == signatures(other.signature_def)
        count = len(own.graph.node) + sum(len(f.node_def) for f in own.graph.library.function)
        assert count > 3
