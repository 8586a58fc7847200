"""Say where tensors live."""

from dataclasses import dataclass

from ipu_dynamo.errors import OptionError


@dataclass(frozen=True, slots=True)
class Location:
    """Where the tensors of one kind live.

    Args:
        off_chip: in streaming memory, and on an IPU only while it uses them.
        min_elements: tensors of fewer elements stay on the chip in any case.
        sharded: in parts, one on each replica, and whole only while an IPU uses them. Of weights
            and of optimizer state.
        min_sharded: tensors of fewer elements stay whole in any case.
        io_tiles_to_load: load through the tiles of `Options(io_tiles=...)`, if there are some. The
            program's text says so, for a model of an IPU's cycles.
        io_tiles_to_store: store through these tiles.
    """

    off_chip: bool = False
    min_elements: int = 0
    sharded: bool = False
    min_sharded: int = 0
    io_tiles_to_load: bool = False
    io_tiles_to_store: bool = False

    def __post_init__(self) -> None:
        for name in ("off_chip", "sharded", "io_tiles_to_load", "io_tiles_to_store"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"location {name} is {value!r}; it is True or False")
        for name in ("min_elements", "min_sharded"):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise OptionError(f"location {name} is {value!r}; it counts from 0")


@dataclass(frozen=True, slots=True)
class Locations:
    """Where tensors live, by kind.

    Args:
        weights: parameters: loaded, and gathered, for every call that reads them; loaded and
            stored around the update.
        optimizer_state: loaded before the update and stored after it. In shards, each replica
            updates its part.
        accumulators: loaded when a step begins and stored when it ends.
        activations: those that the liveness of a phased strategy may move, by default all.

    Raises:
        OptionError: accumulators or activations in shards.

    Source: PopTorch user guide, "poptorch.TensorLocationSettings".
    """

    weights: Location = Location()
    optimizer_state: Location = Location()
    accumulators: Location = Location()
    activations: Location = Location(off_chip=True)

    def __post_init__(self) -> None:
        for name in ("accumulators", "activations"):
            if getattr(self, name).sharded:
                raise OptionError(
                    f"locations has {name} in shards; they differ from replica to replica: shard "
                    "weights and optimizer_state, whose gradients are then summed in shards"
                )
