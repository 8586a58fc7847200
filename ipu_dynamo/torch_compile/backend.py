"""Be the backend "ipu" of `torch.compile`, found through the package's entry point.

Importing this module is cheap; the compiler is imported when the first graph arrives.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if "torch" in sys.modules:  # PyTorch looks the backend up before Dynamo sees a model
    import ipu_dynamo.ops.right_decompositions
    import ipu_dynamo.ops.unread_values  # noqa: F401

if TYPE_CHECKING:
    from torch import fx

    from ipu_dynamo.capture.private.failed_frames import FailedFrame
    from ipu_dynamo.options import Options
    from ipu_dynamo.torch_compile.backend_options import BackendOptions


def _watch() -> None:
    """Note frames that Dynamo gives up, which this backend never sees."""
    from ipu_dynamo.capture.private.failed_frames import watch_failures

    watch_failures(_tell)


def _tell(failure: "FailedFrame") -> None:
    from ipu_dynamo.torch_compile.notices import tell_of_recurrent_layer

    tell_of_recurrent_layer(failure)


if "torch._dynamo" in sys.modules:
    _watch()


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
    from ipu_dynamo.capture.private.saved_aot import aot_compiling
    from ipu_dynamo.torch_compile.compile_graph import compile_readably

    _watch()
    reset_with_dynamo(compile_readably)
    if aot_compiling() and mode is None:
        from ipu_dynamo.torch_compile.aot import savable

        return savable(gm, example_inputs, options)
    return compile_readably(gm, example_inputs, options, mode)
