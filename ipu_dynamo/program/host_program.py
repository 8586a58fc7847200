"""Describe how this computer runs a program: the program, its forms, and the decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ipu_dynamo.program.decision import Decision
from ipu_dynamo.program.deferred import Deferred
from ipu_dynamo.program.fused import Fused
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.stash import Stash
from ipu_dynamo.program.share import OwnReplicas, Share


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A program, and the forms of it that run in its place.

    Args:
        program: the work of every IPU, the same on every machine.
        inlined: the program as this computer runs it: its functions write variables, and may have
            operators that are faster here.
        deferred: the same once more, with gradients that calls return; None: calls add them.
        fused: a step and its update as one function; None: they are apart.
        share: the part of the program that this rank runs; None: this process runs all.
        local: the share as a program, with streams to and from other ranks.
        threads: intra-op threads of each worker; None is torch's number.
        recipes: how functions become callables, by name.
        decisions: of the host passes, in their order.
        plan: how it runs, once it is bound to tensors and an engine.
    """

    program: Program
    inlined: Program
    deferred: Deferred | None = None
    fused: Fused | None = None
    share: Share | None = None
    local: Program | None = None
    threads: int | None = None
    recipes: Mapping[str, FunctionRecipe] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    plan: HostPlan | None = field(default=None, compare=False)

    @property
    def runs(self) -> Program:
        """What micro-batches run."""
        if self.local is not None:
            return self.local
        return self.inlined if self.deferred is None else self.deferred.program

    @property
    def stash(self) -> tuple[Stash, ...]:
        """For each stage of a training pipeline, the values kept here for its backward pass."""
        return tuple(replace(stash, here=True) for stash in self.inlined.stash)

    @property
    def replicas(self) -> OwnReplicas:
        """The replicas that this process runs."""
        count = self.program.replicas
        own = range(count) if self.share is None else self.share.replicas(count)
        return OwnReplicas(own, count)

    @property
    def ipus(self) -> range:
        """The IPUs that this process runs."""
        count = self.program.num_ipus
        return range(count) if self.share is None else self.share.ipus(count)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that become callables; bodies of loops are parts of theirs."""
        if self.fused is not None:
            return (self.fused.function,)
        called = {call.function for call in self.runs.calls}
        return tuple(function for function in self.runs.functions if function.name in called)

    def deciding(self, *decisions: Decision) -> "HostProgram":
        """The same, with further decisions."""
        return replace(self, decisions=(*self.decisions, *decisions))

    def __str__(self) -> str:
        return self.inlined.listing(here=True) if self.plan is None else str(self.plan)
