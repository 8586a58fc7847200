"""Find the operator behind a failure, and say stage, instruction and source line."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import ExecutionError, source_line
from ipu_dynamo.program import Call, Function
from ipu_dynamo.runtime.engines.eager_code import failed_in


class _Finder(fx.Interpreter):
    """Run a graph node by node on copies, to learn which node raises."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> object:
        self.last = n
        return super().run_node(n)


def explain(
    error: Exception,
    call: Call,
    function: Function,
    arguments: Sequence[Tensor] | None,
    micro_batch: int,
) -> ExecutionError:
    """The error that the caller sees when `call` raised `error`.

    The eager engine's code says which operator it was. For compiled code the function is run once
    more, on copies of its arguments; when that succeeds, or the arguments are gone, the whole call
    is named.
    """
    node = _named(function, failed_in(error))
    if node is None and arguments is not None:
        node = _failing_node(function, arguments)
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


def _named(function: Function, name: str | None) -> fx.Node | None:
    return next((node for node in function.operators if node.name == name), None)


def _failing_node(function: Function, arguments: Sequence[Tensor]) -> fx.Node | None:
    finder = _Finder(function.graph)
    try:
        with torch.no_grad():
            finder.run(*[argument.clone() for argument in arguments])
    except Exception:  # the search is over: this is the failure that it looks for
        return finder.last
    return None
