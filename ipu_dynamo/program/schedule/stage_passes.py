"""Group calls into turns: what one stage does in one pass of a micro-batch, without a break.

A stage whose repeated blocks are functions of their own makes many calls in a turn. Schedules,
stashes and threads deal with turns.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ipu_dynamo.program.ir.instructions import Call


def turns(calls: Sequence[Call]) -> list[tuple[Call, ...]]:
    """Consecutive calls of one stage and direction, together."""
    return [tuple(turn) for _, turn in groupby(calls, _pass_of)]


def as_one(turn: Sequence[Call]) -> Call:
    """A turn as if it were one call: what it reads of others, and all that it makes."""
    if len(turn) == 1:
        return turn[0]
    results = dict.fromkeys(name for call in turn for name in call.results if name)
    arguments = dict.fromkeys(name for call in turn for name in call.arguments)
    outside = tuple(name for name in arguments if name not in results)
    return replace(turn[0], arguments=outside, results=tuple(results))


def _pass_of(call: Call) -> tuple[object, ...]:
    return call.ipu, call.stage, call.direction, call.phase
