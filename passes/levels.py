"""Define the levels that a model goes down, and what a pass is.

    traced    a Capture of the user's operators, before autograd
    joint     a Capture of forward and backward in one functional graph
    parts     one flat graph for each stage and direction
    program   what every IPU does
    host      what this computer does for that

`invariants.py` says what holds at each level, and from which pass on.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.program import Direction, HostProgram, Program

Level = Literal["traced", "joint", "parts", "program", "host"]


class Pass(Protocol):
    """One step: a frozen dataclass, whose fields are its options.

    A class attribute `needed` says why the step cannot be left out; without it, it can.
    """

    @property
    def name(self) -> str:
        """The one spelling: on the page, in dumps, explanations, errors and `without`."""
        ...

    @property
    def level(self) -> Level:
        """What the step takes."""
        ...

    def __call__(self, model: Any, /) -> Any:
        """Rewrite `model` in place and say whether anything changed, or return what it became."""
        ...


@dataclass
class Part:
    """The work of one stage in one direction.

    Args:
        inputs: names of placeholders and of values that earlier parts made, in calling order.
        outputs: names of the values that `graph` returns.
        gradients: parameters whose gradient it writes to an accumulator, which is an input too.
        counter: the accumulator that counts elements of gradients, an input too, if there is one.
        phase: when it runs, in a phased strategy.
        name: of its function, if that is not made of direction and stage.
    """

    stage: int
    direction: Direction
    ipu: int
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] = ()
    counter: str | None = None
    phase: int | None = None
    name: str = ""

    @property
    def function_name(self) -> str:
        """What to call its function."""
        prefix = "step" if self.direction == "forward_backward" else self.direction
        return self.name or f"{prefix}{self.stage}"


@dataclass(frozen=True)
class Partitioned:
    """The parts, in the order in which a micro-batch runs them.

    Args:
        returned: for each `value` output of the capture, the name of its value.
        changed: for each input that the model changes in place, the name of its new value.
        capture: what was cut, with the roles of its inputs.
    """

    parts: tuple[Part, ...]
    returned: tuple[str, ...]
    changed: dict[str, str]
    capture: Capture = field(repr=False, compare=False)


Model = Capture | Partitioned | Program | HostProgram


def level_of(model: Model) -> Level:
    """The level that a model is at."""
    if isinstance(model, HostProgram):
        return "host"
    if isinstance(model, Program):
        return "program"
    return "parts" if isinstance(model, Partitioned) else model.level
