"""Mark operators that emulate an IPU with the operators that the IPU would run.

A mark is `node.meta[MACHINE]`, a text of one or two words:

    nothing                     the machine does not run it; readers of its result read its operands
    aten.native_dropout.default the machine runs this operator, with the operands of the node
    f16                         on the machine the floating results of the node have this dtype
    aten.mul.Tensor f16         both

Passes that insert operators mark them. A pass that rewrites a marked node gives its mark to the new
one. `machine_operators.py` reads the marks.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import fx

from ipu_dynamo.program.ir.types import dtype_name, dtype_named

MACHINE = "ipu.machine"  # key of node.meta
NOTHING = "nothing"
_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.\w+", re.ASCII)


@dataclass(frozen=True, slots=True)
class MachineMark:
    """A mark in its parts.

    Args:
        nothing: the machine does not run the node.
        operator: the operator that runs in its place, or empty.
        dtype: of its floating results; None: their own.
    """

    nothing: bool = False
    operator: str = ""
    dtype: torch.dtype | None = None

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Self:
        """Inverse of `str`.

        Raises:
            ValueError: it is no mark.
        """
        if text == NOTHING:
            return cls(nothing=True)
        first, _, second = text.partition(" ")
        operator, dtype = (first, second) if _OPERATOR.fullmatch(first) else ("", text)
        mark = cls(operator=operator, dtype=dtype_named(dtype))
        if not text or str(mark) != text:
            raise ValueError(f"not a mark for the machine: {text!r}")
        return mark

    def __str__(self) -> str:
        words = [NOTHING] if self.nothing else [self.operator] if self.operator else []
        return " ".join([*words, *([dtype_name(self.dtype)] if self.dtype else [])])


UNMARKED = MachineMark()


def mark_of(node: fx.Node) -> MachineMark:
    """The mark of a node, or `UNMARKED`."""
    text = node.meta.get(MACHINE)
    return UNMARKED if text is None else MachineMark.parse(text)


def run_nothing(node: fx.Node) -> fx.Node:
    """Mark a node as one that the machine does not run, and return it."""
    node.meta[MACHINE] = NOTHING
    return node


def in_dtype(mark: str | None, dtype: torch.dtype) -> str:
    """Return the mark of a node that replaces one with `mark`, and has another dtype here."""
    if mark == NOTHING:
        return NOTHING
    operator = "" if mark is None else MachineMark.parse(mark).operator
    return str(MachineMark(operator=operator, dtype=dtype))
