"""Check the functions that are written for stage passes: what they do, in order, and forget."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training
from ipu_dynamo.passes.host.recipes.make_recipes import MakeRecipes
from ipu_dynamo.program import Call, Receive, Send
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes
from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import bind_call, bind_passes, failure_of
from ipu_dynamo.runtime.execute.tasks.task_code import Binding, TaskWriter

MICRO_BATCHES = 5  # as many as a pipeline of three stages needs


class Net(nn.Module):
    """Three layers on as many IPUs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.mse_loss(h, x), h.sum()


class Watching(EagerEngine):
    """Notes at each call which earlier results are still there."""

    def __init__(self):
        super().__init__()
        self.made, self.alive = {}, []

    def compile(self, recipes):
        return [*map(self.watched, super().compile(recipes))]

    def watched(self, run):
        def stage(arguments):
            self.alive.append({key for key, ref in self.made.items() if ref() is not None})
            results = run(arguments)
            call = len(self.alive) - 1
            self.made |= {(call, i): weakref.ref(r) for i, r in enumerate(results) if r is not None}
            return results

        return stage


def trained(engine, kind="sharded", **options):
    torch.manual_seed(0)
    model = Net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipu_dynamo.whole_step.lowering.make_engine", lambda *_: engine)
        given = Options("eager", strategy=Strategy(kind), workers=1, **options)
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
        step(torch.randn(2 * MICRO_BATCHES, 3))
    return step


@pytest.mark.parametrize("kind", ["sharded", "pipelined"])
def test_a_value_is_there_until_its_last_reader_and_no_longer(kind):
    engine = Watching()
    program = trained(
        engine, kind, gradient_accumulation=MICRO_BATCHES
    ).executable.host_program.inlined
    loop = sections(program).loop
    calls = [i for i in loop if isinstance(i, Call)]
    sent = {i.value for i in loop if isinstance(i, Send)}
    registers = number_registers(program)  # a copy on one device is the value itself
    last = {registers[name]: i for i, call in enumerate(calls) for name in call.arguments}
    count = len(calls)
    assert len(engine.alive) == MICRO_BATCHES * count
    for now, alive in enumerate(engine.alive):
        micro_batch, index = divmod(now, count)
        expected = {
            (micro_batch * count + maker, place)
            for maker, call in enumerate(calls[:index])
            for place, name in enumerate(call.results)
            if name and name not in sent and last.get(registers[name], maker) >= index
        }
        outputs = {  # some are kept for the caller
            (m * count + maker, place)
            for m in range(MICRO_BATCHES)
            for maker, call in enumerate(calls)
            for place, name in enumerate(call.results)
            if name in sent
        }
        assert alive - outputs == expected


def binding_of(program, **changed):
    registers = number_registers(program)
    stages = {
        f.name: (recipe, stage)
        for f in program.functions
        for recipe in [MakeRecipes().recipe(f)]
        for stage in EagerEngine().compile([recipe])
    }
    kept = {registers[v.name] for v in program.variables}
    given = {"program": program, "registers": registers, "kept": kept, "stages": stages}
    return Binding(**given | {"failed": failure_of(program)} | changed)


@pytest.fixture(scope="module")
def program():
    return trained(EagerEngine()).executable.host_program.inlined


def test_instructions_are_lines_in_program_order(program):
    loop = sections(program).loop
    passes = instructions_of_passes(loop)
    assert [i for of in passes for i in of if isinstance(i, Call)] == list(program.calls)
    assert sorted(map(id, loop)) == sorted(id(i) for of in passes for i in of)
    text = [line for of in TaskWriter(binding_of(program), passes).lines for line in of]
    called = [line.split("stage_")[1].split("(")[0] for line in text if "stage_" in line]
    assert called == [call.function for call in program.calls]


def test_only_what_is_kept_is_sent(program):
    registers = number_registers(program)
    (first, second) = program.outputs
    places = {i.stream: registers[i.value] for i in sections(program).loop if isinstance(i, Send)}
    sent = {first.name: (0, False), second.name: (1, True)}
    passes = instructions_of_passes(sections(program).loop)
    text = "\n".join(
        line for of in TaskWriter(binding_of(program, sent=sent), passes).lines for line in of
    )
    assert f"\nsent[0][k] = r[{places[first.name]}]" in text
    assert f"\nif sent[1].kept[k]:\n    sent[1][k] = r[{places[second.name]}]" in text


def test_arguments_that_end_with_a_call_are_given_away_where_the_recipe_says_so(program):
    plain = binding_of(program)
    stages = {name: (replace(r, releases=True), run) for name, (r, run) in plain.stages.items()}
    passes = instructions_of_passes(sections(program).loop)
    for binding, gives in ((plain, False), (binding_of(program, stages=stages), True)):
        text = "\n".join(line for of in TaskWriter(binding, passes).lines for line in of)
        assert ("(arguments)" in text) == gives
        assert ("error, None, k)" in text) == gives


def test_a_failure_names_the_call_and_gets_its_arguments(program):
    noted = []

    def failed(number, error, arguments, k):
        noted.append((number, type(error), len(arguments), k))
        return LookupError(number)

    def fail(arguments):
        raise ZeroDivisionError

    call = program.calls[1]
    stages = dict(binding_of(program).stages)
    stages[call.function] = stages[call.function][0], fail
    tasks = bind_passes(binding_of(program, stages=stages, failed=failed))
    with pytest.raises(LookupError) as caught:
        tasks[1]([torch.zeros(3)] * 100, 7, [[torch.zeros(3)] * 8] * 9, ())
    assert noted == [(1, ZeroDivisionError, len(call.arguments), 7)]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_one_function_for_a_whole_call_empties_its_list(program):
    registers = number_registers(program)
    loop = sections(program).loop
    types = {stream.name: stream.type for stream in program.inputs}
    frame = [None] * (max(registers.values()) + 1)
    for variable in program.variables:
        frame[registers[variable.name]] = torch.zeros(variable.type.shape)
    for receive in (i for i in loop if isinstance(i, Receive)):
        frame[registers[receive.result]] = torch.ones(types[receive.stream].shape)
    loss = next(i for i in loop if isinstance(i, Send))
    returned = [registers[loss.value], len(frame)]
    calls = [0]
    run = bind_call(binding_of(program, kept={*returned}), [5.0], returned, calls, lambda: 7)
    with torch.no_grad():
        results = run(frame)
    assert (frame, calls) == ([], [7])
    assert results == (torch.ones(()), 5.0)  # the weights are zero, and so is what they make
