"""Check that programs are verified: those that are emitted pass, broken ones name the fault."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    Location,
    Locations,
    Options,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.errors import ProgramError
from ipu_dynamo.program import (
    Accumulate,
    AllGather,
    AllReduce,
    Call,
    Copy,
    HostProgram,
    Load,
    Program,
    Receive,
    ReduceScatter,
    Repeat,
    Send,
    Store,
    TensorType,
    Update,
    WriteBuffer,
)
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.testing import options_for, recipes
from tests.properties.running import calls, draw_placement, slow


def drawn_program(recipe, placement, options, *, training):
    """The program of a drawn model; nothing runs."""
    model = placement.place(recipe.build())
    args = calls(recipe, options, training=training, count=1)[0]
    if training:
        run = compile_training(model, slow(model), options)
    else:
        run = compile_inference(model, options)
    run.compile(*args)
    return run.program


def without(body, instruction):
    """A body, and in it one instruction less."""
    return tuple(
        replace(i, body=without(i.body, instruction)) if isinstance(i, Repeat) else i
        for i in body
        if i is not instruction
    )


@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_drawn_programs_pass_and_each_move_in_them_is_needed(recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    program = drawn_program(recipe, placement, options, training=training)
    verify(program)
    moves = Receive | Send | Copy | Call | Store | Load | AllGather
    needed = [
        i
        for i in program.walk()
        if isinstance(i, moves) and not (isinstance(i, Call) and not any(i.results))
    ]
    if not needed:
        return
    left_out = data.draw(st.sampled_from(needed))
    note(f"{program.short()}\nwithout {left_out}")
    if is_read(program, left_out):
        with pytest.raises(ProgramError):
            verify(replace(program, body=without(program.body, left_out)))


def is_read(program, instruction):
    """Whether another instruction needs what one does: a call may return what nobody reads."""
    if not isinstance(instruction, Call):
        return True
    names = {name for other in program.walk() for name in reads(other)}
    return any(name in names for name in instruction.results)


def reads(instruction):
    match instruction:
        case Call(arguments=names):
            return names
        case Send(value=name) | Copy(value=name) | Store(value=name) | Load(value=name):
            return (name,)
    return ()


# --- Programs that are broken by hand ----------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        BeginBlock(self.last, ipu_id=1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.last(self.norm(self.first(x)).tanh()), y)


@cache
def training(*, away=False):
    """A step of two stages and two replicas; states, and with `away` all else, are in shards."""
    place = Location(off_chip=away, sharded=True)
    locations = Locations(optimizer_state=place)
    if away:
        locations = replace(locations, weights=place, accumulators=Location(off_chip=True))
    options = Options(
        "eager",
        replicas=2,
        gradient_accumulation=2,
        strategy=Strategy("sharded"),
        locations=locations,
    )
    model = Net()
    step = compile_training(model, torch.optim.AdamW(model.parameters()), options)
    step.compile(torch.ones(8, 4), torch.ones(8, 4))
    return step.program


@cache
def inference():
    run = compile_inference(nn.Linear(4, 4), Options("eager", device_iterations=2))
    run.compile(torch.ones(4, 4))
    return run.program


def changed(program, kind, number=0, **fields):
    """A program in which one instruction of a kind has other fields."""
    target = [i for i in program.walk() if isinstance(i, kind)][number]

    def body_of(body):
        return tuple(
            replace(i, **fields)
            if i is target
            else replace(i, body=body_of(i.body))
            if isinstance(i, Repeat)
            else i
            for i in body
        )

    return replace(program, body=body_of(program.body))


def put(program, instruction, *, before=Repeat):
    """A program with one instruction more, in front of the first other one of a kind in a step."""
    (step,) = program.body
    place = next(n for n, i in enumerate(step.body) if isinstance(i, before))
    body = (*step.body[:place], instruction, *step.body[place:])
    return replace(program, body=(replace(step, body=body),))


def first(program, kind, number=0):
    return [i for i in program.walk() if isinstance(i, kind)][number]


def twice(program, kind, **fields):
    """A program in which a write stands once more, with other fields."""
    (step,) = program.body
    loop = first(program, Repeat, 1)
    write = first(program, kind)
    place = loop.body.index(write) + 1
    inner = (*loop.body[:place], replace(write, **fields), *loop.body[place:])
    return replace(
        program,
        body=(
            replace(
                step, body=tuple(replace(i, body=inner) if i is loop else i for i in step.body)
            ),
        ),
    )


def returning_views(program, name, result, other):
    """A program with a function that returns a view of another node in place of a result.

    Args:
        result: its position.
        other: takes placeholders and results, and returns what is looked at.
    """
    (function,) = (f for f in program.functions if f.name == name)
    graph = copy.deepcopy(function.graph)
    output = graph.graph.output_node()
    results = list(output.args[0])
    seen = other(list(graph.graph.find_nodes(op="placeholder")), results)
    with graph.graph.inserting_before(output):
        results[result] = graph.graph.call_function(torch.ops.aten.alias.default, (seen,))
    results[result].meta["val"] = seen.meta["val"]
    output.args = (tuple(results),)
    changed = replace(function, graph=graph)
    return replace(
        program, functions=tuple(changed if f is function else f for f in program.functions)
    )


def writing(function):
    """The same function, which sets its first argument to zero."""
    graph = copy.deepcopy(function.graph)
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    with graph.graph.inserting_after(inputs[-1]):
        node = graph.graph.call_function(torch.ops.aten.zero_.default, (inputs[0],))
    node.meta["val"] = inputs[0].meta["val"]
    return replace(function, graph=graph)


def renamed(program, table, number, **fields):
    """A program in which an entry of one of its tables has other fields."""
    entries = list(getattr(program, table))
    entries[number] = replace(entries[number], **fields)
    return replace(program, **{table: tuple(entries)})


OTHER = TensorType(torch.float64, (4, 4))
BROKEN = {
    "parameter with a made name": lambda p: (
        renamed(p, "variables", 0, name="first..weight"),
        "the name of parameter %first..weight has an empty part",
    ),
    "accumulator with a name of the user's": lambda p: (
        renamed(p, "variables", -1, kind="accumulator", name="first.weight.grad"),
        "the name of accumulator %first.weight.grad has no empty part",
    ),
    "input with a made name": lambda p: (
        renamed(p, "inputs", 0, name=".x"),
        "the name of input %.x has an empty part",
    ),
    "random key with a name of the user's": lambda p: (
        renamed(p, "inputs", 0, source="random"),
        "the name of input %x has no empty part",
    ),
    "value with a name of the user's": lambda p: (
        changed(p, Copy, result="first.other"),
        "%first.other is called like a tensor of the user's, and is none",
    ),
    "two loops": lambda p: (replace(p, body=p.body * 2), "one loop over micro-batches"),
    "no loop": lambda p: (replace(p, body=()), "one loop over micro-batches, not 0 loops"),
    "loop in a loop": lambda p: (
        changed(p, Repeat, 1, body=(first(p, Repeat, 1),)),
        "has another loop in it",
    ),
    "other kind": lambda p: (
        replace(p, kind="inference"),
        "a program for inference has no loop over device iterations",
    ),
    "no device iterations": lambda p: (
        replace(p, body=p.body[0].body),
        "a program for training needs one loop over device iterations",
    ),
    "no count": lambda p: (changed(p, Repeat, 1, count=0), "a loop runs once at least\n  in:   re"),
    "steps at once": lambda p: (
        changed(p, Repeat, 0, order="pipelined"),
        "updates follow one another",
    ),
    "update too early": lambda p: (
        put(p, first(p, Update)),
        "this cannot stand before micro-batches\n  in:   update group 0",
    ),
    "receive too late": lambda p: (
        put(p, first(p, Receive), before=Update),
        "this cannot stand after micro-batches",
    ),
    "update within": lambda p: (
        changed(p, Repeat, 1, body=(*first(p, Repeat, 1).body, first(p, Update))),
        "this cannot stand within a micro-batch",
    ),
    "no IPU": lambda p: (replace(p, num_ipus=0), "0 IPUs and 2 replicas"),
    "home nowhere": lambda p: (renamed(p, "variables", 0, ipu=7), "lives on ipu7, which does not"),
    "two variables": lambda p: (
        replace(p, variables=(*p.variables, p.variables[0])),
        "more than one variable is called first.weight",
    ),
    "odd shards": lambda p: (renamed(p, "variables", 0, shards=3), "in 3 shards of 2 replicas"),
    "unknown input": lambda p: (changed(p, Receive, stream="z"), "no input is called z"),
    "value named as variable": lambda p: (
        changed(p, Receive, result="first.weight"),
        "%first.weight is a variable, no value",
    ),
    "two values of a name": lambda p: (
        changed(p, Receive, 1, result=first(p, Receive).result),
        "is made by another instruction already",
    ),
    "unknown output": lambda p: (changed(p, Send, stream="9"), "no output is called 9"),
    "unknown IPU": lambda p: (changed(p, Receive, ipu=2), "there is no ipu2, of 2"),
    "copy to itself": lambda p: (changed(p, Copy, dst=first(p, Copy).src), "already"),
    "copy of another type": lambda p: (changed(p, Copy, type=OTHER), "f64[4,4] is expected"),
    "copy from elsewhere": lambda p: (
        changed(p, Copy, src=1, dst=0),
        "is not on ipu1 here, but",
    ),
    "unknown value": lambda p: (changed(p, Send, value="z"), "%z is not on ipu1 here"),
    "unknown function": lambda p: (changed(p, Call, function="f"), "no function is called f"),
    "call elsewhere": lambda p: (changed(p, Call, ipu=1), "not on ipu1"),
    "argument too few": lambda p: (
        changed(p, Call, arguments=first(p, Call).arguments[1:]),
        "arguments stand where",
    ),
    "arguments exchanged": lambda p: (
        changed(p, Call, arguments=first(p, Call).arguments[::-1]),
        "is expected\n  in:   (",
    ),
    "result too few": lambda p: (changed(p, Call, results=()), "0 results stand where"),
    "result of none": lambda p: (
        changed(p, Call, results=(None,) * len(first(p, Call).results)),
        "is called what @",
    ),
    "write of an unknown value": lambda p: (
        changed(p, WriteBuffer, values=("z",) * 3),
        "%z is no result of this stage pass",
    ),
    "values too few": lambda p: (
        changed(p, Accumulate, values=first(p, Accumulate).values[1:]),
        "values are written to",
    ),
    "variable too often": lambda p: (
        changed(p, WriteBuffer, variables=("norm.running_mean",) * 3),
        "a variable is written twice at once",
    ),
    "values exchanged": lambda p: (
        changed(p, WriteBuffer, values=first(p, WriteBuffer).values[::-1]),
        "and %norm.running_mean is f32[4]",
    ),
    "write of another stage": lambda p: (
        changed(p, Accumulate, direction="weights"),
        "a write stands behind a call of its stage pass",
    ),
    "accumulator as a buffer": lambda p: (
        changed(p, WriteBuffer, variables=("first.weight..grad", "norm.bias", "norm.weight")),
        "%first.weight..grad, of kind accumulator, is no buffer",
    ),
    "buffer as an accumulator": lambda p: (
        changed(p, Accumulate, accumulators=("norm.running_mean", "last.bias..grad")),
        "%norm.running_mean, of kind buffer, is no accumulator",
    ),
    "mean without a share": lambda p: (changed(p, Accumulate, rule="mean"), "has a share"),
    "stored after a sum": lambda p: (
        twice(p, Accumulate, rule="store"),
        "is written before: store would lose that",
    ),
    "buffer twice": lambda p: (
        twice(p, WriteBuffer),
        "%norm.running_mean is written by another stage pass already",
    ),
    "no pure function": lambda p: (
        replace(p, functions=tuple(map(writing, p.functions))),
        "@forward0 writes its argument 0",
    ),
    "sum of nothing": lambda p: (
        put(p, AllReduce(("z",), 0), before=Update),
        "%z is not on ipu0 here",
    ),
    "sum twice": lambda p: (
        put(p, AllReduce(("first.weight..grad",) * 2, 0), before=Update),
        "summed twice",
    ),
    "sum of other shards": lambda p: (
        changed(p, ReduceScatter, shards=1),
        "1 shards stand",
    ),
    "sum without a type": lambda p: (changed(p, ReduceScatter, types=()), "0 types stand where"),
    "needless gather": lambda p: (
        put(p, first(p, AllGather), before=Update),
        "each replica has the whole of %",
    ),
    "gather of other shards": lambda p: (changed(p, AllGather, shards=1), "1 shards stand"),
    "gather of another type": lambda p: (changed(p, AllGather, type=OTHER), "is expected"),
    "needless load": lambda p: (
        put(p, Load("first.weight", "first.weight", OTHER, 0, None, "")),
        "%first.weight stays on ipu0",
    ),
    "load of nothing": lambda p: (
        put(p, Load("h..off", "h", OTHER, 0, None, "")),
        "%h..off is not in streaming memory here",
    ),
    "gradient too few": lambda p: (
        changed(p, Update, gradients=first(p, Update).gradients[1:]),
        "4 parameters have 3 gradients",
    ),
    "gradient of another": lambda p: (
        changed(p, Update, gradients=first(p, Update).gradients[::-1]),
        "has shape",
    ),
    "states of another rule": lambda p: (
        changed(p, Update, states=first(p, Update).states[:1]),
        "keeps ['step', 'exp_avg', 'exp_avg_sq'], not ['step']",
    ),
    "states exchanged": lambda p: (
        changed(
            p,
            Update,
            states=tuple((n, s if n == "step" else s[::-1]) for n, s in first(p, Update).states),
        ),
        "not state f32[",
    ),
    "update twice": lambda p: (
        put(p, first(p, Update), before=Update),
        "%first.weight is updated twice",
    ),
    "whole update of shards": lambda p: (changed(p, Update, sharded=()), "is updated in shards if"),
    "copy of an argument": lambda p: (  # forward0 returns x as what goes to the other IPU
        returning_views(p, "forward0", 0, lambda inputs, _: inputs[2]),
        "%tanh lies in the memory of %x",
    ),
    "argument of another call": lambda p: (
        returning_views(p, "forward0", 1, lambda inputs, _: inputs[2]),
        "%addmm lies in the memory of %x",
    ),
    "write of an argument": lambda p: (
        returning_views(p, "forward0", 2, lambda inputs, _: inputs[6]),
        "%getitem_3 lies in the memory of %norm.running_mean",
    ),
    "writes of one memory": lambda p: (
        returning_views(p, "forward0", 3, lambda _, results: results[2]),
        "%getitem_3, which is written, shares its memory with %getitem_4",
    ),
    "sum of a value that goes on": lambda p: (
        returning_views(p, "backward0", 3, lambda _, results: results[2]),
        "%getitem_6, which is written, shares its memory with %getitem_7",
    ),
    "sent twice": lambda p: (twice(p, Send), "the output 0 is sent twice"),
    "divided by a weight": lambda p: (
        changed(p, Update, loss_scale="first.weight"),
        "gradients are divided by %first.weight, which is no number",
    ),
    "divided by zero": lambda p: (changed(p, Update, divisor=0), "divided by 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_refused_with_what_is_wrong(name):
    program = training()
    verify(program)
    broken, message = BROKEN[name](program)
    with pytest.raises(ProgramError) as caught:
        verify(broken)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [Load, Store, AllGather])
def test_each_move_of_a_variable_is_needed(kind):
    program = training(away=True)
    verify(program)
    moves = [i for i in program.walk() if isinstance(i, kind)]
    assert len(moves) > 3
    for move in moves:
        with pytest.raises(ProgramError):
            verify(replace(program, body=without(program.body, move)))


def test_a_shard_is_not_loaded_as_a_whole():
    program = training(away=True)
    load = first(program, Load)
    with pytest.raises(ProgramError, match=rf"%{load.value} is in \d shards"):
        verify(changed(program, Load, shard=not load.shard))


def test_a_variable_is_stored_by_its_owner_only():
    program = training(away=True)
    load = next(i for i in program.walk() if isinstance(i, Load) and i.ipu == 0)
    name, held, shard = load.value, load.type, load.shard
    program = put(program, Load(name, name, held, 1, None, "", shard), before=Update)
    program = put(program, Store(name, name, held, 1, None, "", shard), before=Update)
    with pytest.raises(ProgramError, match=f"%{name} lives on ipu0"):
        verify(program)


def test_a_variable_is_changed_by_its_owner_only():
    program = training()
    places = {v.name: n for n, v in enumerate(program.variables)}
    running = renamed(program, "variables", places["norm.running_mean"], ipu=1)
    with pytest.raises(ProgramError, match=r"%norm.running_mean lives on ipu1, not on ipu0"):
        verify(running)


def test_an_accumulator_off_the_chip_is_written_by_its_owner_only():
    program = training(away=True)
    write = first(program, Accumulate)

    def moved(body):
        return tuple(
            replace(i, body=moved(i.body))
            if isinstance(i, Repeat)
            else replace(i, ipu=1 - write.ipu)
            if i is write or (isinstance(i, Load) and i.value in write.accumulators)
            else i
            for i in body
        )

    with pytest.raises(ProgramError, match=f"is changed away from its owner, ipu{write.ipu}"):
        verify(replace(program, body=moved(program.body)))


def test_an_inference_has_nothing_after_its_loop():
    program = inference()
    (loop,) = program.body
    copy = Copy("weight", "weight..on1", TensorType(torch.float32, (4, 4)), 0, 1, "")
    with pytest.raises(ProgramError, match="only the step of a training program has an end"):
        verify(replace(program, body=(loop, copy)))


def test_text_of_a_broken_program_is_refused_by_its_line():
    text = training().text()
    send = next(line for line in text.splitlines() if line.strip().startswith("Send("))
    broken = text.replace(send, send.replace("ipu=1", "ipu=0"))
    number = broken.splitlines().index(send.replace("ipu=1", "ipu=0")) + 1
    with pytest.raises(ValueError, match=rf"^line {number}: %\w+ is not on ipu0 here, but on ipu1"):
        Program.parse(broken)


def test_no_executable_is_made_of_a_broken_program():
    program = replace(inference(), outputs=())
    tensors = {v.name: torch.zeros(v.type.shape) for v in program.variables}
    with pytest.raises(ProgramError, match="no output is called 0"):
        Executable(HostProgram(program, program), tensors, EagerEngine())
