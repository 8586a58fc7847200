"""Draw options that divide a call: device iterations, accumulation, replicas, outputs."""

from dataclasses import replace

from hypothesis import strategies as st

from ipu_dynamo.options import Engine, Location, Locations, Options, OutputMode, Strategy
from ipu_dynamo.testing.placements import BlockPlacement


@st.composite
def options_for(
    draw: st.DrawFn,
    *,
    engine: Engine = "eager",
    training: bool = True,
    placement: BlockPlacement | None = None,
    max_iterations: int = 3,
    max_accumulation: int = 4,
    max_replicas: int = 3,
    exact: bool = False,
) -> Options:
    """Options of the core. They shrink towards one micro-batch per call.

    Args:
        engine: of every drawn option.
        training: whether they are for training.
        placement: gives the strategy, and the least number of micro-batches.
        max_iterations: most device iterations. A pipeline that needs more micro-batches than the
            three bounds allow gets as many as it needs.
        max_accumulation: most micro-batches for each update.
        max_replicas: most replicas.
        exact: divide by powers of two only, or not at all, and make one update per call.

    Example:
        @given(options=options_for(max_replicas=2))
        def test_my_model(options):
            rows = 4 * micro_batches(options)
            assert_same_training(MyModel(), [torch.randn(rows, 8)], options)
    """
    least = placement.micro_batches(training=training) if placement else 1
    least_iterations, least_accumulation = (1, least) if training else (least, 1)
    iterations = 1 if exact and training else max(max_iterations, least_iterations)
    device_iterations = draw(st.integers(least_iterations, iterations))
    accumulation = draw(
        st.integers(least_accumulation, max(max_accumulation, least_accumulation))
        if training
        else st.just(1)
    )
    replicas = draw(st.integers(1, max_replicas))
    power = (accumulation * replicas).bit_count() == 1
    reductions = ["mean", "sum"] if power or not exact else ["sum"]
    periods = [n for n in range(1, device_iterations + 1) if device_iterations % n == 0]
    sizes = [n for n in range(1, replicas + 1) if replicas % n == 0]
    strategies = ["post"] if exact else ["post", "running", "post_and_loss"]
    modes: list[OutputMode] = ["default", "all", "every", "final", "sum"]
    output_mode = draw(st.sampled_from(modes))
    return Options(
        engine=engine,
        device_iterations=device_iterations,
        gradient_accumulation=accumulation,
        replicas=replicas,
        input_group_size=draw(st.sampled_from(sizes)),
        input_groups_orthogonal=draw(st.booleans()),
        output_mode=output_mode,
        return_period=draw(st.sampled_from(periods)) if output_mode == "every" else 1,
        reduction=draw(st.sampled_from(reductions)),
        mean_strategy=draw(st.sampled_from(strategies)),
        strategy=placement.strategy if placement else Strategy(),
        locations=draw(_locations()),
    )


def _locations() -> st.SearchStrategy[Locations]:
    """Where tensors live; they shrink towards the default."""
    location = st.builds(Location, st.booleans(), st.integers(0, 9))
    in_shards = st.builds(
        Location, st.booleans(), st.integers(0, 9), st.booleans(), st.integers(0, 5)
    )
    kinds = dict.fromkeys(("weights", "optimizer_state"), in_shards)
    kinds |= dict.fromkeys(("accumulators", "activations"), location)
    changed = st.fixed_dictionaries({}, optional=kinds)
    return changed.map(lambda given: replace(Locations(), **given))


def micro_batches(options: Options, *, training: bool = True) -> int:
    """How many micro-batches the tensors of one call hold."""
    accumulation = options.gradient_accumulation if training else 1
    return options.device_iterations * accumulation * options.input_groups
