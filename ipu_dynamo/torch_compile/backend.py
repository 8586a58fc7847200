"""Be the backend "ipu" of `torch.compile`, found through the package's entry point.

Importing this module is cheap; the compiler is imported when the first graph arrives.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if "torch" in sys.modules:  # PyTorch looks the backend up before Dynamo sees a model
    import ipu_dynamo.ops.right_decompositions
    import ipu_dynamo.ops.unread_values  # noqa: F401

if TYPE_CHECKING:
    from torch import fx

    from ipu_dynamo.options import Options
    from ipu_dynamo.torch_compile.backend_options import BackendOptions
    from ipu_dynamo.torch_compile.compile_graph import Record


def ipu(
    gm: "fx.GraphModule",
    example_inputs: Sequence[Any],
    *,
    options: "BackendOptions | Options | dict[str, Any] | None" = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that `torch.compile(model, backend="ipu", options=...)` captured.

    Forward and backward are separate programs; the optimiser is the caller's. Blocks in the model
    become stages on IPUs.

    Args:
        options: `ipu_dynamo.BackendOptions`, or a dictionary of them.
        mode: must be left out.

    Raises:
        CompileError: the graph cannot be compiled, with the line of the model.
        OptionError: an option does not exist or has no meaning here.
    """
    from ipu_dynamo.capture.private.dynamo import reset_with_dynamo

    reset_with_dynamo(ipu)
    return compile_readably(gm, example_inputs, options, mode)


def compile_readably(
    gm: "fx.GraphModule",
    example_inputs: Sequence[Any],
    options: object,
    mode: str | None = None,
    record: "Record | None" = None,
) -> Callable[..., Any]:
    """Compile a graph; whatever goes wrong is raised as an error that Dynamo shows as it is.

    Args:
        record: gets what is decided.
    """
    from ipu_dynamo.capture.private.dynamo import RestartAnalysis
    from ipu_dynamo.capture.private.saved_aot import aot_compiling
    from ipu_dynamo.torch_compile.backend_options import BackendOptions
    from ipu_dynamo.torch_compile.compile_graph import compile_graph
    from ipu_dynamo.torch_compile.dynamo_errors import readable

    if aot_compiling() and mode is None:
        from ipu_dynamo.torch_compile.aot import savable

        return savable(gm, example_inputs, options, _compile_now)
    try:
        return compile_graph(gm, example_inputs, BackendOptions.read(options, mode), record)
    except RestartAnalysis:
        raise  # how Dynamo is asked to capture the frame once more
    except Exception as error:  # some kinds would make Dynamo run the frame elsewhere, silently
        raise readable(error, inspect.currentframe()) from error


def _compile_now(gm: "fx.GraphModule", examples: Sequence[Any], options: Any) -> Callable[..., Any]:
    return ipu(gm, examples, options=options)


def _reset() -> None:
    """Forget what was compiled; `torch._dynamo.reset()` calls this for every compiled model."""
    from ipu_dynamo import program_history
    from ipu_dynamo.torch_compile import notices

    program_history.forget()
    notices.forget()
    if stages := sys.modules.get(
        "ipu_dynamo.runtime.engines.compiled_stages"
    ):  # not without Inductor
        stages.forget()


ipu.reset = _reset  # type: ignore[attr-defined]
