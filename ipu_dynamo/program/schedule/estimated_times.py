"""Estimate how long stage passes take, where nothing was measured."""

from ipu_dynamo.ops.operator_costs import estimated_seconds
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.stage_passes import stage_passes


def seconds_of_passes(program: Program) -> list[float]:
    """Of each stage pass of a micro-batch, on one core."""
    of = {function.name: estimated_seconds(function.operators) for function in program.functions}
    return [sum(of[call.function] for call in calls) for calls in stage_passes(program.calls)]


def on_cpu(program: Program) -> bool:
    """Whether all functions take tensors of the CPU only."""
    inputs = (n for f in program.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    return all(node.meta["val"].device.type == "cpu" for node in inputs)
