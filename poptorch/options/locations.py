"""Choose where tensors live: on the tiles or in streaming memory, whole or in shards."""

from typing import Any, ClassVar

from poptorch.errors import require
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter

_FEWEST_IO_TILES, _MOST_IO_TILES = 32, 192


class TensorLocationSettings(OptionsDict):
    """The memory of one kind of tensors. Settings that are not made keep the default."""

    _PREFIX: ClassVar[str] = "TensorLocationSettings."

    @setter(Effect.MACHINE)
    def minElementsForOffChip(self, min_elements: int) -> None:
        """Keep tensors of fewer elements on the chip.

        Args:
            min_elements: smallest number of elements of a tensor that leaves the chip.
        """
        self._keep(int, minElementsForOffChip=min_elements)

    @setter(Effect.MACHINE)
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> None:
        """Shard only tensors of more elements, by default of more than 8191.

        Args:
            min_elements: a tensor that is sharded has more elements.
        """
        self._keep(int, minElementsForReplicatedTensorSharding=min_elements)

    @setter(Effect.MACHINE)
    def useOnChipStorage(self, use: bool | None = True) -> None:
        """Store on the chip, or off it; None goes back to the default.

        Args:
            use: True: on the chip; False: in streaming memory.
        """
        if use is None:
            self.deleteIfExists("onChip")
        else:
            self._keep(bool, onChip=use)

    @setter(Effect.MACHINE)
    def useReplicatedTensorSharding(self, use: bool = True) -> None:
        """Keep one part of each tensor on each replica: of weights and of optimizer state.

        Args:
            use: False: each replica has the whole tensor.
        """
        self._keep(bool, useReplicatedTensorSharding=use)

    @setter(Effect.MACHINE)
    def useIOTilesToLoad(self, use: bool = True) -> None:
        """Load through the tiles reserved for IO.

        Args:
            use: False: load through all tiles.
        """
        self._keep(bool, useIOTilesToLoad=use)

    @setter(Effect.MACHINE)
    def useIOTilesToStore(self, use: bool = True) -> None:
        """Store through the tiles reserved for IO.

        Args:
            use: False: store through all tiles.
        """
        self._keep(bool, useIOTilesToStore=use)

    def _keep(self, wanted: type, **values: Any) -> None:
        for name, value in values.items():
            require(isinstance(value, wanted), f"{name} must be a {wanted.__name__}, got {value!r}")
            self.createOrSet(**{name: int(value)})


class _TensorLocationOptions(OptionsDict):
    """`Options.TensorLocations`."""

    _PREFIX: ClassVar[str] = "TensorLocations."

    @setter(Effect.MACHINE)
    def numIOTiles(self, num_tiles: int) -> None:
        """Reserve tiles of each IPU for IO.

        Args:
            num_tiles: an even number from 32 to 192.
        """
        require(
            isinstance(num_tiles, int)
            and _FEWEST_IO_TILES <= num_tiles <= _MOST_IO_TILES
            and num_tiles % 2 == 0,
            f"numIOTiles must be an even number between {_FEWEST_IO_TILES} and {_MOST_IO_TILES}. "
            f"Got {num_tiles!r}",
        )
        self.createOrSet(numIOTiles=num_tiles)

    @setter(Effect.MACHINE)
    def setActivationLocation(self, location: TensorLocationSettings) -> None:
        """Choose where activations live.

        Args:
            location: the settings; they are copied.
        """
        self._locate("location_activation", location)

    @setter(Effect.MACHINE)
    def setWeightLocation(self, location: TensorLocationSettings) -> None:
        """Choose where weights live.

        Args:
            location: the settings; they are copied.
        """
        self._locate("location_weight", location)

    @setter(Effect.MACHINE)
    def setOptimizerLocation(self, location: TensorLocationSettings) -> None:
        """Choose where the optimizer's state lives.

        Args:
            location: the settings; they are copied.
        """
        self._locate("location_optimizer", location)

    @setter(Effect.MACHINE)
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> None:
        """Choose where gradient accumulators live.

        Args:
            location: the settings; they are copied.
        """
        self._locate("location_accumulator", location)

    def _locate(self, name: str, location: TensorLocationSettings) -> None:
        require(
            isinstance(location, TensorLocationSettings),
            f"location must be a poptorch.TensorLocationSettings, got {location!r}",
        )
        self.createOrSet(**{name: location.toDict()})
