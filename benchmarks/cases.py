"""List all cases, and time contenders in processes of their own, in turn."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import (
    door_overhead,
    inference,
    loader,
    pieces,
    training,
)
from benchmarks.child import Child, fresh_child
from benchmarks.measure import (
    Checked,
    Maker,
    Timing,
    Wrong,
    WrongValuesError,
    clock,
    side_by_side,
)


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


CASES = {
    "mlp": Case(training.mlp, "MLP 64-128-10, batch 32, SGD, 200 steps in a call"),
    "mlp_784": Case(
        training.mlp_784, "MLP 784-128-10, batch 16, SGD with momentum, 50 steps in a call"
    ),
    "mnist": Case(training.mnist, "PopTorch's MNIST network, batch 8, SGD, 50 steps in a call"),
    "small_images": Case(
        training.small_images, "two convolutions on 8x8 images, batch 32, a step in a call"
    ),
    "language_model": Case(training.one_core, "4 layers, width 256, 8 micro-batches, AdamW"),
    "language_model_2": Case(training.two_cores, "the same on two cores", threads=2),
    "cuts": Case(training.all_cuts, "the same as a pipeline of 2 stages on two cores", 2),
    "pipeline": Case(training.two_stages, "a pipeline of 2 equal stages on two cores, SGD", 2),
    "encoder": Case(inference.one_core, "inference of 6 layers, width 512, batch 4"),
    "encoder_2": Case(inference.all_cores, "four such batches on two cores", threads=2),
    **{name: Case(contenders, what) for name, (what, contenders) in door_overhead.CASES.items()},
    **{
        f"recurrent_{kind}": Case(
            partial(training.recurrent, kind), f"2 layers of {kind.upper()}, 100 steps, batch 32"
        )
        for kind in training.KINDS
    },
    "saved_executable": Case(
        inference.saved_encoder, "6 layers, width 512, four batches of 4 in a call of an executable"
    ),
    "saved_executable_small": Case(
        inference.small_saved, "MLP 64-128-10, four batches of 32 in a call of an executable"
    ),
    **{
        f"outlined_{layers}": Case(
            partial(training.outlined, layers), f"a step of {layers} equal layers, AdamW"
        )
        for layers in (6, 48)
    },
    "for_loop": Case(inference.loop, "a loop of 1,000 iterations, a layer 64-64 with tanh"),
    "half_partials": Case(training.partial_sums, "a product and its gradients"),
    "half_training": Case(training.half_training, "a small language model in float16"),
}
ON_REQUEST = ("outlined_6", "outlined_48")  # run only if they are named
FACTS: dict[str, Callable[[], dict[str, float]]] = {
    "overhead": training.overhead,
    "pipeline": training.idle_shares,
    "half_training": training.distances,
    "layer_plans": pieces.layer_plans,
    "loader": loader.epochs,
    "ctc_decoder": pieces.decoder,
    "traced_updates": pieces.updates,
    "for_loop": inference.loop_programs,
    "recurrent": training.first_calls,
    "saved_programs": inference.reading,
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
