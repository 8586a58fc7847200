"""Name the operators that a program from a file may call.

They are registered overloads of PyTorch's own libraries and ours, and the arithmetic of sizes.
PyTorch would look up any attribute of its modules for a name in a file. Here are closed lists,
without the operators that do not check indices or sizes.
"""

import re

from ipu_dynamo.ops.operators import operator_named
from ipu_dynamo.ops.unchecked_operators import unchecked
from ipu_dynamo.saved_model.gate.refusal import Refusal

NUMBERS = frozenset(
    [f"torch.sym_{name}" for name in ("int", "float", "max", "min", "not", "ite", "sum")]
    + [
        f"_operator.{name}"
        for name in (
            *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg"),
            *("and_", "or_", "not_", "eq", "ne", "lt", "le", "gt", "ge"),
        )
    ]
    + [f"math.{name}" for name in ("ceil", "floor", "trunc")]
)
WITH_GRAPHS = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in ("wrap_with_set_grad_enabled", "wrap_with_autocast")
)
_REGISTERED = re.compile(r"torch\.ops\.((?:aten|prims|ipu)\.[A-Za-z_]\w*\.[A-Za-z_]\w*)", re.ASCII)

# It believes indices that its forward operator would have computed.
_GRADIENT = re.compile(r"(?:aten|prims)\.\w*_backward", re.ASCII)


def check_operator(target: str) -> None:
    """Let a name pass that stands for an operator of the lists.

    Raises:
        Refusal: it does not.
    """
    if target in NUMBERS or target in WITH_GRAPHS:
        return
    if not (match := _REGISTERED.fullmatch(target)):
        raise Refusal(f"operator {target[:200]!r} is none that a program may have")
    name = match[1]
    problem = unchecked(name)
    if problem is None and _GRADIENT.match(name):
        problem = "computes a gradient, which programs of inference do not"
    if problem is not None:
        raise Refusal(f"operator {target[:200]!r} {problem}")
    try:
        operator_named(name)
    except ValueError as error:
        raise Refusal(f"operator {target[:200]!r}: {error}", trusting=False) from error
