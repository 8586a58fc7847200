"""Check how blocks get phases, and which phases are refused."""

import pytest
import torch

from ipu_dynamo import Block, CompileError, Options, StageSpec, Strategy, compile_inference
from ipu_dynamo.capture.capture import STAGE
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.traced.stages.placement import Placement


def chain(*names, ipu=None, before=False):
    """A model that runs one sine in each block, after a cosine when `before`."""

    def forward(x):
        x = torch.cos(x) if before else x
        for name in names:
            with Block(name, ipu):
                x = torch.sin(x)
        return x

    return forward


def phases(*stages, kind="serial_phased", **settings):
    """A strategy with one stage in each phase, or several where a list is given."""
    lists = [stage if isinstance(stage, list) else [stage] for stage in stages]
    specs = tuple(tuple(StageSpec(tuple(names), ipu) for names, ipu in one) for one in lists)
    return Strategy(kind, phases=specs, **settings)


def place(model, strategy):
    capture = trace(model, read_arguments(model, (torch.ones(2),), {}), training=False)
    Placement(strategy, 1)(capture)
    nodes = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    stages = [node.meta[STAGE] for node in nodes]
    forward = {stage: numbers[0] for stage, numbers in capture.phases.items()}
    return [(forward[stage], capture.ipus[stage]) for stage in stages]


def test_a_block_runs_in_its_phase_on_its_stages_ipu():
    strategy = phases(("a", 3), [("b", 1), ("c", 0)])
    assert place(chain("a", "b", "c"), strategy) == [(0, 3), (1, 1), (1, 0)]


def test_phases_on_one_ipu_stay_apart_and_blocks_of_a_phase_are_one_stage():
    strategy = phases(("ab", 0), ("c", 0))
    model = chain("a", "b", "c")
    assert place(model, strategy) == [(0, 0), (0, 0), (1, 0)]
    run = compile_inference(model, Options("eager", strategy=strategy))
    run(torch.ones(2))
    assert [call.phase for call in run.program.calls] == [0, 1]


def test_numbers_leave_room_for_transfers():
    strategy = phases(("a", 0), ("b", 1), liveness="off_chip_after_each_phase")
    assert place(chain("a", "b"), strategy) == [(0, 0), (4, 1)]


def test_a_block_without_an_ipu_in_its_phase_uses_its_own():
    assert place(chain("a", ipu=2), phases(("a", None))) == [(0, 2)]


def test_what_runs_before_the_first_block_is_in_the_first_phase_on_ipu_0():
    strategy = phases(("a", 1), ("b", 0))
    assert place(chain("a", "b", before=True), strategy) == [(0, 0), (0, 1), (1, 0)]


def test_going_back_within_a_phase_is_a_new_stage():
    strategy = phases([("ac", 0), ("b", 1)])
    assert place(chain("a", "b", "c"), strategy) == [(0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("strategy", "model", "problem"),
    [
        (phases(("a", None)), chain("a"), r"block 'a' of phase 0 has no IPU"),
        (phases(("a", 0)), chain("z"), r"Invalid phase for ExecutionMode::Phased: block 'z'"),
        (phases(("b", 0), ("a", 1)), chain("a", "b"), r"phase 0 reads %sin, .* later phase 1"),
        (
            phases(("a", 0), ("b", 2), kind="parallel_phased"),
            chain("a", "b"),
            r"even phases must run on even IPUs and odd phases on odd IPUs. Block 'b' of phase 1",
        ),
        (
            phases(("a", None), kind="parallel_phased"),
            chain("a", ipu=1),
            r"even phases must run on even IPUs",
        ),
    ],
)
def test_impossible_phases_are_refused_at_the_users_line(strategy, model, problem):
    with pytest.raises(CompileError, match=problem) as caught:
        place(model, strategy)
    assert "test_block_places.py" in str(caught.value)
    assert "try:" in str(caught.value)


STAGE_A = (StageSpec(("a",), 0),)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "phased"}, "strategy kind is 'phased'; choose one of pipelined, sharded, serial"),
        ({"liveness": "never"}, "strategy liveness is 'never'; choose one of always_live"),
        ({"kind": "serial_phased"}, "serial_phased has 0 phases and 0 stages"),
        ({"kind": "serial_phased", "phases": (STAGE_A,), "stages": STAGE_A}, "1 phases and 1 st"),
        ({"kind": "sharded", "phases": (STAGE_A,)}, "sharded has 1 phases"),
        ({"liveness": "off_chip_after_fwd"}, "are for phases, not for kind sharded"),
        ({"separate_backward_phase": True}, "are for phases, not for kind sharded"),
        (
            {
                "kind": "parallel_phased",
                "phases": (STAGE_A,),
                "liveness": "off_chip_after_each_phase",
            },
            "is for serial phases; parallel ones have always_live or off_chip_after_fwd",
        ),
    ],
)
def test_strategies_that_contradict_themselves_are_refused(settings, problem):
    with pytest.raises(OptionError, match=problem):
        Strategy(**settings)
