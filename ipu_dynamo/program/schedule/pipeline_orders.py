"""Order the passes of a pipeline's step on each IPU: a rule for each name of a schedule.

F, B and W are the forward pass, the backward pass and the weight gradients of stage s of P. There
are M micro-batches, and an IPU has v stages.

    grouped, zero_bubble  by the slots of `pipeline_clock.py`
    gpipe                 all F, then all B
    1f1b                  P - s F, then B and F in turn
    interleaved           IPU r: 2 (P - 1 - r) + (v - 1) P F, then F and B in turn; each of its
                          stages takes P micro-batches before the next one does
    zb_h1                 P - s F, then in turn B, W of s micro-batches before, F
    zb_v                  IPU r has stages r and 2 P - 1 - r, so that the data go there and back:
                          F of the first, then F of both in turn, then F, B, W of both in turn; at
                          the end B before W
    an order              as it says: `options/schedule_order.py`

Sources: "GPipe" (Huang et al., 2018); "PipeDream" (Narayanan et al., 2019) and "Memory-Efficient
Pipeline-Parallel DNN Training" (2020) for 1F1B; "Efficient Large-Scale Language Model Training on
GPU Clusters" (Narayanan et al., 2021) for the interleaved one, whose order is that of
`torch.distributed.pipelining.ScheduleInterleaved1F1B`; "Zero Bubble Pipeline Parallelism" (Qi et
al., 2023) for H1 and V. The order of V is that of
`torch.distributed.pipelining.ScheduleZBVZeroBubble`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, zip_longest

from ipu_dynamo.errors import CompileError
from ipu_dynamo.options.schedule_order import Letter, Order, Task, is_order, read_order
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.writes import Direction
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.pipeline_clock import slots, slots_left

Place = tuple[int, int]  # replica, IPU
_LETTERS: dict[str, Letter] = {
    "forward": "F",
    "forward_backward": "F",
    "backward": "B",
    "weights": "W",
}


def misfit(schedule: str, ipus: Sequence[int], micro_batches: int) -> tuple[str, str] | None:
    """Why a model does not fit a schedule by name, and a remedy; None: it fits.

    Args:
        ipus: of each stage.
    """
    stages, size = len(ipus), len(set(ipus))
    if is_order(schedule):
        return _misfit_of_order(read_order(schedule), ipus, micro_batches)
    needs, places = "a stage on each IPU", [*range(stages)]
    if schedule == "interleaved":
        needs = f"{size} IPUs with as many stages each, in rounds"
        places = [*range(size)] * max(1, round(stages / size))
    if schedule == "zb_v":
        needs = "two stages on each IPU, there and back"
        one_way = range(size if stages != size or size % 2 else size // 2)
        places = [*one_way, *reversed(one_way)]
    if list(ipus) != places:
        problem = f"schedule {schedule} needs {needs}; the stages are on IPUs {_listed(ipus)}"
        hint = f"place the stages on IPUs {_listed(places)}, or use schedule grouped"
        if schedule == "zb_v" and stages > len(places):
            hint += "; StageSpec joins the blocks of a stage"
        return problem, hint
    if schedule == "interleaved" and micro_batches % size:
        problem = f"schedule interleaved needs a multiple of {size} micro-batches"
        below = micro_batches // size * size
        near = f"{below} or {below + size}" if below else size
        return f"{problem}, got {micro_batches}", f"set gradient_accumulation to {near}"
    least = {"gpipe": 1, "zb_v": 2 * size}.get(schedule, size)
    if micro_batches < least:
        problem = f"schedule {schedule} needs at least {least} micro-batches, got {micro_batches}"
        hint = f"set gradient_accumulation to {least} or more"
        return problem, hint if schedule == "zb_v" else f"{hint}, or use schedule gpipe"
    return None


def _misfit_of_order(
    order: Order, ipus: Sequence[int], micro_batches: int
) -> tuple[str, str] | None:
    tasks = [(task, ipu) for ipu, of in order.items() for task in of]
    places = dict(sorted((task.stage, ipu) for task, ipu in tasks))
    count = 1 + max(task.micro_batch for task, _ in tasks)
    if [*places.values()] != list(ipus):
        problem = f"the schedule has stages on IPUs {_listed([*places.values()])}, and the model"
        return f"{problem} on {_listed(ipus)}", "give each block the IPU of its stage"
    if count != micro_batches:
        problem = (
            f"the schedule is of {count} micro-batches, and gradient_accumulation is "
            f"{micro_batches}"
        )
        return problem, f"set it to {count}, or write an order of {micro_batches}"
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def order_of(schedule: str, ipus: Sequence[int], micro_batches: int) -> Order:
    """The order of a schedule by name, or of one that is an order.

    Args:
        ipus: of each stage.
    """
    if is_order(schedule):
        return read_order(schedule)
    count = micro_batches
    if schedule == "interleaved":
        return {ipu: _interleaved(ipu, ipus, count) for ipu in sorted(set(ipus))}
    if schedule == "zb_v":
        return {ipu: _zb_v(ipu, len(ipus) // 2, count) for ipu in sorted(set(ipus))}
    orders: dict[int, Sequence[Task]] = {}
    for stage, ipu in enumerate(ipus):
        first = {"gpipe": count}.get(schedule, min(len(ipus) - stage, count))
        forward = [Task("F", stage, m) for m in range(count)]
        backward = [
            [Task("B", stage, m), *([Task("W", stage, m - stage)] if m >= stage else [])]
            for m in range(count)
        ]
        if schedule != "zb_h1":
            backward = [of[:1] for of in backward]
        rest = zip_longest(backward, ([task] for task in forward[first:]), fillvalue=())
        last = [Task("W", stage, m) for m in range(max(count - stage, 0), count)]
        turns = chain.from_iterable(chain.from_iterable(rest))
        orders[ipu] = [*forward[:first], *turns, *(last if schedule == "zb_h1" else [])]
    return orders


def _interleaved(ipu: int, ipus: Sequence[int], count: int) -> list[Task]:
    own = [stage for stage, of in enumerate(ipus) if of == ipu]
    size = len(set(ipus))
    total = count * len(own)

    def tasks(letter: Letter, stages: Sequence[int]) -> list[Task]:
        rounds = ((first, stage) for first in range(0, count, size) for stage in stages)
        return [Task(letter, s, m) for first, s in rounds for m in range(first, first + size)]

    forward, backward = tasks("F", own), tasks("B", own[::-1])
    first = min(2 * (size - 1 - ipu) + (len(own) - 1) * size, total)
    turns = zip_longest(forward[first:], backward)
    return [*forward[:first], *(task for turn in turns for task in turn if task is not None)]


def _zb_v(ipu: int, size: int, count: int) -> list[Task]:
    """The order of one of `size` IPUs: stage 0 below is its first one, 1 its second one."""
    stages, done = (ipu, 2 * size - 1 - ipu), Counter[str]()
    back = size - ipu  # IPUs from this one to the turn of the V
    parts = [
        ("F0", 2 * back - 1),
        ("F1 F0", ipu),
        ("F1 B1 W1", back),
        ("F0 B0 W0 F1 B1 W1", count - 2 * size + 1 + ipu),
        ("B0 W0 F1 B1 W1", back - 1),
        ("B0 B1", ipu),
        ("B0 W0", back),
        ("W1", ipu),
        ("W0", ipu),
    ]
    tasks = []
    for words, times in parts:
        for word in words.split() * times:
            letter: Letter = word[0]  # type: ignore[assignment]
            tasks.append(Task(letter, stages[int(word[1])], done[word]))
            done[word] += 1
    return tasks


def joins_last(order: Order, stages: int) -> bool:
    """Whether the last stage does both passes of each micro-batch one right after the other."""
    own = next(tasks for tasks in order.values() if any(t.stage == stages - 1 for t in tasks))
    follows = dict(pairwise(own))
    return all(
        follows.get(task) == ("B", *task[1:])
        for task in own
        if task.stage == stages - 1 and task.letter == "F"
    )


def runs_of_workers(
    calls: Sequence[Call],
    waits: Sequence[Sequence[int]],
    worker_of: Mapping[Place, int],
    *,
    schedule: str,
    micro_batches: int,
) -> list[list[RunPass]]:
    """The runs of each worker, in order.

    Args:
        calls: the passes of one micro-batch, in program order.
        waits: for each call, the earlier ones on other IPUs that must be done before it.
        worker_of: the worker of each replica and IPU.
        schedule: name; "" is the order of slots.
    """
    runs: list[list[RunPass]] = [[] for _ in range(max(worker_of.values(), default=-1) + 1)]
    if schedule and any("backward" in call.direction for call in calls):
        cycles = listed_cycles(calls, waits, schedule, micro_batches)
        for (replica, ipu), worker in worker_of.items():
            for (index, micro_batch), cycle in cycles.items():
                if calls[index].ipu == ipu:
                    runs[worker].append(RunPass(cycle, index, micro_batch, replica))
        return [sorted(of) for of in runs]
    when, left = slots(calls), slots_left(calls)
    ends = [0] * len(runs)  # the cycle after which no worker can wait for this one
    for (_, ipu), worker in worker_of.items():
        if ipu in left:  # it computes anything
            ends[worker] = max(ends[worker], micro_batches - 1 + max(when) - left[ipu])
    for replica in sorted({replica for replica, _ in worker_of}):
        for micro_batch in range(micro_batches):
            for index, call in enumerate(calls):
                worker, cycle = worker_of[replica, call.ipu], micro_batch + when[index]
                after = micro_batches - 1 - micro_batch  # so many micro-batches come after it
                if call.direction == "weights" and after <= left[call.ipu]:
                    cycle = ends[worker]
                runs[worker].append(RunPass(cycle, index, micro_batch, replica))

    def turn(run: RunPass) -> tuple[int, bool, RunPass]:
        return run.cycle, calls[run.index].direction == "weights", run

    return [sorted(of, key=turn) for of in runs]


def listed_cycles(
    calls: Sequence[Call], waits: Sequence[Sequence[int]], schedule: str, micro_batches: int
) -> dict[tuple[int, int], int]:
    """When each pass of each micro-batch begins if IPUs follow their lists, and each takes a cycle.

    Raises:
        CompileError: an IPU waits for ever.
    """
    ipus = dict(sorted({call.stage: call.ipu for call in calls}.items()))
    lists = _passes(calls, order_of(schedule, list(ipus.values()), micro_batches))
    cycles: dict[tuple[int, int], int] = {}
    done, ends = dict.fromkeys(lists, 0), dict.fromkeys(lists, 0)
    moved = True
    while moved:
        moved = False
        for ipu, of in lists.items():
            while done[ipu] < len(of):
                index, micro_batch = of[done[ipu]]
                needed = [cycles.get((source, micro_batch)) for source in waits[index]]
                if None in needed:
                    break
                begin = max([ends[ipu], *(1 + cycle for cycle in needed if cycle is not None)])
                cycles[index, micro_batch] = begin
                ends[ipu], moved = begin + 1, True
                done[ipu] += 1
    for ipu, of in lists.items():
        if done[ipu] < len(of):
            index, micro_batch = of[done[ipu]]
            call = calls[index]
            raise CompileError(
                f"the schedule cannot finish: the {call.direction} pass of stage {call.stage} on "
                f"IPU {ipu} waits for ever on micro-batch {micro_batch}",
                hint="let the passes that it waits for come earlier on their IPUs",
            )
    return cycles


def _passes(calls: Sequence[Call], order: Order) -> dict[int, list[tuple[int, int]]]:
    """The passes that IPUs do, as numbers of calls and micro-batches. Parts follow one another.

    Weight gradients that the order does not have follow their backward pass.
    """
    listed = {task[:2] for tasks in order.values() for task in tasks}
    numbers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        letter = _LETTERS[call.direction]
        if (letter, call.stage) not in listed:
            letter = "F" if numbers["F", call.stage] and not numbers["B", call.stage] else "B"
        numbers[letter, call.stage].append(index)
    return {
        ipu: [(i, task.micro_batch) for task in tasks for i in numbers[task[:2]]]
        for ipu, tasks in order.items()
    }


def chain_of(order: Order) -> tuple[list[Call], int]:
    """The calls of a chain of stages that an order is of, and its number of micro-batches."""
    tasks = [(task, ipu) for ipu, of in order.items() for task in of]
    ipus = dict(sorted((task.stage, ipu) for task, ipu in tasks))
    last, letters = max(ipus), {task[:2] for task, _ in tasks}
    joined = joins_last(order, 1 + last)
    calls: list[Call] = []

    def add(direction: Direction, stage: int, reads: str, makes: str) -> None:
        name, results = f"{direction}{stage}", (makes,) if makes else ()
        calls.append(Call(name, ipus[stage], stage, direction, (reads,), results, ""))

    for stage in ipus:
        if stage < last or not joined:
            add("forward", stage, f"h{stage}", f"h{stage + 1}")
    for stage in reversed(ipus):
        both = joined and stage == last
        reads = f"h{stage}" if both else f"d{stage + 1}" if stage < last else f"h{stage + 1}"
        add("forward_backward" if both else "backward", stage, reads, f"d{stage}")
        if ("W", stage) in letters:
            add("weights", stage, f"h{stage}", "")
    return calls, 1 + max(task.micro_batch for task, _ in tasks)
