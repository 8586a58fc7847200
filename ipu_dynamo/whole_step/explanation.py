"""Explain what `compile_training` or `compile_inference` made of a model."""

from dataclasses import dataclass

from ipu_dynamo.passes.manager import PassRun
from ipu_dynamo.program import Decision, Program


@dataclass(frozen=True, slots=True)
class WholeStepExplanation:
    """What became of a model; `str` makes a report of it.

    Args:
        passes: what each did, in order, from the traced model to the program.
        program: what runs.
        decisions: what was decided for this computer.
        times: how long compiling took, part by part, and where the code of functions is from.
    """

    passes: tuple[PassRun, ...]
    program: Program
    decisions: tuple[Decision, ...] = ()
    times: str = ""

    def __str__(self) -> str:
        first, _, _ = str(self.program).partition("\n")
        seconds = sum(run.seconds for run in self.passes)
        lines = [first, *([f"compiled in {self.times}"] if self.times else [])]
        lines += [f"{len(self.passes)} passes, {seconds:.2f} s:"]
        lines += [f"  {run}" for run in self.passes]
        if self.decisions:
            lines += [
                "decisions for this computer:",
                *(f"  {decision}" for decision in self.decisions),
            ]
        return "\n".join(lines)
