"""Define the instructions that passes emit and the runtime executes, one line of text each."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.program.optimizers import Rule
from ipu_dynamo.program.types import TensorType
from ipu_dynamo.replica_groups import ReplicaGroups

_PLURAL = {"device_iteration": "device iterations", "micro_batch": "micro-batches"}
Direction = Literal["forward", "backward", "forward_backward", "weights"]
Order = Literal["in_turn", "pipelined"]


def on_ipu(name: str, ipu: int) -> str:
    """What `ipu` calls a value that it has as a copy."""
    return f"{name}.on{ipu}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Read the next micro-batch of a host stream into IPU memory."""

    stream: str
    result: str
    ipu: int

    def __str__(self) -> str:
        return f"receive %{self.result} = host.{self.stream}  -> ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Send:
    """Offer a value to a host stream, whose return rule decides whether it is kept."""

    stream: str
    value: str
    ipu: int
    source: str

    def __str__(self) -> str:
        return f"send host.{self.stream} = %{self.value}  <- ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a value from one IPU to another, which knows it as `result`."""

    value: str
    result: str
    type: TensorType
    src: int
    dst: int
    source: str

    def __str__(self) -> str:
        return f"copy %{self.result} = %{self.value}: {self.type}  ipu{self.src} -> ipu{self.dst}"


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function on an IPU.

    Args:
        function: name of the function.
        ipu: where it runs.
        stage: the pipeline stage that it belongs to.
        direction: which pass of the stage it is; `weights` is the part of a backward pass that no
            other IPU waits for.
        arguments: names of variables and values, in the function's order.
        results: names that the returned tensors get; None for an output without a tensor.
        source: first line of the user's model that it computes.
        phase: when it runs, in a phased program.
    """

    function: str
    ipu: int
    stage: int
    direction: Direction
    arguments: tuple[str, ...]
    results: tuple[str | None, ...]
    source: str
    phase: int | None = None

    def __str__(self) -> str:
        results = ", ".join(f"%{name}" if name else "none" for name in self.results)
        arguments = ", ".join(f"%{name}" for name in self.arguments)
        where = f"on ipu{self.ipu}{_in(self.phase)}"
        return f"({results}) = call @{self.function}({arguments})  {where}"


@dataclass(frozen=True, slots=True)
class Store:
    """Move a value from an IPU to streaming memory, which knows it as `result`.

    Its room on the chip is free afterwards. A variable keeps its name on both sides.
    """

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str

    def __str__(self) -> str:
        return f"store {_moved(self)}  ipu{self.ipu} -> off chip{_in(self.phase)}"


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a value from streaming memory to an IPU, which knows it as `result`.

    A variable that is loaded for a call is on the chip until the call ends.
    """

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str

    def __str__(self) -> str:
        return f"load {_moved(self)}  off chip -> ipu{self.ipu}{_in(self.phase)}"


def _moved(move: Store | Load) -> str:
    origin = "" if move.value == move.result else f" = %{move.value}"
    return f"%{move.result}{origin}: {move.type}, {move.type.nbytes} bytes"


def _in(phase: int | None) -> str:
    return "" if phase is None else f", phase {phase}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum a value over all replicas, in replica order; every replica gets the sum.

    With `groups` each group has a sum of its own. `average` divides by the number of replicas
    afterwards.
    """

    values: tuple[str, ...]
    ipu: int
    average: bool = False
    groups: ReplicaGroups | None = None

    def __str__(self) -> str:
        kind = "mean" if self.average else "sum"
        names = ", ".join(f"%{name}" for name in self.values)
        over = "replicas" if self.groups is None else f"each {self.groups}"
        return f"reduce {kind} over {over} ({names})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Update:
    """Apply one optimiser group's rule to the parameters that live on one IPU.

    Args:
        rule: the equations; its numbers (learning rate, ...) are read at run time.
        group: index of the parameter group whose numbers apply.
        ipu: home of the parameters, their gradients and states.
        parameters: names of variables.
        gradients: names of accumulators, aligned with `parameters`.
        states: for each of the rule's states, the variables that hold it, aligned likewise.
        divisor: the gradients are divided by it first.
        clear: set the gradients, which are accumulators, to zero afterwards.
        rounding: of parameters in half precision: to the nearest, or up or down at random.
    """

    rule: Rule
    group: int
    ipu: int
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    states: tuple[tuple[str, tuple[str, ...]], ...]
    divisor: float
    clear: bool
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __str__(self) -> str:
        pairs = ", ".join(
            f"%{p} by %{g}" for p, g in zip(self.parameters, self.gradients, strict=True)
        )
        mean = f" / {self.divisor}" if self.divisor != 1 else ""
        clear = ", clear" if self.clear else ""
        rounding = ", round at random" if self.rounding == "stochastic" else ""
        does = f"{self.rule}{mean}{clear}{rounding}"
        return f"update group {self.group} {does} ({pairs})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run `body` `count` times; `over` says what is counted.

    `order` is how the runs relate: one after the other, or as a pipeline, in which each IPU works
    on another one.
    """

    over: Literal["device_iteration", "micro_batch"]
    count: int
    body: tuple["Instruction", ...]
    order: Order = "in_turn"

    def __str__(self) -> str:
        order = "" if self.order == "in_turn" else f", {self.order}"
        return f"repeat {self.count} over {_PLURAL[self.over]}{order}"


Instruction = Receive | Send | Copy | Call | Store | Load | Reduce | Update | Repeat
