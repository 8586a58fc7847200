"""Shorten the lines of a program's body: name a few values of many, and fold equal moves."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ipu_dynamo.program.ir.instructions import Instruction, Load, Store

_LONG = 6  # values, beyond which a list shows the first two and the last one
_LIST = re.compile(r"\((%[^()]*)\)")


def folded(body: Sequence[Instruction]) -> Iterator[tuple[Instruction, str]]:
    """Each instruction with its line; one line for loads, or stores, of many variables."""
    for key, moves in groupby(body, _move):
        run = list(moves)
        if key is not None and len(run) > 2:
            yield run[0], _moves(run)
        else:
            for instruction in run:
                yield instruction, _LIST.sub(_shortened, str(instruction))


def _move(instruction: Instruction) -> tuple[object, ...] | None:
    """The key of a move of a variable: moves with the same key share a line; None: no move."""
    if not isinstance(instruction, Load | Store) or instruction.value != instruction.result:
        return None
    kind, source = type(instruction), instruction.source
    return kind, instruction.ipu, instruction.phase, instruction.shard, source


def _moves(run: Sequence[Instruction]) -> str:
    """The line of one move, with the names and bytes of all."""
    moves = [move for move in run if isinstance(move, Load | Store)]
    names = _names([f"%{move.value}" for move in moves])
    total = sum(move.type.nbytes for move in moves)
    word, _, end = str(moves[0]).partition(f" %{moves[0].result}")
    _, _, where = end.partition(" bytes  ")
    return f"{word} {names}: {total} bytes in all  {where}"


def _shortened(match: re.Match[str]) -> str:
    return f"({_names(match[1].split(', '))})"


def _names(names: list[str]) -> str:
    if len(names) <= _LONG:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {len(names) - 3} more, {names[-1]}"
