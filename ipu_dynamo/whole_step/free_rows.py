"""Run a program that was compiled for one number of rows on any number of them, in whole calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten, pytree
from ipu_dynamo.errors import CompileError, InputError
from ipu_dynamo.passes.micro_batch.independent_rows import rows_of_results
from ipu_dynamo.whole_step.calls.call_signature import ExpectedArguments
from ipu_dynamo.whole_step.compiled_model import CompiledModel


class FreeRows:
    """The result of `ipu_dynamo.free_rows`: call it with any number of rows.

    Args:
        compiled: as for `ipu_dynamo.free_rows`.

    Attributes:
        rows: of one call of the program.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        program, batching = compiled.program, compiled.executable.batching
        if compiled.options.anchors:
            raise _refused("a call has anchors, each with the value of one call of the program")
        if batching.group_of != tuple(range(batching.replicas)):
            raise _refused("replicas share inputs, so that a row has several results")
        self._compiled, self._expected = compiled, ExpectedArguments(compiled.parts.arguments)
        self._factors = rows_of_results(program)
        self.rows = batching.splits * program.inputs[0].type.shape[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on these rows, and return its result.

        The rows of a call that are missing are copies of the last one, and their results are cut
        off.

        Args:
            args: positional arguments, as of a call of the program, with any number of rows: the
                same in all tensors.
            kwargs: keyword arguments, with as many rows.

        Raises:
            InputError: there is no row, or tensors have different numbers of rows.
        """
        return self.run(self._expected.tensors(args, kwargs))

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """As `__call__`, without comparing Python values.

        Args:
            tensors: those of the arguments, in the order in which flattening finds them.
        """
        counts = {tensor.shape[:1] for tensor in tensors}
        if len(counts) != 1 or not min(counts) or not min(counts)[0]:
            raise InputError(
                f"the tensors have {[list(t.shape) for t in tensors]} for shapes, which are not "
                "rows of the same number",
                hint="give each tensor a row for each result, at least one",
            )
        ((count,),) = counts
        parts = []
        for first in range(0, count, self.rows):
            taken = [_filled(x[first : first + self.rows], self.rows) for x in tensors]
            parts.append(flatten(self._compiled.run(taken)))
        joined, positions = list(parts[0][0]), iter(self._factors)
        for i, leaf in enumerate(joined):
            if isinstance(leaf, Tensor):
                rows = count * self._factors[next(positions)]
                joined[i] = torch.cat([leaves[i] for leaves, _ in parts])[:rows]
        return pytree.tree_unflatten(joined, parts[0][1])


def free_rows(compiled: CompiledModel) -> FreeRows:
    """Let a compiled model be called with any number of rows, where its results allow that.

    It runs calls of the size that it was compiled for, the last of them filled up.

    Args:
        compiled: what `compile_inference` returned, once compiled, for two rows or more.

    Raises:
        CompileError: a row of a result may depend on other rows, or on its place among them.
    """
    return FreeRows(compiled)


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with copies of its last row for those that are missing."""
    missing = rows - tensor.shape[0]
    return (
        torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor
    )


def _refused(problem: str) -> CompileError:
    return CompileError(problem, hint="compile it without", id="free-rows")
