"""Write a model as a saved program with its executable, for a server without Keras."""

import inspect
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import torch
from torch import Tensor

from ipu_dynamo.keras.export.serving_module import (
    POSTPROCESSING,
    PREPROCESSING,
    STAGE,
    ServingModule,
    Step,
)
from ipu_dynamo.keras.private.keras_graphs import producing_node
from ipu_dynamo.keras.private.keras_private import Functional, Sequential
from ipu_dynamo.keras.stages.layer_graph import layer_graph
from ipu_dynamo.keras.stages.stage_plan import stage_plan
from ipu_dynamo.keras.step.machine_shape import stage_ipus
from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.conversion.convert import convert_signature
from ipu_dynamo.saved_model.conversion.settings.config_file import read_request

logger = logging.getLogger("ipu_dynamo.keras")

_TIMEOUT_US = 5000  # recorded in the executable, without effect
_CACHE = "assets"


def export_for_serving(
    model: Any,
    export_dir: str | PathLike[str],
    batch_size: int | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Step | None = None,
    postprocessing_step: Step | None = None,
    purge_export_dir: bool = False,
) -> Callable[..., dict[str, Tensor]]:
    """Write the predictions of an extended model into `export_dir`; return what runs them.

    Args:
        model: built.
        export_dir: of the saved program, absent or empty.
        batch_size: rows of a micro-batch; where the model's inputs have a size it is known.
        output_names: of the outputs; those of the model if left out.
        preprocessing_step: runs on the host; takes the inputs, and gives the model's.
        postprocessing_step: runs on the host; takes the model's outputs, and gives others.
        purge_export_dir: replace the content of `export_dir`.

    Raises:
        RuntimeError: the model has not been built.
        ValueError: `export_dir` is not empty, a size of an input is not known, or the names of
            outputs are not as many as there are.
    """
    target = Path(export_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not purge_export_dir:
        raise ValueError(
            f"export_dir {target} is not empty: choose another one, or let "
            "purge_export_dir=True replace it"
        )
    symbols = _inputs_of(model)
    rows = _rows(model, symbols, batch_size)
    names = [output_names] if isinstance(output_names, str) else output_names
    plan = stage_plan(model, keras.tree.map_structure(lambda s: _example(s, rows), symbols))
    default = _default_names(model) if names is None and postprocessing_step is None else names

    def module(outside: Sequence[Any]) -> ServingModule:
        steps = preprocessing_step, postprocessing_step
        return ServingModule(model, plan, outside, _names(model, symbols), default, *steps)

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        plain, converted = Path(folder) / "plain", Path(folder) / "converted"
        _save(module, symbols, rows, plain)
        options = {**_options(model, rows), **_pipeline(model, plan, folder)}
        convert_signature(plain, converted, read_request(options))
        if target.exists():
            shutil.rmtree(target)
        converted.rename(target)
    return _runner(target, keras.tree.flatten(_names(model, symbols)))


def _inputs_of(model: Any) -> Any:
    """Nested symbolic inputs of a built model."""
    graph = layer_graph(model)
    if graph.inputs is None:
        raise RuntimeError(
            f"model {model.name} has not been built yet: call build() with the shape of its input"
        )
    return graph.inputs


def _rows(model: Any, symbols: Any, batch_size: int | None) -> int:
    """The rows of a micro-batch."""
    if batch_size is not None and (
        isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
    ):
        raise ValueError(f"batch_size is {batch_size!r}, and has to be a positive integer")
    known = [symbol.shape[0] for symbol in keras.tree.flatten(symbols)]
    sizes: set[int] = {size for size in (batch_size, *known) if size is not None}
    if len(sizes) != 1:
        detail = f"there are {sorted(sizes)}" if sizes else "its inputs have none"
        raise ValueError(
            f"the batch size of model {model.name} is unknown, {detail}: give batch_size, or one "
            "size in the batch_shape of every input"
        )
    return sizes.pop()


def _example(symbol: Any, rows: int) -> Tensor:
    if None in symbol.shape[1:]:
        raise ValueError(
            f"input {symbol.name} has the shape {tuple(symbol.shape)}: give it its sizes"
        )
    dtype = getattr(torch, keras.backend.standardize_dtype(symbol.dtype))
    return torch.zeros((rows, *symbol.shape[1:]), dtype=dtype)


def _names(model: Any, symbols: Any) -> Any:
    """The inputs' names, nested as they are.

    Those of a Model subclass, which has no input layers, are made of the argument of its `call`.
    """
    if isinstance(model, Functional | Sequential):
        return keras.tree.map_structure(
            lambda symbol: _identifier(producing_node(symbol).operation.name), symbols
        )
    argument = next(iter(inspect.signature(model.call).parameters))
    paths = [path for path, _ in keras.tree.flatten_with_path(symbols)]
    names = [_identifier("_".join(map(str, (argument, *path)))) for path in paths]
    return keras.tree.pack_sequence_as(symbols, names)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _default_names(model: Any) -> list[str] | None:
    outputs = layer_graph(model).outputs
    if isinstance(outputs, Mapping):
        return None  # its keys
    names = getattr(model, "output_names", None)
    return [_identifier(name) for name in names] if names else None


def _save(
    module_of: Callable[[Sequence[Any]], ServingModule], symbols: Any, rows: int, folder: Path
) -> None:
    """Export the module; again with each variable that predictions turn out to read."""
    outside: list[Any] = []
    while True:
        module = module_of(outside)
        try:
            return _save_module(module, symbols, rows, folder)
        except Exception:
            variable = module.without_tensor
            if variable is None or any(variable is known for known in outside):
                raise
            outside.append(variable)


def _save_module(module: ServingModule, symbols: Any, rows: int, folder: Path) -> None:
    """Export the module: for any number of rows, where its inputs and layers leave that open."""
    flat = keras.tree.flatten(symbols)
    if all(symbol.shape[0] is None for symbol in flat):
        # PyTorch takes a size of 1 for a constant
        example = tuple(_example(symbol, max(rows, 2)) for symbol in flat)
        dimension = torch.export.Dim("rows", min=1)
        try:
            shapes = tuple({0: dimension} for _ in flat)
            save(folder, {"serving_default": (module.eval(), example, shapes)})
            return
        except Exception as error:
            reason = str(error).splitlines()[0]
            logger.info(
                "the program takes %d rows only, as a layer asks for them: %s", rows, reason
            )
    example = tuple(_example(symbol, rows) for symbol in flat)
    save(folder, {"serving_default": (module.eval(), example, None)})


def _options(model: Any, rows: int) -> dict[str, Any]:
    return {
        "batch_size": rows,
        "batch_per_step": int(getattr(model, "steps_per_execution", None) or 1),
        "excluded_nodes": [f"^{PREPROCESSING}/", f"^{POSTPROCESSING}/"],
        "int64_to_int32_conversion": True,
        "embedded_runtime_save_config": {
            "embedded_runtime_exec_cachedir": _CACHE,
            "runtime_api_timeout_us": _TIMEOUT_US,
        },
    }


def _pipeline(model: Any, plan: Any, folder: str) -> dict[str, Any]:
    """The options of a pipelined model: each stage is what its module's name begins."""
    if plan is None:
        return {"num_ipus": 1}
    ipus = stage_ipus(model)
    assert ipus is not None
    return {
        "num_ipus": max(ipus) + 1,
        "pipeline_cfg": {
            "converter": "manual",
            "manual_pipeline_config": [[f"{STAGE}{stage}/"] for stage in range(plan.num_stages)],
            "device_info": list(ipus),
            "profiling_enable": False,
            "solution_dir": str(Path(folder) / "solution"),
        },
    }


def _runner(folder: Path, names: Sequence[str]) -> Callable[..., dict[str, Tensor]]:
    signature = load(folder)["serving_default"]

    def run(*inputs: Any, **by_name: Any) -> dict[str, Tensor]:
        """Run the exported program on inputs in the model's order, or by name."""
        tensors = dict(zip(names, inputs, strict=False)) | by_name
        return signature(**{name: torch.as_tensor(value) for name, value in tensors.items()})

    return run
