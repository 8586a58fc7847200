"""Estimate how long stage passes take, where nothing was measured."""

from collections import defaultdict

from ipu_dynamo.ops.operator_costs import estimated_seconds
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.program.text.graph_text import DIRECTION, RECOMPUTED

_LEAST_REPEATED = 0.5  # share of a forward pass that counts as the whole of it


def seconds_of_passes(program: Program) -> list[float]:
    """Of each stage pass of a micro-batch, on one core."""
    of = {function.name: estimated_seconds(function.operators) for function in program.functions}
    return [sum(of[call.function] for call in calls) for calls in stage_passes(program.calls)]


def repeating_passes(program: Program) -> list[bool]:
    """Of each stage pass of a micro-batch, whether it repeats at least half of a forward pass.

    The half is one of the estimated seconds of its stage's forward pass.
    """
    functions = {function.name: function for function in program.functions}
    passes = stage_passes([i for i in sections(program).loop if isinstance(i, Call)])
    again = [0.0] * len(passes)
    forward: dict[int, float] = defaultdict(float)  # by stage
    if not any(functions[call.function].repetitions for calls in passes for call in calls):
        return [False] * len(passes)
    for place, calls in enumerate(passes):
        for call in calls:
            operators = functions[call.function].operators
            repeated = [node for node in operators if RECOMPUTED in node.meta]
            again[place] += estimated_seconds(repeated)
            if "forward" in call.direction:
                own = (n for n in operators if not {RECOMPUTED, DIRECTION} & n.meta.keys())
                forward[call.stage] += estimated_seconds(own)
    return [
        seconds > 0 and seconds >= _LEAST_REPEATED * forward[calls[0].stage] > 0
        for seconds, calls in zip(again, passes, strict=True)
    ]


def on_cpu(program: Program) -> bool:
    """Whether all functions take tensors of the CPU only."""
    inputs = (n for f in program.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    return all(node.meta["val"].device.type == "cpu" for node in inputs)
