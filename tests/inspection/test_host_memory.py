"""Check the memory of this computer against the storages that PyTorch allocates in a step."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ipu_dynamo import InputError, Options, compile_inference, compile_training, inspect
from ipu_dynamo.runtime.engines import engines
from tests.inspection.looking import EAGER, nothing_changes, pipeline

X = torch.arange(96.0).reshape(12, 8) / 96


class Storages(TorchDispatchMode):
    """Bytes of all storages that were seen and are there, after each operator of a function."""

    def __init__(self):
        super().__init__()
        self.seen, self.left_out, self.live = {}, set(), []

    def see(self, *values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self.seen.get(reference.cdata)
                if known is None or known[0].expired():
                    self.seen[reference.cdata] = reference, storage.nbytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.see(args, kwargs)
        results = func(*args, **(kwargs or {}))
        self.see(results)
        there = ((address, *of) for address, of in self.seen.items())
        self.live.append(sum(n for a, r, n in there if a not in self.left_out and not r.expired()))
        return results


@contextmanager
def counted():
    """Count the storages of the functions that are compiled in the block, whenever they run."""
    counter, original = Storages(), engines.EagerEngine.compile

    def compile_(self, given):
        def watched(stage):
            def run(arguments):
                with counter:
                    return stage(arguments)

            return run

        return [watched(stage) for stage in original(self, given)]

    engines.EagerEngine.compile = compile_
    try:
        yield counter
    finally:
        engines.EagerEngine.compile = original


def measured(step, counter, *inputs):
    """The live bytes after each operator of the first step of a call, without variables."""
    step.compile(*inputs)
    executable = step.executable
    tensors = (executable.tensor(v.name) for v in executable.host_program.runs.variables)
    counter.left_out = {StorageWeakRef(t.untyped_storage()).cdata for t in tensors}
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    read = {stream.name for stream in step.program.inputs}
    names = step.parts.compiled.input_names
    counter.see([x for name, x in zip(names, given, strict=True) if name in read])
    counter.live.clear()
    step(*inputs)
    return counter.live


def followed(memory):
    """The same by the followed storages."""
    places = range(len(memory.steps))
    return [sum(s.nbytes for s in memory.storages if s.made <= i <= s.last) for i in places]


@pytest.mark.parametrize("options", [{}, {"recompute_here": False}, {"device_iterations": 2}])
def test_live_bytes_of_a_pipeline_are_those_of_storages(options):
    with counted() as counter:
        step = pipeline(workers=1, **options)
        live = measured(step, counter, X.repeat(options.get("device_iterations", 1), 1))
    memory = inspect(step).program.host.memory
    assert len(memory.steps) > 100
    assert live[: len(memory.steps)] == followed(memory)


def test_categories_and_the_peak(monkeypatch):
    step = pipeline(workers=1)
    step(X)
    with nothing_changes(monkeypatch, step.model):
        memory = inspect(step).program.host.memory
        text, picture = str(memory), memory.svg()
    assert memory.stages == (0, 1, 2)
    own = [v for v in step.program.variables if v.ipu == 1]
    weights = sum(v.held.nbytes for v in own if v.kind == "parameter")
    for stage in memory.stages:
        assert all(at["weights"] == at["accumulators"] == weights for at in memory.curve(stage))
    # the loss is of the last stage; each keeps its input, or has none to keep
    stash = [max(at["stash and stream buffers"] for at in memory.curve(s)) for s in (0, 1)]
    assert stash == [X.nbytes + 64, 64]  # the batch, and what forward leaves to backward
    every = [sum(at.values()) for at in memory.curve()]
    assert every[memory.peak()] == max(every) == memory.peak_bytes()
    assert sum(value.nbytes for value in memory.held(memory.peak())) == max(every) - sum(
        v.held.nbytes for v in step.program.variables
    )
    by_stage = [[sum(at.values()) for at in memory.curve(stage)] for stage in memory.stages]
    assert every == [sum(of) for of in zip(*by_stage, strict=True)]
    assert "looking.py:" in text.partition("peak of all")[2]
    assert "%x" in text
    assert picture.count("<polygon") == 6 * 3
    assert "stage 2, this computer: peak" in picture
    counters = memory.counters()
    assert [sum(at.values()) for at in counters["stage 1, this computer"]] == by_stage[1]


def test_a_comparison_shows_what_recomputation_saves():
    kept, repeated = (pipeline(workers=1, recompute=how) for how in ("off", "all"))
    for step in (kept, repeated):
        step(X)
    text = inspect(kept).compare(inspect(repeated))
    assert text.startswith("memory at the peak, this computer: training step of Chain -> ")
    assert "stage 0: " in text
    assert inspect(kept).compare(inspect(kept)).count("%") == 0


def test_what_is_not_followed_has_a_reason():
    model = nn.Linear(4, 1)
    step = compile_training(
        nn.Sequential(model, nn.Flatten(0)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Options(**EAGER),
    )
    with pytest.raises(InputError, match="is not known: not compiled yet"):
        inspect(step).compare(inspect(step))
    inference = compile_inference(model, Options(**EAGER))
    inference(torch.ones(2, 4))
    host = inspect(inference).program.host
    assert host.memory is None
    assert host.absent["memory"] == "only pipelines that train are followed"


@pytest.mark.inductor
def test_with_machine_code_a_function_is_one_step():
    step = pipeline(workers=1, engine="inductor")
    step(X)
    memory = inspect(step).program.host.memory
    assert {step.operator for step in memory.steps} == {""}
    assert len(memory.steps) == 6 * 5  # functions of all micro-batches
    assert "inside @" in str(memory)
    assert "temporaries" not in str(memory).splitlines()[0]
