"""Check that phased programs move what they must, as printed, and change no value."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import Strategy, compile_inference, compile_training
from ipu_dynamo.program import (
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Receive,
    ReduceScatter,
    Repeat,
    Store,
    Traffic,
    Update,
)
from ipu_dynamo.testing import BlockPlacement, assert_same_bits, options_for, placements_of, recipes
from tests.properties.running import calls, outcome, slow

FIELDS = {"store": "stored", "load": "loaded"}
FIELDS |= {"all_gather": "gathered", "reduce_scatter": "scattered"}
PHASED = ("serial_phased", "parallel_phased")


def micro_batch(program):
    """The instructions of a micro-batch, in order."""
    (loop,) = (i for i in program.walk() if isinstance(i, Repeat) and i.over == "micro_batch")
    return loop.body


@pytest.mark.quick(8)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_workers_change_no_bit(recipe, training, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=PHASED))
    options = data.draw(options_for(placement=placement, training=training))
    options = replace(options, seed=7, workers=data.draw(st.sampled_from([1, 2, 4])))
    placed = outcome(recipe, placement, options, training=training)
    plain = replace(options, strategy=Strategy(), workers=1)
    assert_same_bits(placed, outcome(recipe, BlockPlacement(), plain, training=training))


@pytest.mark.quick(8)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_as_many_bytes_move_as_the_program_says(recipe, training, data):
    placement = data.draw(placements_of(recipe.build().names, kinds=(*PHASED, "sharded")))
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
    assert run.executable.memory.traffic == program.traffic * 2
    assert program.traffic == printed_traffic(program.short()) * options.replicas
    Follower(program, options).follow()


def printed_traffic(text):
    """The bytes that a printed program says one replica moves in a call."""
    total, loops = Traffic(), []
    for line in text.splitlines():
        indent, words = len(line) - len(line.lstrip()), line.split()
        while loops and loops[-1][0] >= indent:
            loops.pop()
        if words[0] == "repeat":
            loops.append((indent, int(words[1])))
        elif words[0] in FIELDS:
            nbytes = int(words[words.index("bytes") - 1]) * prod(count for _, count in loops)
            total += Traffic(**{FIELDS[words[0]]: nbytes})
    return total


class Follower:
    """Walks through a program; asserts that all is where it is read, and no longer than it may be.

    `came` has for each value on an IPU the phase that made it, or for which it was loaded;
    `whole` the variables in shards that an IPU has gathered; `summed` the gradients that are
    summed over replicas, and whether in shards; `stale` what replicas hold whole and have changed
    in one shard each.
    """

    def __init__(self, program, options):
        self.program, self.options = program, options
        self.variables = {v.name: v for v in program.variables}
        self.copies = {i.result for i in program.copies if i not in micro_batch(program)}
        self.came, self.stored, self.fetched, self.phases = {}, {}, set(), []
        self.whole, self.summed, self.stale = set(), {}, set()

    def follow(self):
        for instruction in self.program.walk():
            match instruction:
                case Load(value=name, result=result, ipu=ipu) if name == result:
                    assert self.variables[name].off_chip
                    self.fetched.add((name, ipu))
                case Store(value=name, result=result, ipu=ipu) if name == result:
                    self.fetched.remove((name, ipu))
                case AllGather(value=name, ipu=ipu):
                    self.assert_on_chip([name], ipu)
                    assert self.variables[name].shards > 1 or name in self.stale
                    self.stale.discard(name)
                    self.whole.add((name, ipu))
                case ReduceScatter(values=names) | AllReduce(values=names):
                    self.summed |= dict.fromkeys(names, isinstance(instruction, ReduceScatter))
                case Update():
                    self.update(instruction)
                case Call():
                    self.call(instruction)
                case Receive(result=name, ipu=ipu):
                    self.came[name, ipu] = None  # for the call behind it
                case Copy(value=name, result=result, src=src, dst=dst):
                    self.assert_whole([name], src)
                    assert name in self.variables or (name, src) in self.came
                    self.came[result, dst] = self.came.get((name, src))
                case Store(value=name, result=result, ipu=ipu):
                    assert self.came.pop((name, ipu)) < instruction.phase
                    assert result not in self.stored
                    assert prod(instruction.type.shape) >= self.where.min_elements
                    self.stored[result] = instruction.type
                    self.phases.append(instruction.phase)
                case Load(value=name, result=result, ipu=ipu):
                    assert self.stored[name] == instruction.type
                    self.came[result, ipu] = instruction.phase + 1
                    self.phases.append(instruction.phase)
        assert self.phases == sorted(self.phases)
        if self.options.strategy.liveness == "always_live" or not self.where.off_chip:
            assert not self.stored
        assert not [name for name, _ in self.fetched if self.variables[name].kind != "parameter"]
        assert not self.stale

    def update(self, update):
        states = [name for _, names in update.states for name in names]
        self.assert_on_chip((*update.parameters, *update.gradients, *states), update.ipu)
        for name, gradient, *own in zip(
            update.parameters, update.gradients, *(names for _, names in update.states), strict=True
        ):
            held = [self.variables[n] for n in (name, *own)]
            sharded = any(v.shards > 1 for v in held)
            assert sharded == (name in update.sharded)
            if self.options.replicas > 1:
                assert self.summed.pop(gradient) == sharded
            if sharded:
                self.stale |= {v.name for v in held if v.shards == 1 and v.type.shape}
        self.whole.clear()

    @property
    def where(self):
        return self.options.locations.activations

    def call(self, call):
        for key, phase in self.came.items():
            self.came[key] = call.phase if phase is None else phase
        values = [n for n in call.arguments if n not in self.variables and n not in self.copies]
        for name in values:
            self.assert_near(name, call)
        self.assert_on_chip(call.arguments, call.ipu)
        self.assert_whole(call.arguments, call.ipu)
        weights = {v.name for v in self.program.variables if v.kind == "parameter"}
        self.fetched -= {(name, call.ipu) for name in call.arguments if name in weights}
        self.whole -= {(name, call.ipu) for name in call.arguments if name in weights}
        for name in filter(None, call.results):
            self.came[name, call.ipu] = call.phase
        if call.phase is not None:
            self.phases.append(call.phase)

    def assert_on_chip(self, names, ipu):
        for name in names:
            if name in self.variables and self.variables[name].off_chip:
                assert (name, ipu) in self.fetched

    def assert_whole(self, names, ipu):
        assert not self.stale.intersection(names)
        for name in names:
            if name in self.variables and self.variables[name].shards > 1:
                assert (name, ipu) in self.whole

    def assert_near(self, name, call):
        """A value of an earlier phase is on the chip only if the liveness has it there."""
        phase, liveness = self.came[name, call.ipu], self.options.strategy.liveness
        if not self.where.off_chip or self.where.min_elements > 0:
            return
        backward = [c.phase for c in self.program.calls if c.direction != "forward"]
        if liveness == "off_chip_after_each_phase":
            assert phase == call.phase
        elif liveness != "always_live" and backward and call.phase >= min(backward):
            assert phase >= min(backward)
