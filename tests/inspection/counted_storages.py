"""Count the storages that are there while functions run on the eager engine."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ipu_dynamo.program import Receive
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines import engines
from ipu_dynamo.runtime.execute.host_io.host_streams import HostLink


class Storages(TorchDispatchMode):
    """Bytes of all storages that were seen and are there, after each operator of a function."""

    def __init__(self):
        super().__init__()
        self.seen, self.left_out, self.live, self.functions = {}, set(), [], set()

    def see(self, *values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self.seen.get(reference.cdata)
                if known is None or known[0].expired():
                    self.seen[reference.cdata] = reference, storage.nbytes()

    def leave_out(self, tensors):
        self.left_out |= {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors}

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
        def watched(name, stage):
            def run(arguments):
                if name not in counter.functions:  # an update
                    return stage(arguments)
                counter.see(arguments)
                with counter:
                    return stage(arguments)

            return run

        names = [recipe.function.name for recipe in given]
        return [*map(watched, names, original(self, given))]

    engines.EagerEngine.compile = compile_
    try:
        yield counter
    finally:
        engines.EagerEngine.compile = original


def measured(step, counter, *inputs):
    """The live bytes after each operator of a call, without variables; compiled by `counted`."""
    step.compile(*inputs)
    executable = step.executable
    program, replicas = executable.host_program.runs, executable.replicas.places
    counter.functions = {function.name for function in executable.host_program.functions}
    counter.leave_out(executable.tensor(v.name, r) for v in program.variables for r in replicas)
    read = {i.stream for i in sections(program).loop if isinstance(i, Receive)}
    original = HostLink.open

    def open_(self, inputs, **how):
        streams = original(self, inputs, **how)
        counter.see([tensor for name, tensor in inputs.items() if name in read], streams.received)
        return streams

    HostLink.open = open_
    try:
        counter.live.clear()
        step(*inputs)
    finally:
        HostLink.open = original
    return counter.live


def followed(memory):
    """The same by the followed storages."""
    places = range(len(memory.steps))
    return [sum(s.nbytes for s in memory.storages if s.made <= i <= s.last) for i in places]
