"""Write and read `saved_model.json`, which says what a saved program directory holds."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.files.json_values import parse_json
from ipu_dynamo.saved_model.files.placement_entry import PlacementEntry, placement_from_json
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec, spec_from_json

FILE = "saved_model.json"
FORMAT, FORMAT_VERSION = "ipu_dynamo.saved_model", 1
LARGEST = 1 << 26
_SUM = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NEEDED = {"method_name", "program", "sha256", "inputs", "outputs"}
_OPTIONAL = {"parameter_names", "placement", "defaults"}


@dataclass(frozen=True, slots=True)
class SignatureEntry:
    """A signature as the index has it.

    Attributes:
        program: path of its archive, relative to the index.
        sha256: of that file.
        parameter_names: canonical names of parameters, where they are not the qualified ones.
        placement: where the nodes of a converted program run.
        defaults: of one row, as nested lists of numbers, of inputs that may be left out.
    """

    program: str
    sha256: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    method_name: str = "predict"
    parameter_names: Mapping[str, str] = field(default_factory=dict)
    placement: PlacementEntry | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "method_name": self.method_name,
            "program": self.program,
            "sha256": self.sha256,
            "inputs": {name: spec.to_json() for name, spec in self.inputs.items()},
            "outputs": {name: spec.to_json() for name, spec in self.outputs.items()},
        }
        if self.parameter_names:
            value["parameter_names"] = dict(self.parameter_names)
        if self.placement is not None:
            value["placement"] = self.placement.to_json()
        if self.defaults:
            value["defaults"] = dict(self.defaults)
        return value


@dataclass(frozen=True, slots=True)
class MetaGraph:
    """A set of tags, and the signatures that it offers."""

    tags: frozenset[str]
    signatures: Mapping[str, SignatureEntry]


def write_index(meta_graphs: Iterable[MetaGraph]) -> bytes:
    """The text of an index."""
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "meta_graphs": [
            {
                "tags": sorted(graph.tags),
                "signature_defs": {k: e.to_json() for k, e in graph.signatures.items()},
            }
            for graph in meta_graphs
        ],
    }
    return f"{json.dumps(value, indent=1, allow_nan=False)}\n".encode()


def read_index(path: Path) -> list[MetaGraph]:
    """The meta graphs that an index lists.

    Raises:
        ValueError: it cannot be read, is of a newer format, or an entry is wrong.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: more than {LARGEST} bytes")
        value = parse_json(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"{path}: no index of a saved program (its format is not {FORMAT!r})")
    version = value.get("format_version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path}: format_version {version!r} is no version")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the last known here"
        )
    graphs = value.get("meta_graphs")
    if not isinstance(graphs, list):
        raise ValueError(f"{path}: meta_graphs is no list")
    result = [_meta_graph(graph, f"{path}: meta_graphs[{i}]") for i, graph in enumerate(graphs)]
    for index, graph in enumerate(result):
        if any(graph.tags == other.tags for other in result[:index]):
            raise ValueError(f"{path}: two meta graphs have the tags {sorted(graph.tags)}")
    return result


def check_text(value: object, what: str) -> str:
    """`value`, if it is a name.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{what}: {value!r} is no name")
    return value


def _meta_graph(value: Any, what: str) -> MetaGraph:
    if not isinstance(value, dict) or value.keys() != {"tags", "signature_defs"}:
        raise ValueError(f"{what}: not tags and signature_defs")
    tags, signatures = value["tags"], value["signature_defs"]
    if not isinstance(tags, list) or not isinstance(signatures, dict):
        raise ValueError(f"{what}: tags is no list, or signature_defs no object")
    names = frozenset(check_text(tag, f"{what}: tags") for tag in tags)
    return MetaGraph(
        names,
        {
            check_text(key, what): _entry(entry, f"{what}: signature {key!r}")
            for key, entry in signatures.items()
        },
    )


def _entry(value: Any, what: str) -> SignatureEntry:
    if not isinstance(value, dict) or not value.keys() >= _NEEDED:
        raise ValueError(f"{what}: lacks one of {', '.join(sorted(_NEEDED))}")
    if unknown := sorted(value.keys() - _NEEDED - _OPTIONAL):
        raise ValueError(f"{what}: {unknown[0]!r} is not known here")
    program, digest = value["program"], value["sha256"]
    if not isinstance(program, str) or not _is_inside(program):
        raise ValueError(f"{what}: program {program!r} is no path inside of the directory")
    if not isinstance(digest, str) or not _SUM.fullmatch(digest):
        raise ValueError(f"{what}: sha256 is no sum")
    names = value.get("parameter_names", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{what}: parameter_names are no names")
    inputs = _specs(value["inputs"], f"{what}: inputs")
    return SignatureEntry(
        program,
        digest,
        inputs,
        _specs(value["outputs"], f"{what}: outputs"),
        check_text(value["method_name"], f"{what}: method_name"),
        names,
        placement_from_json(value["placement"], f"{what}: placement")
        if "placement" in value
        else None,
        _defaults(value.get("defaults", {}), inputs, f"{what}: defaults"),
    )


def _defaults(value: Any, inputs: Mapping[str, TensorSpec], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: no object")
    if unknown := sorted(value.keys() - inputs.keys()):
        raise ValueError(f"{what}: {unknown[0]!r} is no input")
    for name, numbers in value.items():
        if not _is_array(numbers, inputs[name].shape[1:]):
            raise ValueError(f"{what}: {name!r} is no row of {inputs[name]}")
    return value


def _is_array(value: Any, shape: tuple[int | None, ...]) -> bool:
    """Whether nested lists of numbers have a shape."""
    if not shape:
        return type(value) in (bool, int, float)
    return (
        isinstance(value, list)
        and shape[0] in (None, len(value))
        and all(_is_array(part, shape[1:]) for part in value)
    )


def _specs(value: Any, what: str) -> dict[str, TensorSpec]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: no object")
    return {
        check_text(name, what): spec_from_json(spec, f"{what}: {name!r}")
        for name, spec in value.items()
    }


def _is_inside(path: str) -> bool:
    parts = path.split("/")
    return (
        path.isprintable() and "\\" not in path and ":" not in path
        and not {"", ".", ".."} & set(parts)
    )  # fmt: skip
