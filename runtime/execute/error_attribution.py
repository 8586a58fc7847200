"""Find the operator that caused a failure, with stage, instruction and source line."""

from collections.abc import Sequence

from torch import Tensor

from ipu_dynamo.errors import ExecutionError, source_line
from ipu_dynamo.program import Call, Function
from ipu_dynamo.runtime.engines.failing_operator import failing_operator


def explain(
    error: Exception,
    call: Call,
    function: Function,
    arguments: Sequence[Tensor] | None,
    micro_batch: int,
) -> ExecutionError:
    """Return the error that the caller sees when `call` raised `error`.

    Args:
        arguments: of the call; None: they are gone. Without them, or if a second run succeeds, the
            error names the whole call.
    """
    node = failing_operator(function, error, arguments)
    problem = f"{type(error).__name__}: {str(error).strip()}"
    if node is not None:
        problem += f"\n  node:  %{node.name} = {node.target}"
    return ExecutionError(
        problem,
        stage=call.stage,
        instruction=f"call @{call.function}  on ipu{call.ipu}",
        micro_batch=micro_batch,
        where=call.source if node is None else source_line(node),
    )
