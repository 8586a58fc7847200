"""Describe how a program runs on this computer: the decisions, and the resulting plan."""

from dataclasses import dataclass
from textwrap import fill

from ipu_dynamo.program.decision import Decision
from ipu_dynamo.program.recipe import FunctionRecipe


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The decisions for a program, and its plan; objects of the runtime are given as text.

    Args:
        engine: its name.
        devices: the torch devices of the IPUs, each once.
        threads: intra-op threads of each worker; None is torch's number.
        decisions: the decisions of the host passes, with their reasons.
        recipes: how functions become callables.
        registers: names, by number; on one device a copy shares the register of its original.
        passes: the work for every micro-batch: a title for each stage pass, and its lines.
        before: the work before the micro-batches, done once.
        commit: the work after them, when the step can no more be undone.
        undone: variables that are put back when a step fails before its commit.
        workers: the work of each thread, in order.
    """

    engine: str
    devices: tuple[str, ...]
    threads: int | None
    decisions: tuple[Decision, ...]
    recipes: tuple[FunctionRecipe, ...]
    registers: tuple[tuple[str, ...], ...]
    passes: tuple[tuple[str, tuple[str, ...]], ...]
    before: tuple[str, ...]
    commit: tuple[str, ...]
    undone: tuple[str, ...]
    workers: str

    def __str__(self) -> str:
        """All of it; the last section, the workers, changes no result."""
        threads = "torch's number of threads" if self.threads is None else f"threads {self.threads}"
        lines = [f"host program: {self.engine} on {', '.join(self.devices)}, {threads} each"]
        names = {recipe.function.name for recipe in self.recipes}
        lines += [f"  {decision}" for decision in self.decisions if decision.function not in names]
        for recipe in self.recipes:
            lines.append(f"  recipe {recipe}")
            own = (
                decision for decision in self.decisions if decision.function == recipe.function.name
            )
            lines += [f"    {decision}" for decision in own]
        held = (f"{number} {' '.join(of)}" for number, of in enumerate(self.registers))
        lines += _wrapped(f"registers: {', '.join(held)}")
        for title, body in (("before the micro-batches", self.before), *self.passes):
            if body:
                lines += [f"  {title}:", *(f"    {line}" for line in body)]
        if self.commit:
            lines += ["  commit, signals held:", *(f"    {line}" for line in self.commit)]
        if self.undone:
            lines += _wrapped(f"roll-back before the commit: {', '.join(self.undone)}")
        if self.workers:
            lines += ["  workers:", *(f"    {line}" for line in self.workers.splitlines())]
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return fill(text, 100, initial_indent="  ", subsequent_indent="    ").splitlines()
