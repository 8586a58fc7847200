"""Take note of which inputs and outputs are transferred while others are computed.

With     options=Options(io_tiles=32, output_mode="all")
Before   %h = ipu.overlap_input(%x: f32[n], "accumulation_loop")
         %y = aten.relu(%h)
         %r = ipu.overlap_output(%y, "accumulation_loop")
After    %r = aten.relu(%x)
         capture.report.overlaps = {
             ("input", "x"): "accumulation_loop", ("output", "0"): "accumulation_loop"
         }
Keeps    all other operators.
Source   PopTorch user guide, "Overlapping host IO".
"""

from dataclasses import dataclass
from typing import Literal, cast

from torch import fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.overlap import overlap_input_op, overlap_output_op
from ipu_dynamo.options import Options
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program import Overlap

OverlapRule = Literal[
    "an input", "only reader", "an output", "returned once", "strategy", "tiles", "output mode"
]


class OverlapError(CompileError):
    """A transfer that cannot overlap with computing.

    Args:
        rule: what is broken.
        problem, node, hint: as for a CompileError.
        name: of the input, where there is one.
    """

    def __init__(
        self, rule: OverlapRule, problem: str, *, node: fx.Node, hint: str, name: str = ""
    ) -> None:
        super().__init__(problem, node=node, hint=hint)
        self.rule, self.name = rule, name


@dataclass(frozen=True, slots=True)
class Mark:
    """A marked stream: `value` is the input itself, or the output itself."""

    node: fx.Node

    @property
    def value(self) -> fx.Node:
        return cast(fx.Node, self.node.args[0])

    @property
    def mode(self) -> Overlap:
        return cast(Overlap, self.node.args[1])

    def stream(self, capture: Traced) -> tuple[str, str]:
        """Direction and name of the stream.

        Raises:
            CompileError: the mark is in the wrong place.
        """
        if self.node.target is overlap_input_op:
            return "input", self._input(capture)
        return "output", self._output(capture)

    def _input(self, capture: Traced) -> str:
        role = capture.roles().get(self.value)
        if role is None or role.kind != "input":
            raise OverlapError(
                "an input",
                "set_overlap_for_input applied on a node which is not a tensor input to the model.",
                node=self.node,
                hint="mark the model's arguments as forward gets them",
            )
        if others := [user for user in self.value.users if user is not self.node]:
            raise OverlapError(
                "only reader",
                f"set_overlap_for_input must be the only op applied to an input; {role.name} is "
                f"read by %{others[0].name} too",
                name=role.name,
                node=self.node,
                hint="use only what set_overlap_for_input returns",
            )
        return role.name

    def _output(self, capture: Traced) -> str:
        if list(self.node.users) != [capture.output_node]:
            raise OverlapError(
                "an output",
                "set_overlap_for_output applied on a node which is not a tensor output to the "
                "model.",
                node=self.node,
                hint="return what set_overlap_for_output returns, and read it nowhere else",
            )
        pairs = zip(capture.returned, capture.outputs, strict=True)
        places = [role.name for node, role in pairs if node in (self.node, self.value)]
        if len(places) > 1:
            raise OverlapError(
                "returned once",
                f"set_overlap_for_output applied on a tensor that is returned {len(places)} times",
                node=self.node,
                hint="return it once",
            )
        return places[0]


class OverlapIO(GraphPass):
    """The pass."""

    level = "traced"
    acts_on = (overlap_input_op, overlap_output_op)
    needed = "its markers compute nothing that a stage could run"

    options: Options

    def rewrite(self, capture: Traced) -> bool:
        graph = capture.graph.graph
        kinds = (overlap_input_op, overlap_output_op)
        marks = [Mark(node) for node in graph.nodes if node.target in kinds]
        modes = {mark.stream(capture): mark.mode for mark in marks}
        for mark in marks:
            if mark.mode != "no_overlap":
                self._check(mark.node, training=capture.training)
            mark.node.replace_all_uses_with(mark.value)
            graph.erase_node(mark.node)
        if marks:
            capture.report.overlaps = modes
        return bool(marks)

    def _check(self, mark: fx.Node, *, training: bool) -> None:
        """Raise where no transfer can overlap."""
        if self.options.strategy.kind == "pipelined":
            raise OverlapError(
                "strategy",
                "overlapped IO is not supported with PipelinedExecution",
                node=mark,
                hint="choose the strategy sharded",
            )
        if not self.options.io_tiles:
            raise OverlapError(
                "tiles",
                "No IO tiles allocated. You must allocate at least 32 IO tiles to overlap IO",
                node=mark,
                hint="set the option io_tiles, in poptorch options.TensorLocations.numIOTiles(32)",
            )
        mode = self.options.returns(training)
        if mode not in ("all", "sum"):
            raise OverlapError(
                "output mode",
                f"overlapped IO is not supported with the output mode {mode}",
                node=mark,
                hint="choose the output mode all or sum",
            )
