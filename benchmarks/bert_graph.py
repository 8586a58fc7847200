"""Write a BERT as TensorFlow 1 saves one, graph and variables, without TensorFlow."""

from pathlib import Path
from typing import Any

import numpy as np

from ipu_dynamo.saved_model.tf_graphs.checksums import masked_crc
from ipu_dynamo.saved_model.tf_graphs.messages import parse_message

LAYERS, WIDTH, HEADS, INNER, WORDS, LENGTH = 12, 768, 12, 3072, 30522, 128
_FLOAT, _INT = 1, 3
_MAGIC = 0xDB4775248B80FB57


def write_bert(folder: Path, layers: int = LAYERS, words: int = WORDS) -> int:
    """Write a BERT-base with random weights; the bytes of its variables."""
    writer = GraphWriter()
    _bert(writer, layers, words)
    (folder / "variables").mkdir(parents=True)
    writer.save(folder)
    return write_variables(folder / "variables/variables", writer.variables)


class GraphWriter:
    """A graph that grows node by node; every method returns the name of a value."""

    def __init__(self) -> None:
        self.message = parse_message("SavedModel", b"", "new")
        self.message.schema_version = 1
        meta = self.message.meta_graphs.add()
        meta.meta_info.tags.append("serve")
        self.graph = meta.graph
        self.signature = meta.signatures.add(key="serving_default")
        self.signature.value.method_name = "tensorflow/serving/predict"
        self.variables: dict[str, tuple[int, ...]] = {}

    def node(self, op: str, name: str, *inputs: str, **attributes: Any) -> str:
        node = self.graph.node.add(name=name, op=op)
        node.input.extend(inputs)
        for key, value in attributes.items():
            entry = node.attr.add(key=key)
            if isinstance(value, bool):
                entry.value.b = value
            elif isinstance(value, tuple):
                for size in value:
                    entry.value.shape.dim.add(size=size)
            elif isinstance(value, np.ndarray):
                tensor = entry.value.tensor
                tensor.dtype = _INT if value.dtype == np.int32 else _FLOAT
                for size in value.shape:
                    tensor.shape.dim.add(size=size)
                tensor.tensor_content = value.tobytes()
            else:
                entry.value.type = value
        return name

    def constant(self, name: str, value: Any, kind: type = np.float32) -> str:
        array = np.asarray(value, kind)
        dtype = _INT if kind is np.int32 else _FLOAT
        return self.node("Const", name, dtype=dtype, value=array)

    def variable(self, name: str, *shape: int) -> str:
        self.variables[name] = shape
        self.node("VariableV2", name, dtype=_FLOAT, shape=shape)
        return self.node("Identity", f"{name}/read", name, T=_FLOAT)

    def border(self, entries: Any, key: str, tensor: str, dtype: int, shape: list[int]) -> None:
        entry = entries.add(key=key)
        entry.value.name, entry.value.dtype = f"{tensor}:0", dtype
        for size in shape:
            entry.value.shape.dim.add(size=size)

    def save(self, folder: Path) -> None:
        (folder / "saved_model.pb").write_bytes(self.message.SerializeToString())


def _bert(w: GraphWriter, layers: int, words: int) -> None:
    ids = w.node("Placeholder", "input_ids", dtype=_INT, shape=(-1, LENGTH))
    w.border(w.signature.value.inputs, "input_ids", ids, _INT, [-1, LENGTH])
    scope = "bert/embeddings"
    table = w.variable(f"{scope}/word_embeddings", words, WIDTH)
    axis = w.constant(f"{scope}/axis", 0, np.int32)
    rows = w.node("GatherV2", f"{scope}/GatherV2", table, ids, axis, Tparams=_FLOAT)
    places = w.variable(f"{scope}/position_embeddings", LENGTH, WIDTH)
    x = _normalised(w, f"{scope}/LayerNorm", w.node("AddV2", f"{scope}/add", rows, places))
    for layer in range(layers):
        x = _layer(w, f"bert/encoder/layer_{layer}", x)
    result = w.node("Identity", "sequence_output", x, T=_FLOAT)
    w.border(w.signature.value.outputs, "sequence_output", result, _FLOAT, [-1, LENGTH, WIDTH])


def _layer(w: GraphWriter, scope: str, x: str) -> str:
    flat = _shaped(w, f"{scope}/flat", x, [-1, WIDTH])
    own = f"{scope}/attention/self"
    query, key, value = (
        _split(w, f"{own}/{name}", _dense(w, f"{own}/{name}", flat, WIDTH, WIDTH))
        for name in ("query", "key", "value")
    )
    scores = w.node("BatchMatMulV2", f"{own}/MatMul", query, key, T=_FLOAT, adj_y=True)
    scale = w.constant(f"{own}/Mul/y", (WIDTH / HEADS) ** -0.5)
    weights = w.node("Softmax", f"{own}/Softmax", w.node("Mul", f"{own}/Mul", scores, scale))
    context = w.node("BatchMatMulV2", f"{own}/MatMul_1", weights, value, T=_FLOAT)
    order = w.constant(f"{own}/perm", [0, 2, 1, 3], np.int32)
    joined = w.node("Transpose", f"{own}/transpose_3", context, order, Tperm=_INT)
    rows = _shaped(w, f"{own}/joined", joined, [-1, WIDTH])
    scope_out = f"{scope}/attention/output"
    attended = _dense(w, f"{scope_out}/dense", rows, WIDTH, WIDTH)
    flat = _normalised(
        w, f"{scope_out}/LayerNorm", w.node("AddV2", f"{scope_out}/add", attended, flat)
    )
    inner = _gelu(w, f"{scope}/intermediate", _dense(
        w, f"{scope}/intermediate/dense", flat, WIDTH, INNER))  # fmt: skip
    outer = _dense(w, f"{scope}/output/dense", inner, INNER, WIDTH)
    flat = _normalised(
        w, f"{scope}/output/LayerNorm", w.node("AddV2", f"{scope}/output/add", outer, flat)
    )
    return _shaped(w, f"{scope}/unflat", flat, [-1, LENGTH, WIDTH])


def _dense(w: GraphWriter, scope: str, x: str, fan_in: int, fan_out: int) -> str:
    kernel = w.variable(f"{scope}/kernel", fan_in, fan_out)
    bias = w.variable(f"{scope}/bias", fan_out)
    return w.node(
        "BiasAdd", f"{scope}/BiasAdd", w.node("MatMul", f"{scope}/MatMul", x, kernel), bias
    )


def _shaped(w: GraphWriter, name: str, x: str, shape: list[int]) -> str:
    return w.node("Reshape", name, x, w.constant(f"{name}/shape", shape, np.int32))


def _split(w: GraphWriter, scope: str, x: str) -> str:
    """Rows of all heads as [batch, heads, length, width of a head]."""
    apart = _shaped(w, f"{scope}/Reshape", x, [-1, LENGTH, HEADS, WIDTH // HEADS])
    order = w.constant(f"{scope}/perm", [0, 2, 1, 3], np.int32)
    return w.node("Transpose", f"{scope}/transpose", apart, order, Tperm=_INT)


def _gelu(w: GraphWriter, scope: str, x: str) -> str:
    root = w.constant(f"{scope}/Sqrt", 2**0.5)
    erf = w.node("Erf", f"{scope}/Erf", w.node("RealDiv", f"{scope}/truediv", x, root))
    more = w.node("AddV2", f"{scope}/add", erf, w.constant(f"{scope}/add/x", 1.0))
    half = w.node("Mul", f"{scope}/mul", more, w.constant(f"{scope}/mul/x", 0.5))
    return w.node("Mul", f"{scope}/mul_1", x, half)


def _normalised(w: GraphWriter, scope: str, x: str) -> str:
    gamma, beta = w.variable(f"{scope}/gamma", WIDTH), w.variable(f"{scope}/beta", WIDTH)
    axis = w.constant(f"{scope}/axis", [-1], np.int32)
    mean = w.node("Mean", f"{scope}/mean", x, axis, keep_dims=True)
    square = w.node("SquaredDifference", f"{scope}/SquaredDifference", x, mean)
    variance = w.node("Mean", f"{scope}/variance", square, axis, keep_dims=True)
    small = w.node("AddV2", f"{scope}/add", variance, w.constant(f"{scope}/add/y", 1e-12))
    scale = w.node("Mul", f"{scope}/mul", w.node("Rsqrt", f"{scope}/Rsqrt", small), gamma)
    shift = w.node("Sub", f"{scope}/sub", beta, w.node("Mul", f"{scope}/mul_2", mean, scale))
    return w.node("AddV2", f"{scope}/add_1", w.node("Mul", f"{scope}/mul_1", x, scale), shift)


def write_variables(prefix: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write random variables as a table and a data file; the bytes of the data."""
    rng, offset = np.random.default_rng(0), 0
    header = parse_message("BundleHeader", b"", "new")
    header.num_shards = 1
    entries = {b"": header.SerializeToString()}
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name in sorted(shapes):
            data = (rng.standard_normal(shapes[name], np.float32) * 0.02).tobytes()
            file.write(data)
            entry = parse_message("BundleEntry", b"", "new")
            entry.dtype, entry.offset, entry.size = _FLOAT, offset, len(data)
            entry.crc32c = masked_crc(data)
            for size in shapes[name]:
                entry.shape.dim.add(size=size)
            entries[name.encode()] = entry.SerializeToString()
            offset += len(data)
    table, handle = _block(b"", entries)
    table, meta = _block(table, {})
    table, index = _block(table, {max(entries): handle})
    footer = (meta + index).ljust(40, b"\0") + _MAGIC.to_bytes(8, "little")
    prefix.with_name(f"{prefix.name}.index").write_bytes(table + footer)
    return offset


def _block(table: bytes, entries: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """A table with one block more, and where that is."""
    content = b"".join(
        b"\0" + _varint(len(key)) + _varint(len(value)) + key + value
        for key, value in sorted(entries.items())
    )
    content += (0).to_bytes(4, "little") + (1).to_bytes(4, "little")  # one restart
    total = masked_crc(content + b"\0").to_bytes(4, "little")
    return table + content + b"\0" + total, _varint(len(table)) + _varint(len(content))


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
