"""Write this machine's decisions for a program, and read them back on the same machine."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch

from ipu_dynamo.passes.host.recipes.figures import figures_of
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.machine_name import machine_name
from ipu_dynamo.tune.matmul_choice import Library
from ipu_dynamo.tune.matmul_classes import MEASURED
from ipu_dynamo.tune.matmul_times import Times, Way
from ipu_dynamo.version import __version__

log = logging.getLogger("ipu_dynamo.program")
_MATMULS = {str(one): one for one in MEASURED}
_SIZES = ("x", "weight", "stride", "padding")  # of convolutions


def write_decided(
    functions: Iterable[Function], engine: Engine, figures: Figures | None
) -> dict[str, Any]:
    """Write the figures by which functions are compiled here, as JSON.

    Args:
        figures: those that the engine was given; None: those of this machine.
    """
    compiles = engine.name == "inductor"
    used = (figures or figures_of(functions)) if compiles else None
    return {"here": _here(engine), "figures": None if used is None else _write_figures(used)}


def read_decided(written: Mapping[str, Any], engine: Engine) -> Figures | None:
    """The figures to decide by.

    None: use those of this machine. It is not the one that wrote these, or has other libraries or
    threads.

    Raises:
        SavedProgramError: these are none.
    """
    here, figures = fields_of(dict(written), "decided", here=dict, figures=(dict, type(None)))
    read = None if figures is None else _read_figures(figures)
    own = _here(engine)
    if here == own:
        return read
    differs = [name for name in own if here.get(name) != own[name]]
    log.info(
        "saved by another %s: functions are compiled for this machine, and results may differ from "
        "those of the machine that saved it in their last bits",
        ", ".join(differs) or "version",
    )
    return None


def _here(engine: Engine) -> dict[str, Any]:
    """The facts that must be equal for saved decisions to be used."""
    return {
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "engine": engine.name,
        "float32": torch.get_float32_matmul_precision(),
        "ipu_dynamo": __version__,
    }


def _write_figures(figures: Figures) -> dict[str, Any]:
    matmuls = figures.matmuls
    return {
        "library": figures.library,
        "matmuls": None
        if matmuls is None
        else {str(matmul): dict(ways) for matmul, ways in matmuls.items()},
        "convolutions": [
            {
                **{name: list(getattr(of, name)) for name in _SIZES},
                "mask": list(of.mask),
                "bias": of.bias,
                "seconds": dict(seconds),
            }
            for of, seconds in figures.convolutions.items()
        ],
    }


def _read_figures(written: dict[str, Any]) -> Figures:
    library, matmuls, convolutions = fields_of(
        written, "figures", library=(str, type(None)), matmuls=(dict, type(None)),
        convolutions=list,
    )  # fmt: skip
    if library is not None and library not in get_args(Library):
        raise SavedProgramError(Reason.CONTENT, f"there is no library {library!r}")
    read = None if matmuls is None else _read_matmuls(matmuls)
    return Figures(library, read, dict(map(_read_convolution, convolutions)))


def _read_matmuls(written: dict[str, Any]) -> Times:
    if not written.keys() <= _MATMULS.keys():
        raise SavedProgramError(Reason.CONTENT, "figures of other classes of matmuls")
    figures: dict[Any, Mapping[Way, float]] = {}
    for name, ways in written.items():
        times = _seconds(ways)
        if not {"torch", "onednn"} <= times.keys() <= set(get_args(Way)):
            raise SavedProgramError(Reason.CONTENT, f"figures of other libraries for {name}")
        figures[_MATMULS[name]] = times  # type: ignore[assignment]
    return figures


def _read_convolution(written: Any) -> tuple[ConvolutionShape, Mapping[str, float]]:
    *sizes, mask, bias, seconds = fields_of(
        written, "a convolution", x=list, weight=list, stride=list, padding=list, mask=list,
        bias=bool, seconds=dict,
    )  # fmt: skip
    for number in (one for size in sizes for one in size):
        expect(number, int, "a size")
    for flag in mask:
        expect(flag, bool, "a mask")
    times = _seconds(seconds)
    if times.keys() != {"torch", "matmuls"}:
        raise SavedProgramError(Reason.CONTENT, "figures of other ways to convolve")
    x, weight, stride, padding = map(tuple, sizes)
    return ConvolutionShape(x, weight, stride, padding, tuple(mask), bias), times


def _seconds(written: Any) -> dict[str, float]:
    times = expect(written, dict, "figures")
    for seconds in times.values():
        if not 0.0 < expect(seconds, float, "seconds") < 1e9:
            raise SavedProgramError(Reason.CONTENT, "seconds that cannot be")
    return dict(times)
