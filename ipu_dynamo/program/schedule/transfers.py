"""Plan transfers: add sends and receives to the passes that workers run."""

from collections import defaultdict
from collections.abc import Sequence

from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.schedule.actions import (
    Action,
    ReceiveValues,
    RunPass,
    SendValues,
    Transfer,
)
from ipu_dynamo.program.schedule.stage_passes import NO_EXCHANGES, Exchanges

_ROOM = 2  # micro-batches that wait for a reader


def plan_transfers(
    calls: Sequence[Call],
    runs: Sequence[Sequence[RunPass]],
    waits: Sequence[Sequence[int]],
    readers: Sequence[Sequence[int]] = (),
    exchanges: Exchanges = NO_EXCHANGES,
) -> tuple[tuple[tuple[Action, ...], ...], tuple[Transfer, ...]]:
    """The actions of workers, and the transfers in them: see `Schedule.of_runs`."""
    worker_of = {(run.index, run.replica): worker for worker, of in enumerate(runs) for run in of}
    values = _values(calls, waits)
    # of each target, and how many micro-batches before
    sources: list[list[tuple[int, int]]] = [[] for _ in calls]
    for source, target in values:
        sources[target].append((source, 0))
    for target, later in enumerate(readers):
        sources[target] += [(source, _ROOM) for source in later]
    replicas = sorted({replica for _, replica in worker_of})
    needed: list[tuple[RunPass, int, int, int]] = []  # run; source, its micro-batch and replica
    for worker, of in enumerate(runs):
        known = set[tuple[int, int, int, int]]()  # a worker receives a message once
        for run in of:
            theirs = [(source, ago, run.replica) for source, ago in sources[run.index]]
            exchanged = exchanges.get(run.index, {})
            theirs += [(source, 0, r) for source in exchanged for r in replicas if r != run.replica]
            for source, ago, replica in theirs:
                message = source, run.index, run.micro_batch - ago, replica
                away = worker_of[source, replica] != worker
                if away and run.micro_batch >= ago and message not in known:
                    known.add(message)
                    needed.append((run, source, run.micro_batch - ago, replica))
    values |= {(s, t): names for t, sources_ in exchanges.items() for s, names in sources_.items()}
    pairs = sorted({(source, run.index) for run, source, *_ in needed})
    numbers = {pair: number for number, pair in enumerate(pairs)}
    received: dict[RunPass, list[Action]] = defaultdict(list)
    sent: dict[tuple[int, int, int], dict[SendValues, None]] = defaultdict(dict)
    for run, source, micro_batch, replica in needed:
        number = numbers[source, run.index]
        received[run].append(ReceiveValues(number, micro_batch, replica))
        sent[source, micro_batch, replica][SendValues(number, micro_batch, replica)] = None
    workers = []
    for of in runs:
        actions: list[Action] = []
        for run in of:
            sends = sent[run.index, run.micro_batch, run.replica]
            actions += [*received[run], run, *sorted(sends, key=lambda send: send.transfer)]
        workers.append(tuple(actions))
    return tuple(workers), tuple(Transfer(*pair, values.get(pair, ())) for pair in pairs)


def _values(
    calls: Sequence[Call], waits: Sequence[Sequence[int]]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Give the values of each transfer, by source and target.

    An IPU gets a value once: with the first of its calls that waits for the IPU of the value. Waits
    without a value are left out if other waits imply them.
    """
    wanted: dict[int, set[str]] = defaultdict(set)
    for call in calls:
        wanted[call.ipu] |= {*call.arguments}
    carried: dict[tuple[int, int], tuple[str, ...]] = {}
    looked: dict[tuple[int, int], int] = defaultdict(int)  # by the IPUs, up to which call
    before: list[set[int]] = []  # of each call, those that are surely done
    last: dict[int, int] = {}  # call of each IPU
    for target, call in enumerate(calls):
        own = {last[call.ipu]} if call.ipu in last else set()
        others = {source for source in waits[target] if calls[source].ipu != call.ipu}
        direct = own | others
        implied = set().union(*(before[source] for source in direct))
        before.append(direct | implied)
        for source in sorted(others):
            ipus = calls[source].ipu, call.ipu
            made = (
                name
                for other in calls[looked[ipus] : source + 1]
                if other.ipu == ipus[0]
                for name in other.results
            )
            values = tuple(name for name in made if name in wanted[call.ipu])
            looked[ipus] = max(looked[ipus], source + 1)
            if values or source not in implied:
                carried[source, target] = values
        if call.direction != "weights":
            last[call.ipu] = target
    return carried
