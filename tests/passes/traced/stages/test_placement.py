"""Check which stage and IPU an operator gets, and which orders of blocks are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Block, BlockFunction, CompileError, StageSpec, Strategy
from ipu_dynamo.capture.capture import STAGE
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.ops.marks.markers import begin_block, end_block
from ipu_dynamo.ops.marks.step_end import write_at_step_end, write_at_step_end_op
from ipu_dynamo.passes.traced.stages.block_places import BlockError
from ipu_dynamo.passes.traced.stages.placement import PipelineSizeError, Placement
from tests.properties.evaluate import check

PIPELINED = Strategy("pipelined")
SAME_AS_IPU = Strategy("pipelined", auto_stage="same_as_ipu")


def captured(model, *, training=False, rows=2):
    return trace(model, read_arguments(model, (torch.ones(rows, 2),), {}), training=training)


def place(model, strategy=None, *, micro_batches=16, training=False):
    """The placed capture, and for each operator its name and stage."""
    capture = captured(model, training=training)
    assert Placement(strategy or Strategy(), micro_batches)(capture)
    check(capture)
    nodes = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    return capture, [(n.target.__name__.partition(".")[0], n.meta.get(STAGE)) for n in nodes]


def chain(*blocks, before=False, sign=torch.sin):
    """A model that runs one sine in each `(name, ipu)` block, after a cosine when `before`."""

    def forward(x):
        x = torch.cos(x) if before else x
        for name, ipu in blocks:
            with Block(name, ipu):
                x = sign(x)
        return x

    return forward


# --- Stages and IPUs -------------------------------------------------------------------------


def test_model_without_blocks_is_one_stage_on_ipu_0():
    capture, stages = place(lambda x: torch.sin(x) + 1)
    assert {stage for _, stage in stages} == {0}
    assert capture.ipus == {0: 0}


def test_markers_are_removed():
    capture, _ = place(chain(("a", 0), ("b", 1)))
    assert not {begin_block, end_block} & {n.target for n in capture.graph.graph.nodes}


def test_second_run_changes_nothing():
    capture = captured(chain(("a", 0), ("b", 1)))
    placement = Placement(Strategy(), 1)
    placement(capture)
    assert not placement(capture)


def test_placement_keeps_operators_and_their_order():
    model = chain(("a", 0), ("b", 1), before=True)
    before = [n.name for n in captured(model).graph.graph.nodes if n.name not in ("begin_block",)]
    capture, _ = place(model)
    after = [n.name for n in capture.graph.graph.nodes]
    assert after == [name for name in before if "block" not in name]


def test_blocks_are_numbered_by_first_appearance():
    capture, stages = place(chain(("a", 3), ("b", 1)), PIPELINED)
    assert stages == [("sin", 0), ("sin", 1)]
    assert capture.ipus == {0: 3, 1: 1}


def test_operators_before_the_first_block_are_stage_0_on_ipu_0():
    capture, stages = place(chain(("a", 1), before=True), PIPELINED)
    assert stages == [("cos", 0), ("sin", 1)]
    assert capture.ipus == {0: 0, 1: 1}


def test_block_without_an_ipu_gets_that_of_its_number():
    capture, _ = place(chain(("a", None), ("b", None)), PIPELINED)
    assert capture.ipus == {0: 0, 1: 1}


def test_neighbours_on_one_ipu_are_one_stage():
    capture, stages = place(chain(("a", 0), ("b", 0), ("c", 1)), PIPELINED)
    assert stages == [("sin", 0), ("sin", 0), ("sin", 1)]
    assert capture.ipus == {0: 0, 1: 1}


def test_returning_to_an_ipu_is_a_new_stage():
    capture, stages = place(chain(("a", 0), ("b", 1), ("c", 0)), PIPELINED)
    assert [stage for _, stage in stages] == [0, 1, 2]
    assert capture.ipus == {0: 0, 1: 1, 2: 0}


def test_same_as_ipu_numbers_stages_by_ipu_and_leaves_out_unused_ones():
    capture, stages = place(chain(("a", 1), ("b", 3)), SAME_AS_IPU)
    assert [stage for _, stage in stages] == [0, 1]
    assert capture.ipus == {0: 1, 1: 3}


def test_explicit_stages_go_by_position_and_may_set_the_ipu():
    stages = (StageSpec(("b",), ipu=5), StageSpec(("a", "c")))
    capture, placed = place(
        lambda x: chain(("b", 1), ("a", 2))(x), Strategy("pipelined", stages=stages)
    )
    assert [stage for _, stage in placed] == [0, 1]
    assert capture.ipus == {0: 5, 1: 2}


def test_explicit_stage_without_an_ipu_runs_on_its_number():
    stages = (StageSpec(("a",)), StageSpec(("b",)))
    capture, _ = place(chain(("a", None), ("b", None)), Strategy("pipelined", stages=stages))
    assert capture.ipus == {0: 0, 1: 1}


def test_block_without_an_id_takes_the_next_number():
    stages = (StageSpec(("0",)), StageSpec(("1",)))
    capture, _ = place(chain((None, None), ("", None)), Strategy("pipelined", stages=stages))
    assert capture.ipus == {0: 0, 1: 1}


def test_begun_layer_keeps_its_block_until_another_begins():
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    BeginBlock(layers[1], "b", 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    _, stages = place(Model(), PIPELINED)
    assert stages == [("linear", 0), ("linear", 1), ("linear", 1)]


def test_decorated_function_runs_in_its_block():
    @BlockFunction("b", 1)
    def inner(x):
        return torch.sin(x)

    _, stages = place(lambda x: inner(torch.cos(x)), PIPELINED)
    assert stages == [("cos", 0), ("sin", 1)]


def test_every_result_of_one_operator_is_placed_with_it():
    def model(x):
        with Block("a", 0):
            parts = torch.split(x, 1, dim=1)
        with Block("b", 1):
            return parts[0] + parts[1]

    capture, _ = place(model)
    stages = {
        n.name: n.meta.get(STAGE) for n in capture.graph.graph.nodes if n.op == "call_function"
    }
    assert [stage for name, stage in stages.items() if "getitem" in name] == [0, 0]


def test_sharded_strategy_makes_a_stage_of_every_visit():
    capture, stages = place(chain(("a", 0), ("b", 1), ("a", 0)))
    assert [stage for _, stage in stages] == [0, 1, 2]
    assert capture.ipus == {0: 0, 1: 1, 2: 0}


# --- What is refused ---------------------------------------------------------------------------


def test_operator_after_a_closed_block_is_refused_with_its_line():
    def model(x):
        with Block("a", 0):
            x = torch.sin(x)
        return torch.cos(x)

    message = r"No active Block[\s\S]*%cos[\s\S]*torch.cos\(x\)[\s\S]*begin another block"
    with pytest.raises(CompileError, match=message):
        place(model)


def test_rest_of_an_outer_block_is_refused():
    def model(x):
        with Block("a", 0):
            with Block("b", 1):
                x = torch.sin(x)
            return torch.cos(x)

    with pytest.raises(CompileError, match="No active Block"):
        place(model)


def test_unknown_block_is_refused_with_the_known_ones():
    strategy = Strategy("pipelined", stages=(StageSpec(("a", "b")),))
    with pytest.raises(
        BlockError, match=r"Unknown Block 'c' list of expected Blocks: \['a', 'b'\]"
    ):
        place(chain(("c", 0)), strategy)
    strategy = Strategy("pipelined", stages=(StageSpec(("encodr",)),))
    with pytest.raises(BlockError, match=r"'encoder' in .*, where 'encodr' may be meant"):
        place(chain(("encoder", 0)), strategy)


def test_same_as_ipu_needs_an_ipu():
    with pytest.raises(BlockError, match="no IPU was specified for block a"):
        place(chain(("a", None)), SAME_AS_IPU)


def test_two_ipus_under_one_stage_are_refused():
    with pytest.raises(
        CompileError, match="same pipeline stage 0, but different virtual graph ids"
    ):
        place(chain(("a", 0), ("a", 1)), PIPELINED)


def test_pipeline_against_the_data_flow_is_refused_with_its_line():
    model = chain(("a", 0), ("b", 1), ("c", 0))
    with pytest.raises(CompileError, match=r"stage 0 reads %sin_1, a result of the later stage 1"):
        place(model, SAME_AS_IPU)


def test_sharded_strategy_runs_stages_in_any_order():
    place(chain(("a", 0), ("b", 1), ("c", 0)), Strategy("sharded", auto_stage="same_as_ipu"))


@pytest.mark.parametrize(("training", "required"), [(True, 5), (False, 3)])
def test_pipeline_needs_enough_micro_batches(training, required):
    model = chain(("a", 0), ("b", 1), ("c", 2))
    place(model, PIPELINED, micro_batches=required, training=training)
    what = "gradient_accumulation" if training else "device_iterations"
    with pytest.raises(
        PipelineSizeError, match=f"{required} micro-batches, got {required - 1}"
    ) as e:
        place(model, PIPELINED, micro_batches=required - 1, training=training)
    assert f"set {what} to {required}" in str(e.value)
    assert (e.value.stages, e.value.required) == (3, required)


def test_sharded_strategy_needs_no_number_of_micro_batches():
    place(chain(("a", 0), ("b", 1), ("c", 2)), micro_batches=1, training=True)


def test_weight_on_two_ipus_is_refused_where_the_strategy_says_so():
    layer = nn.Linear(2, 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with Block("a", 0):
                x = self.layer(x)
            with Block("b", 1):
                return F.linear(x, self.layer.weight)

    place(Model(), PIPELINED)
    message = "Can not copy variable tensor layer.weight between virtual graphs"
    with pytest.raises(CompileError, match=message):
        place(Model(), Strategy("pipelined", weights_on_one_ipu=True))


# --- Writes at the end of a step -------------------------------------------------------------


class Following(nn.Module):
    """A layer on two IPUs, its weight computed on the first; `case` says what another follows."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.weight, self.other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
        self.register_buffer("average", torch.zeros(2, 2))

    def forward(self, x):
        with Block("a", 0):
            weight = F.normalize(self.weight)
            slow = F.normalize(self.average) if self.case != "nothing else" else self.average
        with Block("b", 1):
            x = F.linear(x, weight) + self.other.sum()
            made = x.sum()
            x = x + slow if self.case != "nothing else" else x
            followed = {"weight": self.weight, "other": self.other, "made": made}
            value = followed.get(self.case, self.weight) * 0.5 + self.average * 0.5
            write_at_step_end(self.average, value)
        with Block("c", 2):
            return x * 2


ON_ONE_IPU = Strategy("pipelined", weights_on_one_ipu=True)


def test_a_write_at_the_end_of_a_step_is_where_its_variables_are():
    capture, _ = place(Following("weight"), ON_ONE_IPU)
    (write,) = capture.graph.graph.find_nodes(op="call_function", target=write_at_step_end_op)
    assert write.meta[STAGE] == 0
    assert {source.meta[STAGE] for source in write.args[1].all_input_nodes} == {0}
    assert capture.ipus == {0: 0, 1: 1, 2: 2}
    capture, _ = place(Following("weight"), PIPELINED)  # where weights may be copied: as it says
    (write,) = capture.graph.graph.find_nodes(op="call_function", target=write_at_step_end_op)
    assert write.meta[STAGE] == 1


def test_a_write_follows_a_weight_where_nothing_else_reads_the_average():
    capture, _ = place(Following("nothing else"), ON_ONE_IPU)
    (write,) = capture.graph.graph.find_nodes(op="call_function", target=write_at_step_end_op)
    assert write.meta[STAGE] == 0


@pytest.mark.parametrize("case", ["other", "made"])
def test_a_write_of_variables_of_two_ipus_is_refused(case):
    """Also of what another stage computes: it is not moved before that."""
    with pytest.raises(CompileError, match="Can not copy variable tensor average"):
        place(Following(case), ON_ONE_IPU)
