"""Bind a host program to an engine and to the variables of an executable."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ipu_dynamo.program import Collective, HostProgram, Program, Send, TensorType
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas
from ipu_dynamo.program.schedule.planning import schedule_of, side_by_side
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import calls_of_passes
from ipu_dynamo.runtime.execute.fused_step import FusedStep
from ipu_dynamo.runtime.execute.host_io.batching import Batching, joined_type
from ipu_dynamo.runtime.execute.host_io.host_streams import HostLink
from ipu_dynamo.runtime.execute.looped_step import LoopedStep
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.replayed_step import ReplayedStep
from ipu_dynamo.runtime.execute.step_form import FormInputs
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams, RowValue
from ipu_dynamo.runtime.ranks.transport import Transport


@dataclass(frozen=True)
class Surroundings:
    """The context that all forms of an executable's steps share; see `Executable`."""

    storage: Storage
    batching: Batching
    devices: Sequence[torch.device]
    memory: StreamingMemory
    guard_updates: bool
    transport: Transport | None


@dataclass(frozen=True)
class BoundForm:
    """A form of the steps of an executable, on its variables.

    Args:
        inputs: of the form.
        form: runs the steps.
        schedule: the actions of each worker, in order.
        link: feeds it, and takes its results.
        streams: from and to other ranks; None without other ranks.
        row: the results that ranks of a row give each other; None: one rank has all IPUs.
    """

    inputs: FormInputs
    form: LoopedStep | FusedStep
    schedule: Schedule
    link: HostLink
    streams: RankStreams | None = None
    row: Sequence[RowValue] | None = None

    @property
    def fused(self) -> FusedStep | None:
        """The form, if it runs a step and its update as one function."""
        return self.form if isinstance(self.form, FusedStep) else None

    @property
    def looped(self) -> LoopedStep | None:
        """The form, if it loops over micro-batches before an update."""
        return self.form if isinstance(self.form, LoopedStep) else None


def bind_form(
    inputs: FormInputs, common: Surroundings, hyperparameters: Hyperparameters
) -> BoundForm:
    """Bind a form to variables, which it neither reads nor writes yet. Its functions are compiled.

    Args:
        hyperparameters: probable ones of the calls; functions are specialised for these.
    """
    host, engine, storage, devices = inputs.host, inputs.engine, common.storage, common.devices
    own = host.replicas.own
    link = HostLink(host.runs, common.batching, own, devices)
    schedule = _schedule(inputs)
    if host.fused is not None:
        replays = any(recipe.replays for recipe in host.recipes.values())
        kind = ReplayedStep if replays else FusedStep
        fused = kind(host, engine, storage, link.drops, devices, inputs.fuse_again)
        fused.prepare(hyperparameters)
        return BoundForm(inputs, fused, schedule, link)
    streams, row, transport = None, None, common.transport
    if transport is not None and has_messages(host):
        streams = RankStreams(host, schedule, transport)
        engine.checks.agree(judges=transport.share.row == 0)
        if transport.share.columns > 1:
            row = results_of_row(host, common.batching)
    looped = LoopedStep(
        host,
        storage,
        common.batching.iterations,
        schedule,
        link.drops,
        devices=devices,
        memory=common.memory,
        guard_updates=common.guard_updates,
        engine=engine,
        update_recipe=inputs.update_recipe,
        streams=streams,
        row=row,
        others=inputs.others,
    )
    return BoundForm(inputs, looped, schedule, link, streams, row)


def _schedule(inputs: FormInputs) -> Schedule:
    host, workers = inputs.host, inputs.workers
    if not host.deferred:
        return schedule_here(host.inlined, host, workers, check=host.fused is None)
    cut = sections(host.runs)
    (call,) = calls_of_passes(cut.loop)
    sums, count = host.deferred.accumulators, cut.micro_batches
    schedule = side_by_side(call, sums, micro_batches=count, workers=workers or 1)
    if len(schedule.workers) > 1:
        schedule.check(host.runs, adds=True)
    return schedule


def schedule_here(
    program: Program, host: HostProgram, workers: int | None, *, check: bool = False
) -> Schedule:
    """How so many workers would run a step here; None is one for each IPU of every replica.

    Args:
        program: of which the step is; `host` has it in several forms.
        check: that no worker waits for ever, and that the order is right for the program.
    """
    own, first, ipus = host.replicas.own, host.replicas.own.start, host.ipus
    exchange = host.share is not None and exchanges_in_loop(host)
    planned = host.replicas.count if exchange else len(own)
    schedule = schedule_of(
        program,
        micro_batches=sections(host.runs).micro_batches,
        replicas=planned,
        workers=workers,
        share=host.share,
    )
    if check and len(schedule.workers) > 1:  # one worker alone never waits
        schedule.check(program, replicas=planned)
    if host.share is None:
        return schedule
    return (
        schedule.for_share(own, ipus, 0)
        if exchange
        else schedule.for_share(range(planned), ipus, first)
    )


def exchanges_in_loop(host: HostProgram) -> bool:
    """Whether replicas exchange values within micro-batches."""
    return any(isinstance(i, Collective) for i in sections(host.inlined).loop)


def has_messages(host: HostProgram) -> bool:
    """Whether a step sends other ranks anything; if not, none need run a step at once."""
    share = host.share
    if share is None:
        return False
    if host.program.kind == "training" or share.columns > 1 or exchanges_in_loop(host):
        return True
    return bool(changed_by_replicas(host.inlined))


def results_of_row(host: HostProgram, batching: Batching) -> list[tuple[str, int, TensorType]]:
    """The results of a call on a row of ranks: the name, the IPU that sends it, and the type."""
    ipus = {i.stream: i.ipu for i in host.inlined.walk() if isinstance(i, Send)}
    return [
        (output.name, ipus[output.name], joined_type(output, batching))
        for output in host.inlined.outputs
        if output.printing is None
    ]
