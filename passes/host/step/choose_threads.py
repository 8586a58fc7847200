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
from ipu_dynamo.program.share import Share


class ChooseThreads(Pass):
    """The pass.

    Args:
        several_at_once: stages of several IPUs run at the same time.
        share: of a rank. All ranks have the number of the first one, so that it changes no sum.
    """

    level = "host"

    several_at_once: bool
    share: Share | None = None

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        choice = plan(host, several_at_once=self.several_at_once, share=self.share)
        if choice is None:
            return False
        threads, reason = choice
        decision = Decision(self.name, f"{threads} for each operator", reason)
        return replace(host, threads=threads).deciding(decision)


def plan(
    host: HostProgram, *, several_at_once: bool, share: Share | None = None
) -> tuple[int, str] | None:
    """Return an operator's number of threads with the reason; None: all that PyTorch has."""
    program, available = host.inlined, torch.get_num_threads()
    first = Share(1, 1, 0, 0) if share is None else share.of_rank(0)
    places = len(first.ipus(program.num_ipus)) * len(first.replicas(program.replicas))
    if host.deferred is not None:
        return 1, "micro-batches run side by side"
    if is_spread(program):
        # Threads wait for each other once a call, and not once an operator.
        shared = min(sections(program).micro_batches, available)
        return max(1, available // shared), f"{shared} micro-batches share {available}"
    if several_at_once and places > 1:
        return max(1, available // places), f"{places} IPUs share {available}"
    return None
