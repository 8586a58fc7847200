"""Define the instructions that write variables within a micro-batch: functions write none.

An accumulation takes effect where it stands; sums run in the order of instructions, then in that of
micro-batches. A buffer's new value takes effect at the end of its stage pass. Operators of the same
pass have read the value before; later readers of that read a copy, `NAME.before`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ipu_dynamo.program.ir.base_instruction import (
    LOOP,
    BaseInstruction,
    Computed,
    Use,
    listed,
    used,
)
from ipu_dynamo.program.ir.types import TensorType

Direction = Literal["forward", "backward", "forward_backward", "weights"]
Accumulation = Literal["store", "+=", "mean"]


SHARE = TensorType(torch.float32, ())


@dataclass(frozen=True, slots=True)
class Write:
    """One variable that is written.

    Args:
        target: the variable.
        value: a result of a call of the same stage pass.
        weight: the received share, of a mean.
    """

    target: str
    value: str
    rule: Accumulation | Literal["buffer"]
    weight: str | None = None


@dataclass(frozen=True, slots=True)
class Accumulate(BaseInstruction):
    """Write values to accumulators: `store` or add (`+=`) them, or keep the mean so far.

    Args:
        accumulators: names of variables.
        values: results of a call of the same stage pass, aligned.
        rule: of all; `mean` moves an accumulator towards its value by a share of the difference.
        stage, direction, phase: the stage pass that it belongs to.
        source: first line of the user's model behind a value.
        weight: name of the received share, of `mean` alone.
    """

    sections = LOOP

    accumulators: tuple[str, ...]
    values: tuple[str, ...]
    rule: Accumulation
    ipu: int
    stage: int
    direction: Direction
    source: str
    weight: str | None = None
    phase: int | None = None

    @property
    def reads(self) -> tuple[Use, ...]:
        share = (Use(self.weight, self.ipu, SHARE),) if self.weight else ()
        return (*used(self.values, self.ipu, own_pass=True), *share)

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.accumulators, self.ipu, kinds=("accumulator",))

    @property
    def computes(self) -> tuple[Computed, ...]:
        return tuple(Computed(self.rule, name) for name in self.accumulators)

    @property
    def written(self) -> tuple[Write, ...]:
        """The writes, one by one."""
        pairs = zip(self.accumulators, self.values, strict=True)
        return tuple(Write(name, value, self.rule, self.weight) for name, value in pairs)

    def __str__(self) -> str:
        share = f" by %{self.weight}" if self.weight else ""
        names, values = f"({listed(self.accumulators)})", f"({listed(self.values)})"
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"accumulate {names} {self.rule} {values}{share}  {where}"


@dataclass(frozen=True, slots=True)
class WriteBuffer(BaseInstruction):
    """Give variables new values, all at once, at the end of a stage pass.

    Args:
        variables: names of buffers, or of other variables that the model changes.
        values: results of calls of the same stage pass, aligned.
        stage, direction, phase: the stage pass that it belongs to.
        source: first line of the user's model behind a value.
    """

    sections = LOOP

    variables: tuple[str, ...]
    values: tuple[str, ...]
    ipu: int
    stage: int
    direction: Direction
    source: str
    phase: int | None = None

    @property
    def reads(self) -> tuple[Use, ...]:
        return used(self.values, self.ipu, own_pass=True)

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.variables, self.ipu, kinds=("buffer", "parameter", "whole"))

    @property
    def computes(self) -> tuple[Computed, ...]:
        return tuple(Computed("store", name) for name in self.variables)

    @property
    def written(self) -> tuple[Write, ...]:
        """The writes, one by one."""
        pairs = zip(self.variables, self.values, strict=True)
        return tuple(Write(name, value, "buffer") for name, value in pairs)

    def __str__(self) -> str:
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"write ({listed(self.variables)}) = ({listed(self.values)})  {where}"


def in_phase(phase: int | None) -> str:
    """The end of an instruction's text, in a phased program."""
    return "" if phase is None else f", phase {phase}"
