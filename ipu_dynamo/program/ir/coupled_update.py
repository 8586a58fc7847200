"""Define the instructions of updates that hang on the tensors of several parameters.

Each parameter's owner computes what others need of it (`UpdatePart`), one IPU makes of these what
hangs on them together (`JointUpdate`), and updates take that as numbers. All of it runs once the
gradients are complete, and before anything is written.
"""

from dataclasses import dataclass

from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Compute of one parameter what the updates of others hang on, too. Nothing is written.

    Args:
        function: takes weight, gradient, states and `numbers`, as that of an `Update`.
        parameter, gradient, states: variables, and an accumulator or a copy of it.
        numbers: what it takes from `UpdateFactors`, and from instructions like these before it.
        results, types: what it gives.
        divisor, loss_scale, clip: what the gradient is divided by, as in `Update`.
    """

    function: str
    parameter: str
    gradient: str
    states: tuple[str, ...]
    numbers: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    divisor: float
    ipu: int
    loss_scale: str | None = None
    clip: str | None = None

    def __str__(self) -> str:
        mean = f" / {self.divisor}" if self.divisor != 1 else ""
        for name in (self.loss_scale, self.clip):
            mean += f" / %{name}" if name else ""
        of = f"%{self.parameter} by %{self.gradient}{mean}"
        return f"({_listed(self.results)}) = part @{self.function}({of})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class JointUpdate:
    """Compute what hangs on several parameters together.

    Args:
        function: takes `arguments`, gives `results`, and behind them what `written` become.
        arguments: values and variables on this IPU.
        results, types: what updates, and parts after it, take.
        written: variables that belong to no parameter; they are written with the updates.
    """

    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    written: tuple[str, ...]
    ipu: int

    def __str__(self) -> str:
        call = f"({_listed(self.results)}) = joint @{self.function}({_listed(self.arguments)})"
        written = f", writing {_listed(self.written)}" if self.written else ""
        return f"{call}{written}  on ipu{self.ipu}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"%{name}" for name in names)
