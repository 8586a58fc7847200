"""Show what a saved program holds: tag sets, signatures, nodes, operators."""

import argparse
import json
from typing import Any

from torch import Tensor

from ipu_dynamo.saved_model.command.tag_sets import tags_of
from ipu_dynamo.saved_model.conversion.open_converted import ConvertedSignature
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.exported.node_names import Group, operators
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec, spec_of
from ipu_dynamo.saved_model.signature import Signature


def add_show(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the subcommand to a parser."""
    parser = commands.add_parser(
        "show", parents=[common], allow_abbrev=False, help="show what a saved program holds"
    )
    parser.add_argument("--tag_set", help="comma-separated tags: list the signatures")
    parser.add_argument("--signature_def", help="a signature: list its inputs and outputs")
    parser.add_argument("--all", action="store_true", help="all of it, for every tag set")
    parser.add_argument("--nodes", action="store_true", help="the nodes of a signature")
    parser.add_argument("--list_ops", action="store_true", help="the operators that are used")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(do=show, check=_wrong_usage)


def _wrong_usage(options: argparse.Namespace) -> str:
    if options.all and options.json:
        return "--all and --json exclude each other"
    if options.all and (options.nodes or options.list_ops or options.tag_set):
        return "--all shows every tag set: leave out --tag_set, --nodes and --list_ops"
    if options.nodes and options.list_ops:
        return "--nodes and --list_ops exclude each other"
    if options.signature_def and not options.tag_set:
        return "--signature_def needs --tag_set"
    if options.nodes and not (options.tag_set and options.signature_def):
        return "--nodes needs --tag_set and --signature_def"
    if options.list_ops and not options.tag_set:
        return "--list_ops needs --tag_set"
    return ""


def show(options: argparse.Namespace) -> None:
    """Print the parts of a program that the options select."""
    programs = SavedPrograms(options.dir, trust=options.trust)
    if options.all:
        _show_all(programs)
        return
    tags = tags_of(options.tag_set or "")
    if options.nodes:
        with programs.signature(tags, options.signature_def) as signature:
            nodes = nodes_json(signature)
        _print(options.json, nodes, [_node_line(node) for node in nodes])
    elif options.list_ops:
        keys = [options.signature_def] if options.signature_def else programs.keys(tags)
        names = {name for key in keys for name in programs.operators(tags, key)}
        _print(options.json, sorted(names), sorted(names))
    elif options.signature_def:
        with programs.signature(tags, options.signature_def) as signature:
            _print(options.json, _signature_json(signature), _signature_lines(signature))
    elif options.tag_set:
        keys = programs.keys(tags)
        _print(options.json, keys, [f"signature_def: {key}" for key in keys])
    else:
        sets = programs.tag_sets()
        _print(options.json, sets, [f"tag_set: {','.join(names)}" for names in sets])


def _show_all(programs: SavedPrograms) -> None:
    for tags in programs.tag_sets():
        print(f"tag_set: {','.join(tags)}")
        for key in programs.keys(tags):
            print(f"  signature_def: {key}")
            with programs.signature(tags, key) as signature:
                for line in _signature_lines(signature):
                    print(f"    {line}")


def _print(as_json: bool, value: Any, lines: list[str]) -> None:
    print(json.dumps(value, indent=1) if as_json else "\n".join(lines))


def _signature_json(signature: Signature) -> dict[str, Any]:
    return {
        "method_name": signature.method_name,
        "inputs": {name: spec.to_json() for name, spec in signature.inputs.items()},
        "outputs": {name: spec.to_json() for name, spec in signature.outputs.items()},
    }


def _signature_lines(signature: Signature) -> list[str]:
    nodes = signature.border_nodes()
    lines = []
    for kind, specs in (("input", signature.inputs), ("output", signature.outputs)):
        lines += [
            f"{kind} {name}: {_spec(spec)}  node {nodes[kind, name]}"
            for name, spec in specs.items()
        ]
    return [*lines, f"method_name: {signature.method_name}"]


def _spec(spec: TensorSpec) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in spec.shape)
    return f"{spec.dtype} [{sizes}]"


def nodes_json(signature: Signature) -> list[dict[str, Any]]:
    """The nodes of a signature, with where a conversion has put them; for the call of an executable
    the nodes that were compiled."""
    call = ["ipu.run_executable.default"]
    nodes = [node_json(group) for group in signature.groups() if operators(group) != call]
    if (placement := signature.placement) is not None:
        stages, devices = placement.pipeline_mapping or {}, placement.nodes
        for node in nodes:
            name = node["name"]
            node["device"] = devices.get(name, "host")
            node["ipu"], node["stage"] = placement.ipu.get(name), stages.get(name)
    if isinstance(signature, ConvertedSignature):
        nodes += signature.compiled_nodes()
    return nodes


def node_json(group: Group) -> dict[str, Any]:
    """A group as `show --nodes --json` has it, on the host."""
    value = group.value.meta.get("val")
    spec = spec_of(0, value) if isinstance(value, Tensor) else None
    names = operators(group)
    return {
        "name": group.name,
        "fx_name": group.value.name,
        "op": names[-1] if names else "",
        "kind": group.kind.value,
        "dtype": spec.dtype if spec else None,
        "shape": list(spec.shape) if spec else None,
        "device": "host",
        "ipu": None,
        "stage": None,
    }


def _node_line(node: dict[str, Any]) -> str:
    sizes = ["?" if size is None else str(size) for size in node["shape"] or ()]
    kind = "number" if node["dtype"] is None else f"{node['dtype']} [{', '.join(sizes)}]"
    what = node["op"] or node["kind"]
    place = node["device"] if node["ipu"] is None else f"{node['device']} {node['ipu']}"
    place += "" if node["stage"] is None else f" stage {node['stage']}"
    return "  ".join([node["name"], node["fx_name"], what, kind, place])
