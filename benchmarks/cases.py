"""List what is measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks import (
    ctc_decoder,
    door_overhead,
    half,
    inference,
    language_model,
    layer_plans,
    loader,
    loops,
    pipeline,
    recurrent,
    saved_programs,
    traced_updates,
    training_step,
)
from benchmarks.measure import Maker


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
    "mlp": Case(training_step.mlp, "MLP 64-128-10, batch 32, SGD, 200 steps in a call"),
    "mlp_784": Case(
        training_step.mlp_784, "MLP 784-128-10, batch 16, SGD with momentum, 50 steps in a call"
    ),
    "mnist": Case(
        training_step.mnist, "PopTorch's MNIST network, batch 8, SGD, 50 steps in a call"
    ),
    "digits": Case(
        training_step.digits, "two convolutions on 8x8 images, batch 32, a step in a call"
    ),
    "language_model": Case(language_model.one_core, "4 layers, width 256, 8 micro-batches, AdamW"),
    "language_model_2": Case(language_model.two_cores, "the same on two cores", threads=2),
    "cuts": Case(language_model.all_cuts, "the same as a pipeline of 2 stages on two cores", 2),
    "pipeline": Case(pipeline.two_stages, "a pipeline of 2 equal stages on two cores, SGD", 2),
    "encoder": Case(inference.one_core, "inference of 6 layers, width 512, batch 4"),
    "encoder_2": Case(inference.all_cores, "four such batches on two cores", threads=2),
    **{name: Case(contenders, what) for name, (what, contenders) in door_overhead.CASES.items()},
    **{
        f"recurrent_{kind}": Case(contenders, f"2 layers of {kind.upper()}, 100 steps, batch 32")
        for kind, contenders in recurrent.CASES.items()
    },
    "saved_executable": Case(
        saved_programs.encoder, "6 layers, width 512, four batches of 4 in a call of an executable"
    ),
    "saved_executable_small": Case(
        saved_programs.small, "MLP 64-128-10, four batches of 32 in a call of an executable"
    ),
    "for_loop": Case(loops.contenders, "a loop of 1,000 iterations, a layer 64-64 with tanh"),
    "half_partials": Case(half.partial_sums, "a product and its gradients"),
    "half_training": Case(half.training_step, "a small language model in float16"),
}
FACTS: dict[str, Callable[[], dict[str, float]]] = {
    "overhead": training_step.overhead,
    "pipeline": pipeline.idle_shares,
    "half_training": half.distances,
    "layer_plans": layer_plans.seconds,
    "loader": loader.epochs,
    "ctc_decoder": ctc_decoder.batches,
    "traced_updates": traced_updates.seconds,
    "for_loop": loops.programs,
    "recurrent": recurrent.first_calls,
    "saved_programs": saved_programs.reading,
}  # what else is to be known, by name: figures by what they say
