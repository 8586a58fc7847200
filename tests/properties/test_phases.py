"""Check that phased programs move what they must, as printed, and change no value."""

from dataclasses import replace

from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import Strategy, compile_inference, compile_training
from ipu_dynamo.program import Call, Copy, Load, Receive, Repeat, Store, Traffic
from ipu_dynamo.testing import Placement, assert_same_bits, options_for, placements_of, recipes
from tests.properties.running import calls, outcome, slow

PHASED = ("serial_phased", "parallel_phased")


def micro_batch(program):
    """The instructions of a micro-batch, in order."""
    (loop,) = (i for i in program.walk() if isinstance(i, Repeat) and i.over == "micro_batch")
    return loop.body


@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_workers_change_no_bit(recipe, training, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=PHASED))
    options = data.draw(options_for(placement=placement, training=training))
    options = replace(options, seed=7, workers=data.draw(st.sampled_from([1, 2, 4])))
    placed = outcome(recipe, placement, options, training=training)
    plain = replace(options, strategy=Strategy(), workers=1)
    assert_same_bits(placed, outcome(recipe, Placement(), plain, training=training))


@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_as_many_bytes_move_as_the_program_says(recipe, training, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=PHASED))
    options = data.draw(options_for(placement=placement, training=training))
    model = placement.place(recipe.build())
    if training:
        run = compile_training(model, slow(model), options)
    else:
        run = compile_inference(model, options)
    for args in calls(recipe, options, training=training):
        run(*args)
    program = run.program
    note(program.short())
    follow(program, options.strategy.liveness)
    assert run.executable.memory.traffic == program.traffic * 2
    printed = Traffic()
    for line in program.short().splitlines():
        words = line.split()
        if words[0] in ("store", "load"):
            nbytes = int(words[words.index("bytes") - 1])
            printed += Traffic(nbytes, 0) if words[0] == "store" else Traffic(0, nbytes)
    steps = options.gradient_accumulation if training else 1
    assert program.traffic == printed * (options.device_iterations * steps * options.replicas)


def follow(program, liveness):
    """Walk through a micro-batch; assert that every value is where it is read, and no longer."""
    variables = {v.name for v in program.variables} | {c.result for c in before_loop(program)}
    came = {}  # value on an IPU -> the phase for which it came there; a maker's own
    stored, phases = {}, []
    home = {}
    for instruction in micro_batch(program):
        if isinstance(instruction, Call | Store | Load):
            phases.append(instruction.phase)
        match instruction:
            case Receive(result=name, ipu=ipu):
                came[name, ipu] = None  # in the phase of the call behind it
            case Copy(value=name, result=result, src=src, dst=dst):
                assert name in variables or (name, src) in came
                came[result, dst] = came.get((name, src))
            case Call():
                for key, phase in came.items():
                    came[key] = instruction.phase if phase is None else phase
                for name in instruction.arguments:
                    if name not in variables:
                        assert_near(came[name, instruction.ipu], instruction, liveness, program)
                for name in filter(None, instruction.results):
                    came[name, instruction.ipu] = instruction.phase
                    home[name] = instruction.ipu
            case Store(value=name, result=result, ipu=ipu):
                assert home.get(name, ipu) == ipu
                assert came.pop((name, ipu)) < instruction.phase
                assert result not in stored
                stored[result] = instruction.type
            case Load(value=name, result=result, ipu=ipu):
                assert stored[name] == instruction.type
                came[result, ipu] = instruction.phase + 1
    assert phases == sorted(phases)
    if liveness == "always_live":
        assert not stored


def assert_near(phase, call, liveness, program):
    """`phase` is when the value of an argument of `call` was made, or for when it was loaded."""
    first = (
        min(c.phase for c in program.calls if c.direction != "forward")
        if training(program)
        else None
    )
    if liveness == "off_chip_after_each_phase":
        assert phase == call.phase
    elif liveness != "always_live" and first is not None and call.phase >= first:
        assert phase >= first


def training(program):
    return program.kind == "training"


def before_loop(program):
    loop = micro_batch(program)
    return [i for i in program.walk() if isinstance(i, Copy) and i not in loop]
