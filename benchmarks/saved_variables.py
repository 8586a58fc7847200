"""Write variables of a BERT-base's size as TensorFlow 1 does, and time reading them."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import in_fresh_child
from benchmarks.measure import clock
from benchmarks.peak_memory import peak_bytes
from ipu_dynamo.saved_model.tf_graphs.checksums import masked_crc
from ipu_dynamo.saved_model.tf_graphs.messages import parse_message
from ipu_dynamo.saved_model.tf_graphs.variable_table import VariableTable

LAYERS, WIDTH, INNER, WORDS = 12, 768, 3072, 30522
_FLOAT = 1
_MAGIC = 0xDB4775248B80FB57


def reading() -> dict[str, float]:
    """Seconds to read and check the variables, and the peak memory of it."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "variables"
        # in a process of its own, whose memory is not this one's
        nbytes = in_fresh_child("benchmarks.saved_variables:write", str(prefix))
        spent: list[float] = []
        peak = peak_bytes(lambda: spent.append(clock(lambda: _read(prefix))(1)))
        return {
            "megabytes of variables": nbytes / 1e6,
            "seconds to read and check them": spent[0],
            "peak memory, times the variables": peak / nbytes,
        }


def _read(prefix: Path) -> list[Any]:
    table = VariableTable(prefix)
    return [table.tensor(key) for key in table.names]


def write(path: str) -> int:
    """Write random variables as a table and a data file; the bytes of the data."""
    prefix, rng, offset = Path(path), np.random.default_rng(0), 0
    header = parse_message("BundleHeader", b"", "new")
    header.num_shards = 1
    entries = {b"": header.SerializeToString()}
    shapes = _shapes()
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


def _shapes() -> dict[str, tuple[int, ...]]:
    """The variables of a BERT-base, by name, without those of its norms."""
    layer: dict[str, tuple[int, ...]] = {"inner": (WIDTH, INNER), "outer": (INNER, WIDTH)}
    layer |= dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    layer |= {f"{name}/bias": shape[1:] for name, shape in layer.items()}
    layers = {f"layer_{i}/{name}": layer[name] for i in range(LAYERS) for name in layer}
    return {"embeddings": (WORDS, WIDTH)} | layers


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
