"""Define the instruction that makes of hyperparameters what traced updates compute with."""

from dataclasses import dataclass

from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class UpdateFactors:
    """Compute, before the micro-batches of a step, the numbers that its updates take.

    They hang on nothing that a micro-batch makes, so it is known before a step whether its updates
    are those that were traced for such numbers. Counters get their next values with the updates.

    Args:
        function: takes the hyperparameters and the counters; gives the results, the next counters,
            and whether the trace holds.
        hyperparameters: of every one its group, its place in there, and its name.
        counters: variables, numbers that the optimiser changes.
        results, types: what updates take.
    """

    function: str
    hyperparameters: tuple[tuple[int, int, str], ...]
    counters: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    ipu: int

    def __str__(self) -> str:
        results = ", ".join(f"%{name}" for name in self.results)
        arguments = [f"{name} of group {group}" for group, _, name in self.hyperparameters]
        arguments += [f"%{name}" for name in self.counters]
        counts = f", counting {', '.join(f'%{n}' for n in self.counters)}" if self.counters else ""
        factors = f"factors @{self.function}({', '.join(arguments)}){counts}"
        return f"({results}) = {factors}  on ipu{self.ipu}"
