"""Convert a signature of a saved program for IPUs."""

import argparse
import ast
from typing import Any

from ipu_dynamo.saved_model.command.tag_sets import tags_of
from ipu_dynamo.saved_model.files.json_values import parse_json

_LONGEST = 1 << 20
_NO_METHOD = "too few arguments: the method of conversion is missing (ipu)"


def add_convert(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the subcommand to a parser."""
    parser = commands.add_parser(
        "convert",
        parents=[common],
        allow_abbrev=False,
        help="convert a signature for IPUs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output_dir", required=True, help="a folder that is absent, or empty")
    parser.add_argument("--tag_set", required=True, help="comma-separated tags")
    parser.add_argument(
        "--signature_def", default="serving_default", help="(default: serving_default)"
    )
    parser.set_defaults(do=_convert, check=lambda o: "" if o.method else _NO_METHOD)
    methods = parser.add_subparsers(dest="method")
    ipu = methods.add_parser("ipu", allow_abbrev=False, help="place the program's nodes on IPUs")
    _add_options(ipu)
    parser.epilog = ipu.format_help()


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Every option of a conversion; those that are left out are None."""
    add = parser.add_argument
    add("--excluded_nodes", nargs="+", metavar="E", help="expressions of nodes that the host runs")
    add(
        "--remove_excluded_nodes",
        **_flag("delete the excluded nodes; what they gave becomes inputs"),
    )
    add("--no_ipu_placement", **_flag("the host runs every node"))
    add("--merge_subgraphs", **_flag("compile all nodes of IPUs as one program"))
    add("--num_ipus", type=int, help="how many IPUs there are (default: 1)")
    for kind in ("matmul", "conv"):
        add(f"--{kind}_amp", type=float, help="available memory proportion (default: 0.6)")
        add(f"--{kind}_partial_type", help="partial sums: float or half (default: float)")
    add("--batch_size", type=int, help="rows of a micro-batch (default: 1)")
    add("--batch_per_step", type=int, help="micro-batches of a step (default: 0)")
    add("--precision_mode", help="FP16 or FP32 (default: types stay)")
    add(
        "--precision_conversion_excluded_nodes",
        nargs="+",
        metavar="E",
        help="expressions of nodes whose types stay",
    )
    add("--int64_to_int32_conversion", **_flag("carry int64 as int32 on IPUs"))
    add("--gelu_replacement", **_object("replace nodes by one GELU operator"))
    add("--manual_sharding", type=_lists, help="for each IPU a list of expressions of its nodes")
    add("--pipeline_cfg", **_object("how stages of a pipeline are found"))
    add("--embedded_runtime_save_config", **_object("write an executable, and where"))
    add("--config_file", metavar="PATH", help="a JSON object with these options")


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_const", "const": True, "help": text}


def _object(text: str) -> dict[str, Any]:
    return {"type": _json, "metavar": "JSON", "help": text}


def _json(text: str) -> Any:
    try:
        return parse_json(text, comments=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error


def _lists(text: str) -> Any:
    """JSON, or a literal of Python."""
    try:
        return parse_json(text, comments=True)
    except ValueError as error:
        if len(text) > _LONGEST:
            raise argparse.ArgumentTypeError(f"more than {_LONGEST} characters") from error
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise argparse.ArgumentTypeError(f"no list: {error}") from error


_OTHERS = frozenset(
    [
        *("command", "method", "do", "check", "dir", "trust", "traceback"),
        *("output_dir", "tag_set", "signature_def", "config_file"),
    ]
)


def _convert(options: argparse.Namespace) -> None:
    """Convert as the options say."""
    from ipu_dynamo.saved_model.conversion.convert import convert  # seconds to import

    line = convert(
        options.dir,
        options.output_dir,
        tags=tags_of(options.tag_set),
        signature_def=options.signature_def,
        trust=options.trust,
        config_file=options.config_file,
        **{name: value for name, value in vars(options).items() if name not in _OTHERS},
    )
    print(line)
