"""Choose the number of threads of operators, if workers share PyTorch's threads.

Before   HostProgram(threads=None)
After    HostProgram(threads=1), for a pipeline of two IPUs where PyTorch has three threads
Keeps    programs and functions. The number decides the order of some sums. So it depends on
         PyTorch's number of threads and the program, and never on the number of workers.
Source   our own: several teams of threads on the same cores collapse when the machine is busy.
"""

from dataclasses import replace

import torch

from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.schedule.planning import is_spread
from ipu_dynamo.program.schedule.sections import sections


class ChooseThreads(Pass):
    """The pass. `several_at_once`: stages of several IPUs run at the same time."""

    level = "host"

    several_at_once: bool

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        choice = plan(host, several_at_once=self.several_at_once)
        if choice is None:
            return False
        threads, reason = choice
        decision = Decision(self.name, f"{threads} for each operator", reason)
        return replace(host, threads=threads).deciding(decision)


def plan(host: HostProgram, *, several_at_once: bool) -> tuple[int, str] | None:
    """Return an operator's number of threads with the reason; None: all that PyTorch has."""
    program, available = host.inlined, torch.get_num_threads()
    places = program.num_ipus * program.replicas
    if host.deferred is not None:
        return 1, "micro-batches run side by side"
    if is_spread(program):
        # Threads wait for each other once a call, and not once an operator.
        shared = min(sections(program).micro_batches, available)
        return max(1, available // shared), f"{shared} micro-batches share {available}"
    if several_at_once and places > 1:
        return max(1, available // places), f"{places} IPUs share {available}"
    return None
