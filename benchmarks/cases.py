"""List all cases, and time contenders in processes of their own, in turn."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import (
    inference,
    loader,
    peak_memory,
    pieces,
    ranks,
    saved_variables,
    training,
    work,
)
from benchmarks.child import Child, fresh_child
from benchmarks.jax_peer import JAX
from benchmarks.measure import (
    Checked,
    Maker,
    Timing,
    Wrong,
    WrongValuesError,
    clock,
    side_by_side,
)
from benchmarks.work import Training


@dataclass(frozen=True, slots=True)
class Case:
    """Contenders for the same work; ours is the last one.

    Args:
        contenders: makes a maker of each one's step, by name.
        what: the work, in a few words.
        threads: intra-op threads that PyTorch has.
    """

    contenders: Callable[[], Mapping[str, Maker]]
    what: str
    threads: int = 1


def _trained(make: Callable[[], Training], what: str, *ways: str, threads: int = 1) -> Case:
    """A training, in some of the ways of `training.WAYS`."""
    return Case(partial(training.contend, make, *ways), what, threads)


_OURS = "compile_training"
_ONE_CORE = "eager", "torch.compile", "torch.compile, optimiser too", "products alone", JAX, _OURS
_SMALL = *_ONE_CORE[:3], "torch.compile, ipu", *_ONE_CORE[3:]
_TWO_CORES = "eager", "torch.compile", "side by side", _OURS
CASES = {
    "mlp": _trained(work.mlp, "MLP 64-128-10, batch 32, SGD, 200 steps in a call", *_SMALL),
    "mlp_784": _trained(
        work.mlp_784,
        "MLP 784-128-10, batch 16, SGD with momentum, 50 steps in a call",
        *_SMALL,
    ),
    "mnist": _trained(
        work.mnist, "PopTorch's MNIST network, batch 8, SGD, 50 steps in a call", *_SMALL
    ),
    "small_images": _trained(
        work.small_images, "two convolutions on 8x8 images, batch 32, a step in a call", *_SMALL
    ),
    "language_model": _trained(
        work.language_model, "4 layers, width 256, 8 micro-batches, AdamW", *_ONE_CORE
    ),
    "language_model_2": _trained(
        work.language_model, "the same on two cores", *_TWO_CORES, threads=2
    ),
    "cuts": Case(training.all_cuts, "the same as a pipeline of 2 stages on two cores", 2),
    "pipeline": Case(training.two_stages, "a pipeline of 2 equal stages on two cores, SGD", 2),
    "pipeline_adamw": Case(
        training.two_stages_adamw, "a language model of 256 words in 2 stages, AdamW", 2
    ),
    "ranks": Case(
        partial(
            ranks.trained,
            "benchmarks.work:language_model",
            "DDP, eager",
            "DDP, torch.compile, optimiser too",
            "not connected",
            "mesh of 2 replicas",
        ),
        "the language model on two ranks of one thread, 8 micro-batches each",
    ),
    "ranks_sum": Case(ranks.exchange, "the sum of 100 MB over two ranks"),
    "encoder": Case(inference.one_core, "inference of 6 layers, width 512, batch 4"),
    "encoder_2": Case(inference.all_cores, "four such batches on two cores", threads=2),
    **{
        f"door_{kind}_{name}": Case(
            partial(training.door, kind, layers, *between), f"{kind} through torch.compile, {what}"
        )
        for kind in training.PLAIN
        for name, what, layers, between in (
            ("1_layer", "1 tiny layer", 1, []),
            ("8_layers", "8 tiny layers", 8, []),
            ("mlp", "a tiny perceptron of 3 layers", 3, [nn.ReLU]),
        )
    },
    **{
        f"recurrent_{kind.lower()}": _trained(
            partial(work.recurrent, kind),
            f"2 layers of {kind}, 100 steps, batch 32",
            "eager",
            *ways,
        )
        for kind, ways in (("LSTM", (JAX, _OURS)), ("GRU", [_OURS]), ("RNN", [_OURS]))
    },
    "saved_executable": Case(
        inference.saved_encoder, "6 layers, width 512, four batches of 4 in a call of an executable"
    ),
    "saved_executable_small": Case(
        inference.small_saved, "MLP 64-128-10, four batches of 32 in a call of an executable"
    ),
    **{
        f"outlined_{layers}": _trained(
            partial(work.encoder, layers),
            f"a step of {layers} equal layers, AdamW",
            "not outlined",
            _OURS,
        )
        for layers in (6, 48)
    },
    "for_loop": Case(inference.loop, "a loop of 1,000 iterations, a layer 64-64 with tanh"),
    "half_partials": Case(training.partial_sums, "a product 512 x 4096 x 512"),
    "small_updates": Case(
        partial(pieces.updates, torch.optim.Adamax, 200, 64), "traced Adamax, 200 tensors of 64"
    ),
    "large_updates": Case(
        partial(pieces.updates, torch.optim.Adagrad, 6, 5_000_000, fused=True),
        "traced Adagrad beside PyTorch's fused one, 30 million numbers",
    ),
    "ctc_sure": Case(partial(pieces.decoding, 6.0), "the CTC decoder, of sure scores"),
    "ctc_noise": Case(partial(pieces.decoding, 3.0), "the CTC decoder, of noise"),
    "half_training": _trained(
        training.half_language_model, "a small language model in float16", "eager", _OURS
    ),
}
ON_REQUEST = ("outlined_6", "outlined_48", *peak_memory.CASES)  # run only if they are named
FACTS: dict[str, Callable[[], dict[str, float]]] = {
    "overhead": training.overhead,
    "pipeline": training.idle_shares,
    "pipeline_adamw": training.processor_time,
    "layer_plans": pieces.layer_plans,
    "loader": loader.epochs,
    "saved_variables": saved_variables.reading,
}  # more figures, by name; each has a label


def measure(
    case: str, names: list[str], *, threads: int, seconds: float
) -> dict[str, Timing | Wrong]:
    """Time the contenders `names` of a case, each with so many intra-op threads.

    Nothing that was compiled before is used: the first call is the time to a first step.
    """
    with ExitStack() as stack:
        clocks = {}
        for name in names:
            child = stack.enter_context(fresh_child(OMP_NUM_THREADS=str(threads)))
            child.call("benchmarks.cases:Contender", case, name)
            clocks[name] = partial(_seconds, child)
        return side_by_side(clocks, seconds=seconds)


def _seconds(child: Child, calls: int) -> float:
    """Seconds per call of a contender in a process of its own."""
    found = child.call(".seconds", calls)
    if "apart" in found:
        raise WrongValuesError(found["apart"])
    return float(found["seconds"])


class Contender:
    """A contender of a case, in this process."""

    def __init__(self, case: str, name: str) -> None:
        torch.manual_seed(0)
        self._step = CASES[case].contenders()[name]()
        self._checked = not isinstance(self._step, Checked)

    def seconds(self, calls: int) -> dict[str, float]:
        """Seconds per call; after the first ones, values are compared."""
        found = {"seconds": clock(self._step)(calls)}
        if not self._checked:
            self._checked = True
            try:
                self._step.check()
            except WrongValuesError as error:
                return {"apart": error.apart}
        return found
