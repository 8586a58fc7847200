"""Write a BERT as TensorFlow 1 saves one, graph and variables, without TensorFlow."""

from pathlib import Path
from typing import Any

import numpy as np

from ipu_dynamo.saved_model.tf_graphs.checksums import masked_crc
from ipu_dynamo.saved_model.tf_graphs.messages import parse_message

LAYERS, WIDTH, HEADS, INNER, WORDS, LENGTH = 12, 768, 12, 3072, 30522, 128
_FLOAT, _INT = 1, 3
_MAGIC = 0xDB4775248B80FB57


def write_bert(path: str, layers: int = LAYERS, words: int = WORDS) -> int:
    """Write a BERT-base with random weights into a folder; the bytes of its variables."""
    folder, writer = Path(path), GraphWriter()
    writer.bert(layers, words)
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(writer.message.SerializeToString())
    return write_variables(folder / "variables/variables", writer.variables)


class GraphWriter:
    """A graph that grows node by node; every method returns the name of a value.

    Names of nodes are their operators with a number; those of variables are given.
    """

    def __init__(self) -> None:
        self.message = parse_message("SavedModel", b"", "new")
        self.message.schema_version = 1
        meta = self.message.meta_graphs.add()
        meta.meta_info.tags.append("serve")
        self.graph = meta.graph
        self.signature = meta.signatures.add(key="serving_default")
        self.signature.value.method_name = "tensorflow/serving/predict"
        self.variables: dict[str, tuple[int, ...]] = {}

    def node(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"{op}_{len(self.graph.node)}"
        node = self.graph.node.add(name=name, op=op)
        node.input.extend(inputs)
        for key, value in attributes.items():
            entry = node.attr.add(key=key)
            if isinstance(value, bool):
                entry.value.b = value
            elif isinstance(value, tuple):
                _set_shape(entry.value.shape, value)
            elif isinstance(value, np.ndarray):
                tensor = entry.value.tensor
                tensor.dtype = _INT if value.dtype == np.int32 else _FLOAT
                _set_shape(tensor.shape, value.shape)
                tensor.tensor_content = value.tobytes()
            else:
                entry.value.type = value
        return name

    def bert(self, layers: int, words: int) -> None:
        ids = self.node("Placeholder", name="input_ids", dtype=_INT, shape=(-1, LENGTH))
        self._border(self.signature.value.inputs, ids, _INT, -1, LENGTH)
        scope = "bert/embeddings"
        table = self._variable(f"{scope}/word_embeddings", words, WIDTH)
        rows = self.node("GatherV2", table, ids, self._constant(0, np.int32), Tparams=_FLOAT)
        places = self._variable(f"{scope}/position_embeddings", LENGTH, WIDTH)
        x = self._normalised(f"{scope}/LayerNorm", self.node("AddV2", rows, places))
        for layer in range(layers):
            x = self._layer(f"bert/encoder/layer_{layer}", x)
        result = self.node("Identity", x, name="sequence_output", T=_FLOAT)
        self._border(self.signature.value.outputs, result, _FLOAT, -1, LENGTH, WIDTH)

    def _layer(self, scope: str, x: str) -> str:
        flat = self._shaped(x, -1, WIDTH)
        query, key, value = (
            self._split(self._dense(f"{scope}/attention/self/{name}", flat, WIDTH, WIDTH))
            for name in ("query", "key", "value")
        )
        scores = self.node("BatchMatMulV2", query, key, T=_FLOAT, adj_y=True)
        scaled = self.node("Mul", scores, self._constant((WIDTH / HEADS) ** -0.5))
        context = self.node("BatchMatMulV2", self.node("Softmax", scaled), value, T=_FLOAT)
        rows = self._shaped(self._transposed(context), -1, WIDTH)
        out = f"{scope}/attention/output"
        attended = self._dense(f"{out}/dense", rows, WIDTH, WIDTH)
        flat = self._normalised(f"{out}/LayerNorm", self.node("AddV2", attended, flat))
        inner = self._gelu(self._dense(f"{scope}/intermediate/dense", flat, WIDTH, INNER))
        outer = self._dense(f"{scope}/output/dense", inner, INNER, WIDTH)
        flat = self._normalised(f"{scope}/output/LayerNorm", self.node("AddV2", outer, flat))
        return self._shaped(flat, -1, LENGTH, WIDTH)

    def _dense(self, scope: str, x: str, fan_in: int, fan_out: int) -> str:
        kernel = self._variable(f"{scope}/kernel", fan_in, fan_out)
        bias = self._variable(f"{scope}/bias", fan_out)
        return self.node("BiasAdd", self.node("MatMul", x, kernel), bias)

    def _split(self, x: str) -> str:
        """Rows of all heads as [batch, heads, length, width of a head]."""
        return self._transposed(self._shaped(x, -1, LENGTH, HEADS, WIDTH // HEADS))

    def _transposed(self, x: str) -> str:
        return self.node("Transpose", x, self._constant([0, 2, 1, 3], np.int32), Tperm=_INT)

    def _shaped(self, x: str, *shape: int) -> str:
        return self.node("Reshape", x, self._constant(shape, np.int32))

    def _gelu(self, x: str) -> str:
        erf = self.node("Erf", self.node("RealDiv", x, self._constant(2**0.5)))
        half = self.node("Mul", self.node("AddV2", erf, self._constant(1.0)), self._constant(0.5))
        return self.node("Mul", x, half)

    def _normalised(self, scope: str, x: str) -> str:
        gamma, beta = (self._variable(f"{scope}/{name}", WIDTH) for name in ("gamma", "beta"))
        axis = self._constant([-1], np.int32)
        mean = self.node("Mean", x, axis, keep_dims=True)
        square = self.node("SquaredDifference", x, mean)
        variance = self.node("Mean", square, axis, keep_dims=True)
        root = self.node("Rsqrt", self.node("AddV2", variance, self._constant(1e-12)))
        scale = self.node("Mul", root, gamma)
        shift = self.node("Sub", beta, self.node("Mul", mean, scale))
        return self.node("AddV2", self.node("Mul", x, scale), shift)

    def _constant(self, value: Any, kind: type = np.float32) -> str:
        dtype = _INT if kind is np.int32 else _FLOAT
        return self.node("Const", dtype=dtype, value=np.asarray(value, kind))

    def _variable(self, name: str, *shape: int) -> str:
        self.variables[name] = shape
        self.node("VariableV2", name=name, dtype=_FLOAT, shape=shape)
        return self.node("Identity", name, T=_FLOAT)

    def _border(self, entries: Any, name: str, dtype: int, *shape: int) -> None:
        """Name an input or output of the signature."""
        entry = entries.add(key=name)
        entry.value.name, entry.value.dtype = f"{name}:0", dtype
        _set_shape(entry.value.shape, shape)


def _set_shape(message: Any, shape: tuple[int, ...]) -> None:
    for size in shape:
        message.dim.add(size=size)


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
            _set_shape(entry.shape, shapes[name])
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
