"""Keep weights in the order of a library's own, as long as they do not change."""

from collections.abc import Callable, Sequence, Set

from torch import Tensor

from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.program import Call, Function, Program
from ipu_dynamo.runtime.lower.choose_matmuls import Packed

Run = Callable[[list[Tensor]], Sequence[Tensor | None]]


def constant_variables(program: Program) -> frozenset[str]:
    """The weights on the chips that `program` only reads."""
    written = {function.name: function.written for function in program.functions}
    changed = {call.arguments[i] for call in program.calls for i in written[call.function]}
    return frozenset(
        variable.name
        for variable in program.variables
        if program.kind == "inference" and variable.kind in ("parameter", "buffer")
        if not variable.off_chip and variable.name not in changed
    )


def constant_inputs(
    function: Function, calls: Sequence[Call], constants: Set[str]
) -> tuple[int, ...]:
    """Positions of the arguments that are constants in every call of a function."""
    given = [call.arguments for call in calls if call.function == function.name]
    columns = enumerate(zip(*given, strict=True))
    return tuple(i for i, names in columns if constants >= set(names))


def packing(run: Run, packed: Sequence[Packed]) -> Run:
    """`run`, which takes packed weights after its own inputs, on these inputs alone.

    Each weight that it is called with is packed once, and again when it has been written.
    """
    held: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        further = []
        for one in packed:
            weight = arguments[one.source]
            key, version = (id(weight), one.rows), weight._version
            found = held.get(key)
            if found is None or found[1] != version:
                found = weight, version, onednn_pack(weight.contiguous(), one.rows)
                held[key] = found  # it keeps the weight, too, so that no other gets its id
            further.append(found[2])
        return run([*arguments, *further])

    return stage
