"""Read the order of a pipeline's step as text: the stage passes of each IPU, in order.

    worker 0: 0F0 0F1 0B0 0B1
    worker 1: 1F0 1B0 1F1 1B1

Worker 1 is IPU 1. `1F0` is the forward pass of stage 1 on micro-batch 0, `1B0` its backward pass,
and `1W0` its weight gradients, if these are a pass of their own. `1FB0` is `1F0 1B0`. These are the
words of a schedule's text; `|` and `-` may be there, and have no meaning.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ipu_dynamo.errors import OptionError

Letter = Literal["F", "B", "W"]
_LINE = re.compile(r"worker (\d+):(.*)", re.ASCII)
_WORD = re.compile(r"(\d+)(FB|F|B|W)(\d+)", re.ASCII)
_NAMES = {"F": "forward pass", "B": "backward pass", "W": "weight gradients"}
_LARGEST = 1 << 16  # a text of this many stages or micro-batches is a mistake


class Task(NamedTuple):
    """A stage pass on a micro-batch."""

    letter: Letter
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.micro_batch}"


Order = Mapping[int, Sequence[Task]]  # by IPU


def is_order(schedule: str) -> bool:
    """Whether a strategy's schedule is an order, and not a name."""
    return ":" in schedule


def write_order(order: Order) -> str:
    """The order as text."""
    return "\n".join(f"worker {ipu}: {' '.join(map(str, of))}" for ipu, of in order.items())


def read_order(text: str) -> Order:
    """Inverse of `write_order`. The order can finish, and has each pass once.

    Raises:
        OptionError: a word is not understood, a pass is missing or there twice, micro-batches are
            out of order, or IPUs wait for each other. Stage and micro-batch are named.
    """
    order: dict[int, list[Task]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match[1]) != len(order):
            raise OptionError(f"line {number} of the schedule: expected 'worker {len(order)}: ...'")
        order[len(order)] = [task for word in match[2].split() for task in _tasks(word, number)]
    _check_tasks(order)
    _check_end(order)
    return order


def _tasks(word: str, line: int) -> list[Task]:
    if word in ("|", "-"):
        return []
    match = _WORD.fullmatch(word)
    if match is None or max(map(int, match.group(1, 3))) >= _LARGEST:
        raise OptionError(
            f"line {line} of the schedule: expected passes as 0F1, 0B1, 0W1 or 1FB1, not {word!r}"
        )
    letters: tuple[Letter, ...] = ("F", "B") if match[2] == "FB" else (match[2],)  # type: ignore[assignment]
    return [Task(letter, int(match[1]), int(match[3])) for letter in letters]


def _check_tasks(order: Order) -> None:
    """Check that each pass is there once, on one IPU, and takes micro-batches in order."""
    ipu_of: dict[int, int] = {}
    reached: dict[tuple[Letter, int], int] = {}
    for ipu, tasks in order.items():
        for task in tasks:
            if ipu_of.setdefault(task.stage, ipu) != ipu:
                problem = f"stage {task.stage} is on IPU {ipu_of[task.stage]} and on IPU {ipu}"
                raise OptionError(f"the schedule cannot run: {problem}; it has one")
            expected = reached.get(task[:2], 0)
            reached[task[:2]] = expected + 1
            if task.micro_batch < expected:
                raise OptionError(f"the schedule has {_words(task)} twice")
            if task.micro_batch > expected:
                missing = task._replace(micro_batch=expected)
                raise OptionError(
                    f"the schedule has {_words(task)} before {_words(missing)}: each stage takes "
                    "micro-batches in order, in which gradients are summed"
                )
    if not ipu_of:
        raise OptionError("the schedule has no passes")
    count = max(reached.values())
    for stage in range(max(ipu_of) + 1):
        letters: list[Letter] = ["F", "B", *(["W"] if ("W", stage) in reached else [])]  # type: ignore[list-item]
        for letter in letters:
            if (done := reached.get((letter, stage), 0)) < count:
                raise OptionError(f"the schedule lacks {_words(Task(letter, stage, done))}")


def _check_end(order: Order) -> None:
    """Check that no IPU waits for ever: a pass needs that of the stage before, on its micro-batch.

    Backward, the stage before is the next one.
    """
    last = max(task.stage for tasks in order.values() for task in tasks)
    done: set[Task | None] = {None}
    places = Counter[int]()
    moved = True
    while moved:
        moved = False
        for ipu, tasks in order.items():
            while places[ipu] < len(tasks) and _needed(tasks[places[ipu]], last) in done:
                done.add(tasks[places[ipu]])
                places[ipu] += 1
                moved = True
    for ipu, tasks in order.items():
        if places[ipu] < len(tasks):
            task = tasks[places[ipu]]
            needed = _needed(task, last)
            assert needed is not None
            raise OptionError(
                f"the schedule cannot finish: IPU {ipu} waits with {_words(task)} for "
                f"{_words(needed)}, which no IPU can do before it"
            )


def _needed(task: Task, last: int) -> Task | None:
    """The pass that comes right before another in a micro-batch."""
    letter, stage, micro_batch = task
    if letter == "F":
        return Task("F", stage - 1, micro_batch) if stage else None
    if letter == "W":
        return Task("B", stage, micro_batch)
    return Task("B", stage + 1, micro_batch) if stage < last else Task("F", stage, micro_batch)


def _words(task: Task) -> str:
    return f"the {_NAMES[task.letter]} of stage {task.stage} on micro-batch {task.micro_batch}"
