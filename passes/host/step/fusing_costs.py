"""Say why a step and its update cannot be one function, and estimate gains and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.program import (
    Call,
    Function,
    JointUpdate,
    Plain,
    Program,
    Receive,
    Send,
    TensorType,
    Update,
    UpdateFactors,
    UpdatePart,
    Variable,
    graph_outputs,
)
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.program.ir.update_rules import SGD, Adam, TracedRule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.tune.costs import (
    CALLING_A_PARAMETER,
    CALLING_A_TRACED_FUNCTION,
    CALLING_AN_UPDATE,
    COMPILING_AN_UPDATE,
    COPIES_HOME,
    MOST_COPIES,
    NEW_STATES_BYTES_PER_SECOND,
    STEPS_OF_A_TRAINING,
    STORES_OF_A_GRADIENT,
    UPDATE_BYTES_PER_SECOND,
)

_RULES = (SGD, Adam, TracedRule)  # a step with another one keeps the bits of its kernel


@dataclass(frozen=True, slots=True)
class FusingCosts:
    """What fusing changes.

    Args:
        gained: seconds of each step.
        compiling: seconds, once.
        nbytes: bytes that are held twice.
    """

    gained: float
    compiling: float
    nbytes: int

    @property
    def worth(self) -> bool:
        """Whether it gains more than it costs."""
        return self.nbytes <= MOST_COPIES and self.gained * STEPS_OF_A_TRAINING > self.compiling

    def __str__(self) -> str:
        gained = f"{abs(self.gained) * 1e6:.0f} us a step {'less' if self.gained >= 0 else 'more'}"
        return f"{gained}, {self.compiling:.1f} s to compile, {self.nbytes / 2**20:.1f} MiB twice"


def fusing_costs(program: Program) -> FusingCosts:
    """The estimate for a program that could be fused."""
    after = sections(program).after
    updates = [i for i in after if isinstance(i, Update)]
    variables = {variable.name: variable for variable in program.variables}
    weights = [name for update in updates for name in update.parameters]
    states = [name for update in updates for _, names in update.states for name in names]
    gradients = _nbytes(variables, [name for update in updates for name in update.gradients])
    new = _nbytes(variables, states)
    held = new + _nbytes(variables, weights)
    called = CALLING_AN_UPDATE * len(updates) + CALLING_A_PARAMETER * len(weights)
    called += CALLING_A_TRACED_FUNCTION * calls_of(after)
    stored = STORES_OF_A_GRADIENT * gradients / UPDATE_BYTES_PER_SECOND
    copied_back = COPIES_HOME * held / UPDATE_BYTES_PER_SECOND / sections(program).steps
    gained = called + stored - copied_back - new / NEW_STATES_BYTES_PER_SECOND
    return FusingCosts(gained, COMPILING_AN_UPDATE * len(weights), held)


def _nbytes(variables: dict[str, Variable], names: list[str]) -> int:
    return sum(variables[name].type.nbytes for name in names)


def calls_of(after: Sequence[Plain]) -> int:
    """How often functions of a traced update are called in a step."""
    pieces = [len(i.parameters) for i in after if isinstance(i, Update) and i.function]
    joint = [i for i in after if isinstance(i, UpdatePart | JointUpdate)]
    return sum(pieces) + len(joint) + bool(pieces)


def why_not_fused(program: Program) -> str | None:
    """Return why a step and its update cannot be one function; None: they can.

    It has to be one call, and an update of float32 numbers by known rules.
    """
    if program.kind != "training":
        return "nothing is trained"
    if program.replicas > 1:
        return f"{program.replicas} replicas"
    if program.num_ipus > 1:
        return f"{program.num_ipus} IPUs"
    cut = sections(program)
    calls = program.calls
    if len(calls) != 1 or cut.micro_batches != 1:
        micro_batches = counted(cut.micro_batches, "micro-batch", "micro-batches")
        return f"{micro_batches} a step, {counted(len(calls), 'call')} each"
    factors = factors_of(cut.before)
    before = [i for i in cut.before if i is not factors]
    if before or not all(isinstance(i, Receive | Call | Send) for i in cut.loop):
        return "variables or values are off the chip"
    updates = [i for i in cut.after if isinstance(i, Update)]
    kinds = Update | UpdatePart | JointUpdate
    if not updates or not all(isinstance(i, kinds) for i in cut.after):
        return "a step does not end with updates alone"
    for update in updates:
        if not isinstance(update.rule, _RULES):
            return f"the rule {update.rule}"
        if update.rounding != "nearest" or update.loss_scale is not None:
            return "updates round at random, or are divided by a loss scale"
    if factors is not None and (reason := _why_not_traced(program, factors)) is not None:
        return reason
    if not _types_fit(program, updates):
        return "not all weights and states are float32"
    if not _only_stores(called_function(program)):
        return "the function writes a variable in another way than by one store"
    return None


def called_function(program: Program) -> Function:
    (call,) = program.calls
    return program.function(call.function)


def _types_fit(program: Program, updates: Sequence[Update]) -> bool:
    """Whether an update computes in the types that weights, gradients and states have."""
    types = {variable.name: variable.type for variable in program.variables}
    return all(_takes_as_they_are(program, update, types) for update in updates)


def _only_stores(function: Function) -> bool:
    """Whether a function writes in place only by stores, once for each tensor, all unread."""
    stored: set[object] = set()
    for node in function.operators:
        if node.op != "call_function":
            return False
        if not writes(node):
            continue
        target = node.args[0]
        is_input = isinstance(target, fx.Node) and target.op == "placeholder"
        if not stores(node) or node.users or not is_input or target in stored:
            return False
        stored.add(target)
    return True


def stores(node: fx.Node) -> bool:
    """Whether an operator writes a whole value, that of a matrix product perhaps."""
    if node.target is accumulate_matmul:
        return node.args[1] is False
    return node.target is aten.copy_.default


def _why_not_traced(program: Program, factors: UpdateFactors) -> str | None:
    """The reason why a traced update cannot be part of a function; None: it can.

    Of each step it has to be known before that this is the update that was traced for its numbers.
    """
    trained = {i.group for i in program.walk() if isinstance(i, Update)}
    if any(group not in trained for group, *_ in factors.hyperparameters):
        return "the traced update takes numbers of a group in which nothing is trained"
    graph = program.update_function(factors.function).graph
    numbers = graph.graph.find_nodes(op="placeholder")[: len(factors.hyperparameters)]
    if any(n.users and not n.meta["val"].dtype.is_floating_point for n in numbers):
        return "the traced update takes a whole number"
    holds = graph_outputs(graph)[-1]
    if holds.target is not aten.ones.default:
        return "the update was traced for some values of its numbers, which each step looks at"
    return None


def _takes_as_they_are(program: Program, update: Update, types: Mapping[str, TensorType]) -> bool:
    """Whether a function takes and returns its variables in their own types.

    A traced one takes those in half precision as float32. A rule's rounds each value that it
    computes, and its kernel only the last ones: they agree in float32.
    """
    if update.function is None:
        columns = (update.parameters, update.gradients, *(names for _, names in update.states))
        return all(types[name].dtype == torch.float32 for names in columns for name in names)
    function = program.update_function(update.function)
    weight, gradient, *_ = function.inputs
    pairs = ((update.parameters, weight), (update.gradients, gradient))
    same = all(types[name].dtype == of.dtype for names, of in pairs for name in names)
    return same and function.outputs[0] == weight


def factors_of(before: Sequence[Plain]) -> UpdateFactors | None:
    """The instruction that computes the numbers of a traced update, if there is one."""
    return next((i for i in before if isinstance(i, UpdateFactors)), None)
