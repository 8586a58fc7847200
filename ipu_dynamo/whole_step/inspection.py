"""Show the parts of a compiled model, and records of its runs."""

from collections.abc import Sequence

from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.inspection.program_entry import HostEntry, ProgramEntry
from ipu_dynamo.inspection.remark import Remark
from ipu_dynamo.options import Costs
from ipu_dynamo.passes.manager import PassRun
from ipu_dynamo.program.rank_plan import RankPlan
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.host_io.transfer_times import Transfers, transfers_of
from ipu_dynamo.whole_step.anchored_values import ValueNames, value_names
from ipu_dynamo.whole_step.compiled_state import CompiledState

_OTHER_UPDATE = "this computer runs its update when the optimiser's numbers are those again"


class CompiledMembers(CompiledState):
    """The members of a compiled model that only read it."""

    training: bool
    _engine: Engine | None
    _times: str
    _warned: tuple[str, ...]

    @property
    def _name(self) -> str:
        """The model's name."""
        raise NotImplementedError

    def __ipu_inspect__(self) -> Inspection:
        """Inspect the model as it is compiled; it has no program before it is compiled."""
        if self._compiled is None or self._executable is None:
            return self._inspection((), (), self._warned, "")
        entry = ProgramEntry(self.program, HostEntry.of(self._executable))
        others = (
            ProgramEntry(program, absent={"host": _OTHER_UPDATE}) for program in self.variants
        )
        return self._inspection((entry, *others), self._compiled.passes, self._warned, self._times)

    def _inspection(
        self,
        programs: tuple[ProgramEntry, ...],
        passes: tuple[PassRun, ...],
        warned: Sequence[str],
        times: str,
    ) -> Inspection:
        loaded = {"passes": "the program was loaded, and a file keeps none"}
        return Inspection(
            f"{'training step' if self.training else 'inference'} of {self._name}",
            programs=programs,
            program=programs[0] if programs else None,
            reasons=tuple(Remark("warning", text) for text in warned),
            passes=(("the step", passes),) if passes else None,
            times=times,
            absent=loaded if programs and not passes else {},
        )

    def explain(self) -> Inspection:
        """The same, once compiled.

        Raises:
            IpuError: it is not compiled yet.
        """
        self._ready()
        return self.__ipu_inspect__()

    def __repr__(self) -> str:
        return repr(self.__ipu_inspect__())

    @property
    def costs(self) -> Costs:
        """Seconds of each operator, forward and backward, by which a strategy with `ipus` has cut
        the model; empty for any other."""
        return self._ready()[0].costs

    @property
    def schedule(self) -> Schedule:
        """The schedule of each IPU, once compiled: printed as text, drawn by its `svg()`.

        It has a row for each IPU of every replica, and repeats forward passes as the program says.
        `executable.schedule` is the one that the threads of this computer follow; several IPUs may
        share one, and values that are kept here are not repeated.
        """
        return self.executable.ipu_schedule

    @property
    def rank_plan(self) -> RankPlan | None:
        """Each rank's part of the program, and the messages between ranks, once compiled.

        None without a mesh.
        """
        rows, columns = self.options.grid
        return None if rows * columns == 1 else RankPlan(self._ready()[0].program, rows, columns)

    @property
    def transfers(self) -> Transfers:
        """When tensors of the last complete call came from the host and went there, with the
        latencies of that; none without `executable.transfers` to record them."""
        compiled, executable = self._ready()
        times = None if executable.transfers is None else executable.transfers.last
        if self.options.synthetic_data:
            times = None
        returned = {str(i) for i in range(len(compiled.structure.tensors))}
        return transfers_of(compiled.program, executable.batching, times, returned)

    @property
    def value_names(self) -> ValueNames:
        """The names of the values inside the program, once compiled."""
        return value_names(self._ready()[0])

    @property
    def functions_compiled(self) -> int:
        """How many stage functions the engine has compiled so far."""
        return self._engine.compiled if self._engine else 0
