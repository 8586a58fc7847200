"""Check that ranks take shares of a program, with matching streams between them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    CompileError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.passes.host.inline_writes import InlineWrites
from ipu_dynamo.passes.host.step import take_share
from ipu_dynamo.passes.host.step.take_share import TakeShare, check_streams, local_program
from ipu_dynamo.passes.pipeline import run_host_passes
from ipu_dynamo.program import (
    Call,
    Copy,
    HostProgram,
    ReceiveFromRank,
    SendToRank,
    Update,
    UpdateFactors,
)
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.share import Share
from ipu_dynamo.testing import options_for, placements_of, recipes
from tests.ranks.mesh import Pipeline


class Net(nn.Sequential):
    """Two layers on two IPUs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        BeginBlock(self[0], "first", 0)
        BeginBlock(self[2], "second", 1)


def compiled(model, options, x, **training):
    make = compile_training if training else compile_inference
    program = make(model, *training.values(), options)
    program.compile(x)
    return program.program


def share_of(program, share):
    host = run_host_passes(program, [InlineWrites(), TakeShare(share)])
    assert isinstance(host, HostProgram)
    return host


def lines(text: str) -> list[str]:
    """The instructions of a section of a docstring."""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_rank_gets_the_after_of_the_docstring():
    options = Options("eager", device_iterations=2, strategy=Strategy("sharded"))
    program = compiled(Net(), options, torch.ones(4, 3))
    text = take_share.__doc__
    before, after = text.split("Before   ")[1].split("Keeps ")[0].split("After    ")
    host = share_of(program, Share(1, 2, 0, 1))
    written = [" ".join(line.split()) for line in lines(after)]
    assert [str(i) for i in sections(program).loop] == lines(before)
    assert [" ".join(str(i).split()) for i in sections(host.runs).loop] == written
    assert host.inlined == run_host_passes(program, [InlineWrites()]).inlined
    assert [variable.name for variable in host.runs.variables] == ["2.weight", "2.bias"]


@pytest.mark.quick(6)
@given(recipe=recipes(random=True), data=st.data())
def test_each_instruction_is_on_one_rank_and_each_stream_has_two_ends(recipe, data):
    kinds = ["sharded"] if recipe.shares_buffers else ["pipelined", "sharded"]
    placement = data.draw(placements_of(recipe.build().names, kinds=kinds))
    options = data.draw(options_for(placement=placement, max_replicas=2))
    model = placement.place(recipe.build())
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    splits = options.device_iterations * options.gradient_accumulation * options.input_groups
    step.compile(*recipe.data(splits))
    program = step.program
    assume(program.num_ipus > 1)
    columns = data.draw(st.integers(2, program.num_ipus))
    parts = [local_program(program, Share(1, columns, 0, column)) for column in range(columns)]
    check_streams(parts)
    whole = [i for i in program.walk() if isinstance(i, Call | Update)]
    assert sorted(map(str, whole)) == sorted(
        str(i) for part in parts for i in part.walk() if isinstance(i, Call | Update)
    )


def test_numbers_for_traced_updates_are_made_on_every_rank():
    model = Pipeline()
    options = Options("eager", strategy=Strategy("sharded"))
    step = compile_training(model, torch.optim.RAdam(model.parameters()), options)
    step.compile(torch.ones(2, 4))
    for column in range(2):
        part = local_program(step.program, Share(1, 2, 0, column))
        (factors,) = (i for i in part.walk() if isinstance(i, UpdateFactors))
        made = {*factors.results, *(i.result for i in part.walk() if isinstance(i, Copy))}
        numbers = [n for i in part.walk() if isinstance(i, Update) for of in i.numbers for n in of]
        assert numbers
        assert made >= {*numbers}
        assert {*factors.counters} <= {variable.name for variable in part.variables}


def test_streams_that_do_not_match_are_found():
    options = Options("eager", device_iterations=2, strategy=Strategy("pipelined"))
    program = compiled(Net(), options, torch.ones(4, 3))
    first, second = (local_program(program, Share(1, 2, 0, column)) for column in range(2))
    check_streams([first, second])
    with pytest.raises(AssertionError):
        check_streams([first, first])
    with pytest.raises(AssertionError):
        check_streams([first])
    kinds = [[type(i) for i in part.walk()] for part in (first, second)]
    assert [SendToRank in of for of in kinds] == [True, False]
    assert [ReceiveFromRank in of for of in kinds] == [False, True]


def test_each_rank_follows_its_part_of_one_schedule():
    options = Options("eager", device_iterations=4, strategy=Strategy("pipelined"), replicas=2)
    program = compiled(Net(), options, torch.ones(16, 3))
    share = Share(1, 2, 0, 0)
    whole = schedule_of(program, micro_batches=4, replicas=2, workers=1, share=share)
    whole.check(program)
    parts = [whole.for_share(range(2), range(ipu, ipu + 1), 0) for ipu in range(2)]
    runs = [run for part in parts for of in part.runs for run in of]
    assert sorted(runs) == sorted(run for of in whole.runs for run in of)
    for ipu, part in enumerate(parts):
        assert {part.passes[run.index].ipu for of in part.runs for run in of} == {ipu}
        assert part.parse(str(part)) == part


class ReadsBuffer(nn.Module):
    """IPU 2 reads a buffer that IPU 0 changes in each micro-batch, once IPU 1 has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("seen", torch.zeros(3))
        for ipu, layer in zip((0, 1, 2, 0), self.layers, strict=True):
            BeginBlock(layer, None, ipu)

    def forward(self, x):
        first, second, third, last = self.layers
        h = last(third(second(first(x))) * self.seen)
        self.seen += h.detach().mean(0)
        return F.mse_loss(h, x)


def test_a_buffer_that_another_rank_reads_while_it_changes_is_refused():
    options = Options("eager", strategy=Strategy("sharded"))
    program = compiled(ReadsBuffer(), options, torch.ones(2, 3))
    with pytest.raises(CompileError, match="%seen on ipu0 changes in each micro-batch, and ipu2"):
        local_program(program, Share(1, 3, 0, 2))
