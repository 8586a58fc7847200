"""Exchange weights and the optimiser's state between a model and its program."""

from collections.abc import Collection

from torch import Tensor

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.errors import InputError, IpuError, UpdateError
from ipu_dynamo.ops.private.thread_modes import KeptGradMode
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.writes import WriteBuffer
from ipu_dynamo.runtime.ranks.vote import CommonValue, StepFailure, vote
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.calls.unchanged_model import UnchangedModel
from ipu_dynamo.whole_step.compiled_state import CompiledState
from ipu_dynamo.whole_step.optimizer.optimizer_sync import OptimizerLink, state_names, states_of
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, States
from ipu_dynamo.whole_step.weights import weights_elsewhere
from ipu_dynamo.whole_step.weights.groups_of_ranks import read_groups
from ipu_dynamo.whole_step.weights.initial_state import updates

_COMMON = ("parameter", "buffer", "state", "loss_scale")  # kinds that ranks may have in common


class WeightExchange(CompiledState):
    """Weights and states of a compiled model, from its program to the model and back.

    Invariant: outside `write_optimizer_state`, `_state_to_write` says that it was interrupted.
    """

    _link: OptimizerLink | None
    _unchanged: UnchangedModel | None
    _state_to_write: bool

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors that `read_weights` and `write_weights` exchange, by name."""
        compiled, _ = self._ready()
        kinds = {v.name: v.kind for v in compiled.program.variables}
        return {
            name: tensor
            for name, tensor in compiled.tensors.items()
            if kinds.get(name) in ("parameter", "buffer")
        }

    @property
    def written(self) -> frozenset[str]:
        """Those of `weights` that a call may change: parameters that the optimiser or the model
        updates, and buffers."""
        program = self.program
        names = {name for update in updates(program) for name in update.parameters}
        for instruction in program.walk():
            if isinstance(instruction, WriteBuffer):
                names.update(instruction.variables)  # frozen parameters too
        kinds = {variable.name: variable.kind for variable in program.variables}
        names = {name for name in names if kinds[name] == "parameter"}
        return frozenset(names) | {name for name, kind in kinds.items() if kind == "buffer"}

    @property
    def groups(self) -> tuple[Group, ...]:
        """The optimiser's groups, with the numbers that are in force."""
        return self._link.groups if self._link is not None else ()

    @property
    def settled_counters(self) -> dict[str, int]:
        """Counters of the update that end, and the numbers at which they do. A program that is
        compiled when they have ended does not have them."""
        return self._link.settled_counters if self._link is not None else {}

    def states(self) -> States:
        """The tensors of the optimiser's state, by parameter and name. They are for reading:
        `write_states` writes. Those that other ranks run are as `bring_states` left them."""
        compiled, executable = self._ready()
        return states_of(compiled.program, executable)

    def bring_states(self) -> None:
        """Bring the parts of `states` that other ranks run. They call it together."""
        variables = self._ready()[0].program.variables
        self._bring([v.name for v in variables if v.kind in ("state", "loss_scale")])

    def write_states(self, states: States) -> None:
        """Overwrite tensors of `states`. During a call they count from its next step on."""
        compiled, executable = self._ready()
        names = state_names(compiled.program)
        executable.write(
            {
                names[parameter, state]: tensor
                for parameter, tensors in states.items()
                for state, tensor in tensors.items()
            }
        )

    def check_tensors(self) -> None:
        """Raise InputError if a tensor of the model was replaced since it was compiled."""
        if self._unchanged is not None:
            self._unchanged.check_tensors()

    def read_weights(self, names: Collection[str] | None = None) -> None:
        """Copy parameters and buffers, or those with the given names, from the program to the
        tensors that the model had when it was compiled.

        On a mesh with a dimension `ipu` the ranks of a row call this together, and all ranks of a
        mesh if weights belong to groups of replicas.

        Args:
            names: of parameters and buffers in the model; None: all.

        Raises:
            UpdateError: an update failed, and they have not been written since.
        """
        self.executable.check_update()
        self._bring(self._pairs(names).keys())
        with KeptGradMode(), unrecorded():  # Python may free an executor within a trace
            for ours, theirs in self._pairs(names).values():
                if theirs.data_ptr() != ours.data_ptr():
                    theirs.copy_(ours)
        weights_elsewhere.are_read(theirs for _, theirs in self._pairs(names).values())

    def check_ranks(self) -> None:
        """Compare weights, states and random numbers over the ranks that have the same.

        All ranks of a mesh call this together. Calls compare them only after somebody wrote some,
        and do not notice writes to `weight.data`. Without a mesh it does nothing. Buffers are those
        of replica 0. Weights that each group of replicas has for itself are left out.

        Raises:
            RanksDiffer: a tensor, or the random state, differs. It has the digests of all ranks.
            UpdateError: an update failed, on any rank, and weights have not been written since.
        """
        if (transport := ranks.transport_of(self.options)) is None:
            return
        weights, random, failure = dict[str, str](), dict[str, str](), None
        with transport.operation("mesh", "check", "a check of ranks"):
            try:
                compiled, executable = self._ready()
                executable.check_update()
                if executable.calls_of_ranks:  # else they may make different numbers of calls
                    random["random states (seed, step)"] = str((executable.seed, executable.step))
                for v in compiled.program.variables:
                    is_common = v.kind in _COMMON and v.groups is None
                    if is_common and v.ipu in executable.ipus:
                        weights[v.name] = digest(executable.whole(v.name))
            except BaseException as error:  # all ranks raise it
                failure = StepFailure(error)
            number, hint = transport.share.rank, "write the same on all ranks"
            of_columns = CommonValue(
                "weights", number, lambda: weights, parts_among="column", may_differ=True, hint=hint
            )
            of_all = CommonValue("states", number, lambda: random, may_differ=True, hint=hint)
            vote(transport, failure, [of_columns, of_all])

    def has_weights(self) -> bool:
        """Whether the program's weights are those of a step: not after an update that failed."""
        try:
            self.executable.check_update()
        except UpdateError:
            return False
        return True

    def write_weights(self, names: Collection[str] | None = None) -> None:
        """Copy parameters and buffers, or those with the given names, to the program.

        Args:
            names: of parameters and buffers in the model; None: all.

        Raises:
            InputError: one of the model was replaced since it was compiled.
        """
        self.check_tensors()
        with KeptGradMode(), unrecorded():
            values = {name: theirs for name, (_, theirs) in self._pairs(names).items()}
            self.executable.write(values)

    def read_optimizer_state(self) -> None:
        """Write the optimiser's state on the IPUs into the torch optimiser, for a checkpoint.

        On a mesh with a dimension `ipu` the ranks of a row call this together.

        Raises:
            UpdateError: an update failed, and it has not been written since.
        """
        link, (compiled, executable) = self._training(), self._ready()
        executable.check_update()
        self.bring_states()
        link.read_state(compiled.program, executable)

    def write_optimizer_state(self) -> None:
        """Take over the state that the torch optimiser holds, for instance from a checkpoint.

        If it is interrupted, the next call does it first.
        """
        link, (compiled, executable) = self._training(), self._ready()
        self._state_to_write = True
        link.write_state(compiled, executable)
        self._state_to_write = False

    def _bring(self, names: Collection[str]) -> None:
        """Bring the values of variables from the ranks that run them."""
        compiled, executable = self._ready()
        if (transport := ranks.transport_of(self.options)) is not None:
            read_groups(transport, compiled.program, names, executable.whole)
        executable.read_row(names)

    def _training(self) -> OptimizerLink:
        if self._link is None:
            raise IpuError("the model was compiled for inference: it has no optimizer")
        return self._link

    def _pairs(self, names: Collection[str] | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Of parameters and buffers, or those with the given names, the program's and the model's.

        Raises:
            InputError: the model's tensor has another shape.
        """
        compiled, executable = self._ready()
        pairs = {}
        for variable in compiled.program.variables:
            name = variable.name
            if variable.kind in ("parameter", "buffer") and (names is None or name in names):
                ours, theirs = executable.whole(name), compiled.tensors[name]
                if ours.shape != theirs.shape:
                    raise InputError(
                        f"the model's {name} has shape {list(theirs.shape)}"
                        f", and the program's {list(ours.shape)}",
                        hint="give it the shape that it had, or compile again",
                    )
                pairs[name] = ours, theirs
        return pairs
