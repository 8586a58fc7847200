"""Let the ranks of a mesh compile the same program, or name what differs.

Rank 0 decides what the others cannot know: costs of operators, the number of threads, states of the
optimiser. Then each rank lowers its model, all compare the programs, and take rank 0's weights. No
rank may hold `compile_lock` here: ranks that are threads would wait for each other.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from ipu_dynamo.capture.swap import Model, named_tensors
from ipu_dynamo.errors import RanksDiffer
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.runtime.execute.tasks.rank_streams import agree_on_numbers
from ipu_dynamo.runtime.execute.transaction.user_writes import written_together
from ipu_dynamo.runtime.ranks.agreement import (
    broadcast_tensors,
    error_of,
    gather_values,
    raise_together,
    value_of_first,
)
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.tune.installed_memory import installed_bytes
from ipu_dynamo.tune.intra_op import set_intra_op_threads
from ipu_dynamo.tune.machine_name import machine_name
from ipu_dynamo.version import __version__
from ipu_dynamo.whole_step.cache.program_key import of_program
from ipu_dynamo.whole_step.weights import weights_elsewhere

log = logging.getLogger(__name__)
T = TypeVar("T")
_NOTHING = "(nothing)"  # in place of a line that a rank does not have


def attempt(action: Callable[..., T], *arguments: Any) -> tuple[T | None, BaseException | None]:
    """Trace or compile alone; return the result, or the error for the other ranks."""
    try:
        with compile_lock(), _without_warnings() if this_rank() else nullcontext():
            return action(*arguments), None
    except BaseException as error:
        return None, error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drop warnings: rank 0 compiles the same model, and has them."""
    with catch_warnings():
        simplefilter("ignore")
        yield


def decide_together(
    transport: Transport,
    options: Options,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    measure: Callable[[], Costs],
) -> tuple[Options, int]:
    """Let rank 0 decide about threads, the optimiser's states, costs of operators, and memory.

    Args:
        optimizer: its states become those of rank 0.
        measure: returns the costs that the strategy cuts the model by.

    Returns:
        The options, with rank 0's costs if the strategy needs any, and the bytes of memory by which
        all ranks decide; 0: rank 0 does not know its own.

    Raises:
        RankFailed: rank 0 could not measure.
    """
    strategy, costs, error = options.strategy, None, None
    measures = strategy.ipus is not None and not strategy.costs
    if measures and transport.share.rank == 0:
        costs, error = attempt(measure)
    decided: dict[str, Any] = {
        "error": None if error is None else error_of(error),
        "costs": costs,
        "threads": torch.get_num_threads(),
        "memory": installed_bytes(torch.device("cpu")) or 0,
        "states": None if optimizer is None else [*_described(model, optimizer)],
    }
    decided = value_of_first(transport, decided)
    raise_together(error, [decided["error"]], "measure its operators")
    set_intra_op_threads(decided["threads"])
    if optimizer is not None:
        _take_states(transport, model, optimizer, decided["states"])
    if measures:
        costs = tuple((forward, backward) for forward, backward in decided["costs"])
        options = replace(options, strategy=replace(strategy, costs=costs))
    return options, decided["memory"]


def compare(
    transport: Transport, facts: "Facts | None", error: BaseException | None
) -> Mapping[str, Any]:
    """Compare the compilations of all ranks.

    Args:
        facts: of this rank; None: it could not compile, for `error`.

    Returns:
        The record of rank 0. Its `seed` holds for all ranks.

    Raises:
        RankFailed: another rank could not compile.
        RanksDiffer: something is not the same on all ranks.
    """
    own = {"error": error and error_of(error)} if facts is None else facts.record()
    records: list[dict[str, Any]] = gather_values(transport, "mesh", own)
    raise_together(error, [record.get("error") for record in records], "compile its model")
    assert facts is not None
    for name in ("ipu_dynamo", "torch", "processor instructions", "engine", "the seed of Options"):
        values = {rank: str(record["same"][name]) for rank, record in enumerate(records)}
        if len({*values.values()}) > 1:
            hint = "set the same on all ranks" if name == "the seed of Options" else _INSTALL
            raise RanksDiffer(f"the ranks differ in {name}", values, hint=hint)
    for what, lines in facts.lines.items():
        if len({record["digests"][what] for record in records}) > 1:
            _raise_first_difference(transport, what, lines)
    machines = {record["machine"] for record in records}
    if len(machines) > 1 and transport.share.rank == 0:
        log.warning(
            "ranks run on different processors, whose libraries may compute other bits: %s",
            "; ".join(sorted(machines)),
        )
    return records[0]


_INSTALL = "use one environment, one option engine and one kind of processor on all computers"


@dataclass(frozen=True)
class Facts:
    """Facts of a compilation that must be the same on all ranks.

    Args:
        options: that the program was compiled with.
        fresh_seed: of random numbers, if the options name none; that of rank 0 counts.
    """

    engine: str
    options: Options
    program: Program
    model: Model
    fresh_seed: int

    @property
    def lines(self) -> dict[str, list[str]]:
        """Texts that must be equal, in the order in which a difference is looked for."""
        options = of_program(self.options)
        return {
            "options": [f"{f.name}={getattr(options, f.name)!r}" for f in fields(options)],
            "parameters and buffers": [
                f"{role.name}: {TensorType.of(tensor)}"
                for role, tensor in named_tensors(self.model)
            ],
            # the first is for people, the second has all
            "programs": f"{self.program}\n{self.program.text()}".splitlines(),
        }

    def record(self) -> dict[str, Any]:
        """Return these facts as JSON, for the other ranks."""
        texts = {what: "\n".join(lines) for what, lines in self.lines.items()}
        return {
            "same": {
                "ipu_dynamo": __version__,
                "torch": torch.__version__,
                "processor instructions": torch.backends.cpu.get_cpu_capability(),
                "engine": self.engine,
                "the seed of Options": self.options.seed,
            },
            "digests": {what: sha256(t.encode()).hexdigest() for what, t in texts.items()},
            "machine": machine_name(),
            "seed": self.fresh_seed if self.options.seed is None else self.options.seed,
        }


def _raise_first_difference(transport: Transport, what: str, lines: Sequence[str]) -> None:
    """Raise a RanksDiffer with the first line in which a rank differs from rank 0."""
    first = value_of_first(transport, lines)
    pairs = enumerate(zip_longest(first, lines))
    own = next((number for number, (a, b) in pairs if a != b), None)
    places = gather_values(transport, "mesh", own)
    number = next(place for place in places if place is not None)
    line = lines[number] if number < len(lines) else _NOTHING
    values = dict(enumerate(gather_values(transport, "mesh", line)))
    raise RanksDiffer(
        f"the ranks differ in {what}, first in line {number + 1}",
        values,
        hint="compile the same model with the same options on all ranks",
    )


def take_weights(transport: Transport, model: Model) -> None:
    """Overwrite parameters and buffers with those of rank 0, the newest of its row before."""
    tensors = [tensor for _, tensor in named_tensors(model)]
    if transport.share.columns > 1 and tensors:
        weights_elsewhere.bring(transport, tensors)
    broadcast_tensors(transport, tensors)
    written_together(tensors)


def complete_together(transport: Transport, error: BaseException | None) -> None:
    """End a compilation on all ranks, or raise on all.

    Raises:
        RankFailed: another rank could not compile its functions.
    """
    failed = torch.tensor([int(error is not None)])
    if not transport.maximum("mesh", failed).item():
        return
    agree_on_numbers(transport)
    own = None if error is None else error_of(error)
    raise_together(error, gather_values(transport, "mesh", own), "compile its functions")


def _described(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[list[Any]]:
    """The tensors and numbers of an optimiser's states: owner, name, and type or value."""
    for owner, name, value in _states(model, optimizer):
        if isinstance(value, Tensor):
            yield [owner, name, str(value.dtype).removeprefix("torch."), list(value.shape)]
        else:
            yield [owner, name, None, value]


def _states(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Yield the owner, name and value of each state; an owner is a parameter, or a name."""
    names = _names(model)
    for owner, held in optimizer.state.items():
        key = names.get(id(owner)) if isinstance(owner, Tensor) else owner
        if not isinstance(key, str) or not isinstance(held, Mapping):
            continue
        for name, value in held.items():
            if isinstance(value, Tensor | bool | int | float | None):
                yield (f".{key}" if isinstance(owner, Tensor) else key), name, value


def _names(model: Model) -> dict[int, str]:
    return {id(tensor): role.name for role, tensor in named_tensors(model)}


def _take_states(
    transport: Transport,
    model: Model,
    optimizer: torch.optim.Optimizer,
    described: Sequence[Sequence[Any]],
) -> None:
    """Give an optimiser the states of rank 0; write them into its own tensors if it has them."""
    own = {(owner, name): value for owner, name, value in _states(model, optimizer)}
    new: dict[tuple[str, str], Any] = {}
    for owner, name, dtype, given in described:
        value = given
        if dtype is not None:
            value, type_ = own.get((owner, name)), getattr(torch, dtype)
            if not isinstance(value, Tensor) or (value.dtype, [*value.shape]) != (type_, given):
                value = torch.empty(given, dtype=type_)
        new[owner, name] = value
    broadcast_tensors(transport, [value for value in new.values() if isinstance(value, Tensor)])
    if transport.share.rank == 0:
        return
    keys: dict[str, Any] = {f".{role.name}": tensor for role, tensor in named_tensors(model)}
    for owner, name in own.keys() - new.keys():
        del optimizer.state[keys.get(owner, owner)][name]
    for (owner, name), value in new.items():
        if owner in keys or not owner.startswith("."):  # the models differ else, and all raise
            optimizer.state[keys.get(owner, owner)][name] = value
