"""Check stages, phases and strategies as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch import AutoStage, Liveness, Phase, Stage

AUTOMATIC = [poptorch.PipelinedExecution, poptorch.ShardedExecution]
PHASED = [poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution]
KINDS = {
    poptorch.PipelinedExecution: "pipelined",
    poptorch.ShardedExecution: "sharded",
    poptorch.SerialPhasedExecution: "serial_phased",
    poptorch.ParallelPhasedExecution: "parallel_phased",
}


def test_a_stage_has_blocks_and_an_ipu():
    stage = Stage("a", "b")
    assert stage.blocks == ["a", "b"]
    assert stage.ipu(ipu=3) is stage
    assert repr(stage) == "Stage('a', 'b').ipu(3)"
    with pytest.raises(AssertionError, match="strings"):
        Stage("a", 1)
    with pytest.raises(AssertionError, match="integer"):
        stage.ipu("3")


@pytest.mark.parametrize("cls", AUTOMATIC)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "same_as_ipu"),
        ((AutoStage.SameAsIpu,), "same_as_ipu"),
        ((AutoStage.AutoIncrement,), "auto_increment"),
    ],
)
def test_stages_are_chosen_while_tracing_unless_given(cls, arguments, expected):
    strategy = cls(*arguments)
    assert strategy.core_strategy() == {
        "kind": KINDS[cls],
        "auto_stage": expected,
        "stages": (),
    }
    with pytest.raises(AssertionError, match="Unknown block x"):
        strategy.stage("x")


@pytest.mark.parametrize("cls", AUTOMATIC)
def test_explicit_stages_take_every_form(cls):
    strategy = cls(Stage("a").ipu(2), "b", ["c", "d"], ("e",))
    assert strategy.core_strategy()["stages"] == (
        (("a",), 2),
        (("b",), None),
        (("c", "d"), None),
        (("e",), None),
    )
    strategy.stage(block_id="d").ipu(1)
    assert strategy.core_strategy()["stages"][2] == (("c", "d"), 1)
    with pytest.raises(AssertionError, match=r"Unknown block x .*'a', 'b', 'c'"):
        strategy.stage("x")


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=3), min_size=1, max_size=4))
def test_a_block_belongs_to_one_stage(stages):
    blocks = [block for stage in stages for block in stage]
    if len(set(blocks)) == len(blocks):
        strategy = poptorch.PipelinedExecution(*stages)
        for stage in stages:
            for block in stage:
                assert strategy.stage(block).blocks == stage
    else:
        with pytest.raises(AssertionError, match="associated with more than one stage"):
            poptorch.PipelinedExecution(*stages)


@pytest.mark.parametrize("cls", AUTOMATIC)
@pytest.mark.parametrize("arguments", [(1,), (["a", 1],), (AutoStage.SameAsIpu, "a"), (None,)])
def test_anything_else_is_no_stage(cls, arguments):
    with pytest.raises(AssertionError, match=r"block id|strings"):
        cls(*arguments)


def test_a_phase_is_stages_or_blocks():
    assert [stage.blocks for stage in Phase("a", "b").stages] == [["a", "b"]]
    phase = Phase(Stage("a"), Stage("b", "c"))
    assert phase.stage(idx=1).blocks == ["b", "c"]
    assert phase.ipus(4, 5) is phase
    assert [stage.ipu_id for stage in phase.stages] == [4, 5]
    with pytest.raises(AssertionError, match="2 stages needs as many IPUs, got 1"):
        phase.ipus(4)
    with pytest.raises(AssertionError, match="stages only or of block ids only"):
        Phase(Stage("a"), "b")


@pytest.mark.parametrize("cls", PHASED)
def test_phases_take_every_form(cls):
    phases = (Phase("a", "b"), Stage("c"), "d", [Stage("e"), Stage("f")], ["g", "h"])
    strategy = cls(*phases)
    data = strategy.core_strategy()
    assert data["kind"] == KINDS[cls]
    assert [blocks for blocks, _ in data["stages"]] == [
        ("a", "b"),
        ("c",),
        ("d",),
        ("e",),
        ("f",),
        ("g", "h"),
    ]
    assert data["phases"] == (1, 1, 1, 2, 1)
    assert strategy.phase(phase=3).stage(1).blocks == ["f"]
    assert strategy.stage("h").blocks == ["g", "h"]
    with pytest.raises(AssertionError, match="positive integer"):
        strategy.phase(-1)


@pytest.mark.parametrize("cls", PHASED)
def test_one_list_of_phases_is_spread(cls):
    assert len(cls([Phase("a"), Phase("b")]).phases) == 2
    assert len(cls([Stage("a"), Stage("b")]).phases) == 1
    with pytest.raises(AssertionError, match="at least one phase"):
        cls()
    with pytest.raises(AssertionError, match="a associated with more than one stage"):
        cls("a", Phase("b", "a"))


def test_serial_phases_have_a_liveness():
    strategy = poptorch.SerialPhasedExecution("a")
    assert strategy.setTensorsLiveness(liveness=Liveness.OffChipAfterEachPhase) is strategy
    assert strategy.useSeparateBackwardPhase(use=True) is strategy
    assert strategy.core_strategy()["liveness"] == "OffChipAfterEachPhase"
    assert strategy.backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 3,
        "serial_phases_execution": True,
    }
    with pytest.raises(AssertionError, match=r"poptorch\.Liveness"):
        strategy.setTensorsLiveness(3)
    with pytest.raises(AssertionError, match="True or False"):
        strategy.useSeparateBackwardPhase(1)


def test_parallel_phases_send_tensors_off_the_chip_or_not():
    strategy = poptorch.ParallelPhasedExecution("a", "b")
    assert strategy.core_strategy()["liveness"] == "AlwaysLive"
    assert strategy.sendTensorsOffChipAfterFwd(off_chip=True) is strategy
    assert strategy.core_strategy()["liveness"] == "OffChipAfterFwd"
    assert strategy.sendTensorsOffChipAfterFwd(False).backendOptions()["tensors_liveness"] == 0
    assert strategy.backendOptions()["serial_phases_execution"] is False
    with pytest.raises(AssertionError, match="True or False"):
        strategy.sendTensorsOffChipAfterFwd("yes")


@pytest.mark.parametrize("cls", KINDS)
def test_a_strategy_says_its_execution_mode_and_no_addresses(cls):
    strategy = cls("a", Stage("b").ipu(1))
    modes = {"pipelined": 0, "sharded": 1, "serial_phased": 2, "parallel_phased": 2}
    assert strategy.backendOptions()["execution_mode"] == modes[strategy.kind]
    assert repr(strategy).startswith(f"{cls.__name__}(")
    assert f"{id(strategy):x}" not in repr(strategy)


def test_sharded_execution_is_a_pipelined_one():
    assert issubclass(poptorch.ShardedExecution, poptorch.PipelinedExecution)


@pytest.mark.parametrize("kind", PHASED)
def test_one_list_of_phases_or_of_lists_is_unwrapped(kind):
    stages = [Stage("A"), Stage("B")], [Stage("C"), Stage("D")]
    assert kind(list(stages)).core_strategy()["phases"] == (2, 2)
    assert kind([["A", "B"], ["C"]]).core_strategy()["phases"] == (1, 1)
    assert kind([Phase("A", "B"), Phase("C")]).core_strategy()["phases"] == (1, 1)
    assert kind(stages[0]).core_strategy()["phases"] == (2,)
    assert kind(["A", "B"]).core_strategy()["phases"] == (1,)
