"""Run a signature on arrays from files, expressions or examples, and print or save its results."""

import argparse
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ipu_dynamo.saved_model.command.result_files import check_free, write_results
from ipu_dynamo.saved_model.command.tag_sets import tags_of
from ipu_dynamo.saved_model.conversion.open_converted import ConvertedSignature
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings, checked_settings
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.feeds.array_calls import to_array
from ipu_dynamo.saved_model.feeds.array_files import read_array
from ipu_dynamo.saved_model.feeds.examples import read_examples
from ipu_dynamo.saved_model.feeds.expressions import evaluate
from ipu_dynamo.saved_model.feeds.pairs import split_pairs
from ipu_dynamo.saved_model.files.named_errors import naming
from ipu_dynamo.saved_model.files.tensor_spec import DTYPES, can_cast
from ipu_dynamo.saved_model.signature import Signature


def add_run(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the subcommand to a parser."""
    parser = commands.add_parser(
        "run", parents=[common], allow_abbrev=False, help="run a signature of a saved program"
    )
    parser.add_argument("--tag_set", required=True, help="comma-separated tags")
    parser.add_argument("--signature_def", required=True, help="the signature to run")
    parser.add_argument(
        "--inputs", default="", help="key=file[;key=file[name]]: .npy or .npz files"
    )
    parser.add_argument("--input_exprs", default="", help="key=expression[;...]: np.ones((2, 3))")
    parser.add_argument(
        "--input_examples", default="", help='key=[{"feature": [values], ...}, ...]'
    )
    parser.add_argument("--outdir", help="write each result to OUTDIR/KEY.npy")
    parser.add_argument("--overwrite", action="store_true", help="replace files in OUTDIR")
    parser.add_argument(
        "--tf_debug", action="store_true", help="print every node's result as it is computed"
    )
    parser.add_argument("--worker", default="", help="'' or local: nothing is run elsewhere")
    parser.add_argument(
        "--init_ipu",
        action="store_true",
        help="configure the IPUs by the options that follow, not by what was saved",
    )
    parser.add_argument("--num_ipus", type=int, help="how many IPUs there are (default: 1)")
    for kind in ("matmul", "conv"):
        parser.add_argument(
            f"--{kind}_amp", type=float, help="available memory proportion (default: 0.6)"
        )
        parser.add_argument(
            f"--{kind}_partial_type", help="partial sums: float or half (default: float)"
        )
    parser.set_defaults(do=run, check=lambda options: "")


def run(options: argparse.Namespace) -> None:
    """Run the signature that the options name.

    Raises:
        ValueError: an option, or an input, does not fit.
        AttributeError: no input is there.
        TypeError: an input's type does not go into that of the signature.
        RuntimeError: a file is there already.
    """
    if options.worker not in ("", "local"):
        raise ValueError(f"--worker {options.worker!r}: only '' and 'local' are there")
    if not (options.inputs or options.input_exprs or options.input_examples):
        raise AttributeError("no inputs: give --inputs, --input_exprs or --input_examples")
    settings = _settings(options)
    programs = SavedPrograms(options.dir, trust=options.trust)
    with programs.signature(tags_of(options.tag_set), options.signature_def) as signature:
        if options.init_ipu and isinstance(signature, ConvertedSignature):
            signature.configure(settings)
        arrays = _arrays(options, signature)
        outdir = Path(options.outdir) if options.outdir else None
        if outdir is not None:
            with naming("--outdir"):
                check_free(outdir, sorted(signature.outputs), overwrite=options.overwrite)
        tensors = {name: _tensor(name, array, signature) for name, array in arrays.items()}
        if options.tf_debug:
            results = signature.watched(tensors, _Printer(signature))
        else:
            results = signature(**tensors)
    values = {name: _as_array(results[name]) for name in sorted(results)}
    for name, value in values.items():
        print(f"Result for output key {name}:\n{value}")
    if outdir is not None:
        with naming("--outdir"):
            write_results(outdir, values)


def _settings(options: argparse.Namespace) -> IpuSettings:
    """The settings of IPUs that the options give, checked whether they are used or not."""
    names = (field.name for field in fields(IpuSettings))
    given = {name: getattr(options, name) for name in names}
    return checked_settings(**{name: v for name, v in given.items() if v is not None})


def _arrays(options: argparse.Namespace, signature: Signature) -> dict[str, Any]:
    """The arrays by input; examples come before expressions, and these before files."""
    texts = split_pairs(options.inputs, "--inputs")
    expressions = split_pairs(options.input_exprs, "--input_exprs")
    examples: dict[str, Any] = {}
    for text in _example_lists(options.input_examples):
        for name, array in read_examples(text).items():
            if name in examples:
                raise ValueError(f"--input_examples: feature {name!r} is there twice")
            examples[name] = array
    sources = {"--inputs": texts, "--input_exprs": expressions, "--input_examples": examples}
    origin: dict[str, str] = {}
    for option, keys in sources.items():
        for key in keys:
            if key not in signature.inputs:
                valid = ", ".join(map(repr, signature.inputs))
                raise ValueError(f"{option}: unknown input {key!r}; valid are {valid}")
            if key in origin:
                warnings.warn(f"input {key!r}: {option} goes before {origin[key]}", stacklevel=2)
            origin[key] = option
    arrays: dict[str, Any] = {}
    for key, option in origin.items():
        if option == "--inputs":
            arrays[key] = read_array(texts[key])
        elif option == "--input_exprs":
            arrays[key] = to_array(evaluate(expressions[key]), expressions[key][:80])
        else:
            arrays[key] = examples[key]
    return arrays


def _example_lists(text: str) -> list[str]:
    return list(split_pairs(text, "--input_examples").values())


def _tensor(name: str, array: Any, signature: Signature) -> Tensor:
    """An array as a tensor; expressions of Python numbers have 64 bits, which go into any."""
    try:
        tensor = torch.from_numpy(np.array(array, order="C").astype(_native(array), copy=False))
    except TypeError as error:
        raise TypeError(f"input {name!r} is {array.dtype}, which tensors have not") from error
    wanted = signature.inputs[name].dtype
    if not can_cast(tensor.dtype, DTYPES[wanted]):
        raise TypeError(f"input {name!r} is {array.dtype}, which does not go into {wanted}")
    return tensor


def _native(array: Any) -> Any:
    """The type of an array in the byte order of this machine."""
    return array.dtype.newbyteorder("=")


def _as_array(value: Tensor) -> Any:
    """A result for printing and `.npy` files; numpy has no bfloat16, whose values float32 has."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


class _Printer:
    """Prints each node of a graph with its result."""

    def __init__(self, signature: Signature) -> None:
        self._names = {node: group.name for group in signature.groups() for node in group.nodes}

    def __call__(self, node: fx.Node, value: Any) -> None:
        if node.op == "call_function" and isinstance(value, Tensor):
            real = value.numel() and not value.is_complex()
            low, high = (value.min().item(), value.max().item()) if real else ("-", "-")
            kind = str(value.dtype).removeprefix("torch.")
            print(f"{self._names[node]}: {kind} {list(value.shape)} min {low} max {high}")
