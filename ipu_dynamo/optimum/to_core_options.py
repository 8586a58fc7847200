"""Translate a configuration to the core's options, without PopTorch's names."""

from typing import TYPE_CHECKING, Literal

from ipu_dynamo.optimum.to_options import memory_shares
from ipu_dynamo.options import AutomaticLossScaling, Location, Locations, Options, Strategy

if TYPE_CHECKING:
    from ipu_dynamo.optimum.config import IPUConfig

_SMALLEST_SHARDED = 8192  # elements: PopTorch shards tensors of more than 8191


def to_core_options(config: "IPUConfig", *, inference: bool) -> Options:
    """The core's options that the PopTorch-compatible package makes from `to_options`.

    They leave out the cache folder, the offline target, rounding of the number of IPUs, and
    PopART's settings.

    Args:
        config: with plain values, none by type of POD.
    """
    twin = "inference_" if inference else ""
    replicas = getattr(config, f"{twin}replication_factor")
    partials: Literal["half", "float"] = "half" if config.enable_half_partials else "float"
    mode = "final" if config.output_mode == "default" else config.output_mode
    mode = "all" if inference else mode
    scaled = config.auto_loss_scaling and not inference
    return Options(
        replicas=replicas,
        device_iterations=getattr(config, f"{twin}device_iterations"),
        gradient_accumulation=1 if inference else config.gradient_accumulation_steps,
        reduction="mean",
        output_mode=mode,  # type: ignore[arg-type]
        automatic_loss_scaling=AutomaticLossScaling() if scaled else None,
        seed=None if config.seed is None else int(config.seed),
        locations=Locations(
            optimizer_state=_optimizer_location(config, replicas), activations=Location()
        ),
        strategy=_strategy(config, inference=inference),
        partials=partials,
        convolution_partials=partials,
        stochastic_rounding=not inference,
        narrow=True,
        recompute_here=False,
        memory_proportion=dict(enumerate(memory_shares(config, twin))),
    )


def _optimizer_location(config: "IPUConfig", replicas: int) -> Location:
    if config.replicated_tensor_sharding and replicas > 1:
        return Location(
            bool(config.optimizer_state_offchip), sharded=True, min_sharded=_SMALLEST_SHARDED
        )
    return Location(bool(config.optimizer_state_offchip))


def _strategy(config: "IPUConfig", *, inference: bool) -> Strategy:
    if inference and config.sharded_execution_for_inference:
        return Strategy(kind="sharded", auto_stage="auto_increment", weights_on_one_ipu=True)
    return Strategy(
        kind="pipelined",
        auto_stage="auto_increment",
        weights_on_one_ipu=True,
        sharded_if_short=inference,
    )
