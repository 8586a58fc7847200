"""Draw the numbers of distributions with a graph's own operators, from a key and a counter.

Each element mixes the bits of its index, the key and the stream, which is another one for every
draw of every operator, as `ipu.round_stochastically` does.
"""

from dataclasses import dataclass
from math import pi, prod
from typing import Any

import torch
from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.key_mixing import MULTIPLIERS, SHIFTS, signed
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.program.machine_marks import run_nothing

_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # of a fraction; float32 has 24
_NUMBER_STEPS = (0x9E3779B9, 0x85EBCA6B)  # apart the operators of one graph
WORDS = len(_NUMBER_STEPS)  # of a key
STREAM = "ipu.stream"  # key of the meta of `key[word] + offset(word, stream)`: the two numbers


@dataclass
class Drawing:
    """Operators that draw for one node; `number` is the node's position among random ones.

    They go to the graph's insertion point. The machine runs none of them.
    """

    graph: fx.Graph
    key: fx.Node
    node: fx.Node
    number: int
    draws: int = 0

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, placed and blamed where the node is."""
        return run_nothing(call(self.graph, target, *args, origin=self.node, **kwargs))

    def bits(self, shape: tuple[int, ...]) -> fx.Node:
        """Uniform 32-bit integers of `shape`; every call gives others."""
        device = self.key.meta["val"].device
        index = self.op(aten.arange.default, prod(shape), dtype=torch.int32, device=device)
        value = self.op(aten.view.default, index, list(shape))
        for word in self.words():
            value = self.mix(self.op(aten.add.Tensor, value, word))
        return value

    def words(self) -> list[fx.Node]:
        """The key of the next draw, i32[] each."""
        stream = 8 * self.number + self.draws  # at most 8 draws for one operator
        self.draws += 1
        words = []
        for word in range(WORDS):
            part = self.op(aten.select.int, self.key, 0, word)
            words.append(self.op(aten.add.Tensor, part, offset(word, stream)))
            words[-1].meta[STREAM] = (word, stream)
        return words

    def mix(self, value: fx.Node) -> fx.Node:
        for shift, factor in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
            shifted = self.op(aten.bitwise_right_shift.Tensor_Scalar, value, shift)
            shifted = self.op(aten.bitwise_and.Scalar, shifted, (1 << (32 - shift)) - 1)
            value = self.op(aten.bitwise_xor.Tensor, value, shifted)
            if factor != 1:
                value = self.op(aten.mul.Tensor, value, signed(factor))
        return value

    def fraction(self, shape: tuple[int, ...], digits: int = 24) -> fx.Node:
        """Uniform float32 numbers k / 2**digits of [0, 1)."""
        top = self.op(aten.bitwise_right_shift.Tensor_Scalar, self.bits(shape), 32 - digits)
        top = self.op(aten.bitwise_and.Scalar, top, (1 << digits) - 1)
        number = self.op(aten._to_copy.default, top, dtype=torch.float32)
        return self.op(aten.mul.Tensor, number, 2.0**-digits)

    def result_fraction(self) -> fx.Node:
        """Fractions that the dtype of the result holds exactly: rounding would give 1."""
        value = self.node.meta["val"]
        return self.fraction(tuple(value.shape), _DIGITS.get(value.dtype, 24))

    def normal(self, shape: tuple[int, ...]) -> fx.Node:
        """Standard normal float32 numbers, by the method of Box and Muller."""
        positive = self.op(aten.rsub.Scalar, self.fraction(shape), 1.0)  # of (0, 1]
        squared = self.op(aten.mul.Tensor, self.op(aten.log.default, positive), -2.0)
        angle = self.op(aten.mul.Tensor, self.fraction(shape), 2 * pi)
        radius = self.op(aten.sqrt.default, squared)
        return self.op(aten.mul.Tensor, radius, self.op(aten.cos.default, angle))

    def happens(self, shape: tuple[int, ...], probability: float) -> fx.Node:
        """Booleans that are true with `probability`, to 32 bits."""
        threshold = round(probability * 2**32) - 2**31
        if threshold >= 2**31:  # no int32: always
            return self.op(aten.ge.Scalar, self.bits(shape), -(1 << 31))
        return self.op(aten.lt.Scalar, self.bits(shape), threshold)

    def as_result(self, value: fx.Node) -> fx.Node:
        """`value` in the dtype that the operator gives."""
        dtype = self.node.meta["val"].dtype
        if value.meta["val"].dtype == dtype:
            return value
        return self.op(aten._to_copy.default, value, dtype=dtype)


def offset(word: int, stream: int) -> int:
    """Return the number that a stream adds to a word of the key."""
    return signed(_NUMBER_STEPS[word] * (stream + 1))
