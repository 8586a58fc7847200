"""Write schedules as text, and read them back; `Schedule.__str__` shows the form."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.writes import Direction
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
    Transfer,
)
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.program.text.indented import Line, in_line, outline, shortened

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_DIRECTIONS: Mapping[str, Direction] = {
    "F": "forward",
    "B": "backward",
    "FB": "forward_backward",
    "W": "weights",
}
LETTERS = {direction: letters for letters, direction in _DIRECTIONS.items()}
_ORDER = "order only"  # of a transfer without values
_NAME = r"\d+(?:FB|F|B|W)b*"  # of a pass
_HEAD = "schedule of {} passes on {} workers"
_WORD = r'(?:[\w.]+|"(?:[^"\\]|\\.)*")'  # the name of a function or a value
_REPEATS = ", repeats its forward pass"
_PASS = re.compile(rf"({_NAME}): @({_WORD}) on ipu(\d+)({_REPEATS})?  #(?: (.*))?", re.ASCII)
_TRANSFER = re.compile(rf"({_NAME})>({_NAME}): (.+)", re.ASCII)
_WORKER = re.compile(r"worker (\d+):(.*)", re.ASCII)
_VALUES = re.compile(rf"%{_WORD}(?:, %{_WORD})*", re.ASCII)
_VALUE = re.compile(rf"%({_WORD})", re.ASCII)
_ACTION = re.compile(
    rf"(?:r(?P<replica>\d+):)?"
    rf"(?:add(?P<added>\d+)"
    rf"|(?P<run>{_NAME})(?P<micro_batch>\d+)(?:>(?P<target>{_NAME}))?"
    rf"|(?P<receiver>{_NAME})<(?P<source>{_NAME})(?P<received>\d+))",
    re.ASCII,
)


def write_schedule(schedule: "Schedule") -> str:
    """A line for each pass, transfer and worker."""
    names = schedule.names
    lines = [_HEAD.format(len(names), len(schedule.workers))]
    for name, of in zip(names, schedule.passes, strict=True):
        what = f"@{_word(of.function)} on ipu{of.ipu}{_REPEATS if of.repeats else ''}"
        lines.append(f"  {name}: {what}  # {of.source}".rstrip())
    for transfer in schedule.transfers:
        values = ", ".join(f"%{_word(value)}" for value in transfer.values) or _ORDER
        lines.append(f"  {names[transfer.source]}>{names[transfer.target]}: {values}")
    for number, actions in enumerate(schedule.workers):
        cells = _cells(actions, names, schedule.transfers)
        lines.append(f"  worker {number}: {' | '.join(cells)}".rstrip())
    return "\n".join(lines)


def _word(name: str) -> str:
    return name if re.fullmatch(r"[\w.]+", name, re.ASCII) else json.dumps(name)


def _name(word: str) -> str:
    """Inverse of `_word`."""
    try:
        return str(json.loads(word)) if word[0] == '"' else word
    except ValueError:
        raise ValueError(f"expected a string of JSON in quotes, not {shortened(word)}") from None


def action_text(action: Action, names: Sequence[str], transfers: Sequence[Transfer]) -> str:
    """An action, in the words of a schedule whose passes have these names."""
    replica, of = f"r{action.replica}:" if action.replica else "", action.micro_batch
    match action:
        case RunPass(index=index):
            return f"{replica}{names[index]}{of}"
        case SendValues(transfer=number):
            source, target = transfers[number].source, transfers[number].target
            return f"{replica}{names[source]}{of}>{names[target]}"
        case ReceiveValues(transfer=number):
            source, target = transfers[number].source, transfers[number].target
            return f"{replica}{names[target]}<{names[source]}{of}"
        case AddGradients():
            return f"{replica}add{of}"


def _cells(
    actions: Sequence[Action], names: Sequence[str], transfers: Sequence[Transfer]
) -> list[str]:
    """The actions of each cycle; values are received in the cycle of the pass that takes them."""
    cells: list[list[str]] = [[]]
    received: list[str] = []
    for action in actions:
        text = action_text(action, names, transfers)
        if isinstance(action, ReceiveValues):
            received.append(text)
            continue
        if isinstance(action, RunPass):
            cells += [[] for _ in range(action.cycle + 1 - len(cells))]
        cells[-1] += [*received, text]
        received = []
        if isinstance(action, RunPass):
            cells += [["-"] for _ in range(action.length - 1)]
    cells[-1] += received
    return [" ".join(cell) for cell in cells]


def read_schedule(text: str, kind: "type[Schedule]") -> "Schedule":
    """Inverse of `write_schedule`.

    Raises:
        ValueError: a line is not as expected; the message has its number.
    """
    head, *others = [line for line in outline(text) if line.text or line.below] or [Line(1, "")]
    others += [below for line in head.below for below in line.below]
    if others:
        with in_line(others[0]):
            raise ValueError("expected one schedule, with all lines but the first two spaces in")
    reader = _Reader()
    for line in head.below:
        with in_line(line):
            reader.read(line)
    with in_line(head):
        workers = tuple(reader.workers)
        schedule = kind(tuple(reader.passes), workers, tuple(reader.transfers))
        if head.text != (wanted := _HEAD.format(len(reader.passes), len(workers))):
            raise ValueError(f"expected {wanted!r}, as there are so many lines")
        if schedule.names != tuple(reader.names):
            raise ValueError(f"expected the passes {', '.join(schedule.names)}, by these names")
    return schedule


class _Reader:
    """Holds the parts that were read so far: passes, transfers between them, then workers."""

    def __init__(self) -> None:
        self.passes: list[StagePass] = []
        self.names: dict[str, int] = {}
        self.transfers: list[Transfer] = []
        self.workers: list[tuple[Action, ...]] = []
        self._numbers: dict[tuple[int, int], int] = {}  # of transfers

    def read(self, line: Line) -> None:
        if (match := _WORKER.fullmatch(line.text)) is not None:
            number, actions = match.groups()
            if int(number) != len(self.workers):
                raise ValueError(f"expected worker {len(self.workers)}")
            self.workers.append(tuple(self._actions(actions)))
        elif self.workers:
            raise ValueError("expected 'worker NUMBER: ACTIONS'")
        elif (match := _TRANSFER.fullmatch(line.text)) is not None:
            source, target = self._pass(match[1]), self._pass(match[2])
            if (source, target) in self._numbers:
                raise ValueError("expected each transfer once")
            self._numbers[source, target] = len(self.transfers)
            self.transfers.append(Transfer(source, target, _read_values(match[3])))
        elif self.transfers:
            raise ValueError("expected 'SOURCE>TARGET: VALUES' or 'worker NUMBER: ACTIONS'")
        elif (match := _PASS.fullmatch(line.text)) is not None:
            name, function, ipu, repeats, source_line = match.groups()
            if name in self.names:
                raise ValueError("expected each pass once")
            self.names[name] = len(self.passes)
            stage, letters = re.findall(r"[0-9]+|[A-Z]+", name)
            direction = _DIRECTIONS[letters]
            place, again = (int(ipu), int(stage), direction), repeats is not None
            self.passes.append(StagePass(_name(function), *place, source_line or "", again))
        else:
            raise ValueError(
                "expected 'PASS: @FUNCTION on ipuNUMBER  # SOURCE', as '0F: @forward0'"
            )

    def _pass(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"expected one of the passes {', '.join(self.names)}, not {name}")
        return self.names[name]

    def _transfer(self, source: str, target: str) -> int:
        key = self._pass(source), self._pass(target)
        if key not in self._numbers:
            raise ValueError(f"expected one of the transfers above, not {source}>{target}")
        return self._numbers[key]

    def _actions(self, text: str) -> list[Action]:
        actions: list[Action] = []
        last: tuple[int, RunPass] | None = None  # the pass before, and its place
        for cycle, cell in enumerate(text.split("|")):
            for word in cell.split():
                if word != "-":
                    action = self._action(word, cycle)
                    if isinstance(action, RunPass):
                        last = len(actions), action
                    actions.append(action)
                    continue
                if last is None:
                    raise ValueError("expected a pass before '-'")
                place, run = last
                last = place, replace(run, length=run.length + 1)
                actions[place] = last[1]
        return actions

    def _action(self, word: str, cycle: int) -> Action:
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ValueError(
                f"expected an action as 0F1, 0F1>1F, 1F<0F1, add1 or r1:0F1, or '|' or '-', "
                f"not {shortened(word)}"
            )
        replica = int(match["replica"] or 0)
        if match["added"]:
            return AddGradients(int(match["added"]), replica)
        if match["receiver"]:
            number = self._transfer(match["source"], match["receiver"])
            return ReceiveValues(number, int(match["received"]), replica)
        micro_batch = int(match["micro_batch"])
        if match["target"]:
            return SendValues(self._transfer(match["run"], match["target"]), micro_batch, replica)
        return RunPass(cycle, self._pass(match["run"]), micro_batch, replica)


def _read_values(text: str) -> tuple[str, ...]:
    if text == _ORDER:
        return ()
    if _VALUES.fullmatch(text) is None:
        raise ValueError(f"expected names as %h, with commas between them, or {_ORDER!r}")
    return tuple(map(_name, _VALUE.findall(text)))
