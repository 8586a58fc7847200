"""Configure the machine as TensorFlow programs for IPUs do; keep the active settings.

`auto_select_ipus` is the number of IPUs of strategies; everything else is recorded.
"""

import copy
import logging
from typing import Any

from ipu_dynamo.keras.ipu.config_choices import DeviceConnectionType as DeviceConnectionType
from ipu_dynamo.keras.ipu.config_choices import ExecutionProfileType as ExecutionProfileType
from ipu_dynamo.keras.ipu.config_choices import (
    MergeRemoteBuffersBehaviour as MergeRemoteBuffersBehaviour,
)
from ipu_dynamo.keras.ipu.config_choices import SchedulingAlgorithm as SchedulingAlgorithm
from ipu_dynamo.keras.ipu.config_choices import SelectionOrder as SelectionOrder
from ipu_dynamo.keras.ipu.config_choices import (
    StochasticRoundingBehaviour as StochasticRoundingBehaviour,
)
from ipu_dynamo.keras.ipu.config_tree import DEFAULTS, Category
from ipu_dynamo.keras.ipu.not_offered import not_offered

logger = logging.getLogger("ipu_dynamo.keras")

_in_force: list["IPUConfig"] = []  # none or one, for all threads of the process


class IPUConfig(Category):
    """The tree of options of a system of IPUs, with their defaults."""

    def __init__(self) -> None:
        super().__init__("", DEFAULTS)

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Put a copy of this configuration in force for the process.

        Args:
            device: has no effect here; old programs pass it.
        """
        configure_ipu_system(self, device)

    def numbers_of_ipus(self) -> list[int]:
        """How many IPUs each device has; empty where it is not said.

        Raises:
            ValueError: a number below 1, or both ways of selecting IPUs.
        """
        selected = self.auto_select_ipus
        if _number(selected) and _number(self.select_ipus):
            raise ValueError(
                "both auto_select_ipus and select_ipus are set: set auto_select_ipus only"
            )
        numbers = [selected] if isinstance(selected, int) else list(selected)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"auto_select_ipus is {selected!r}: every device has at least 1 IPU"
                )
        return numbers


def configure_ipu_system(
    config: IPUConfig, device: str = "cpu", reset_configuration: bool = True
) -> None:
    """Put a copy of a configuration in force for the process.

    Args:
        config: the configuration.
        device: has no effect here; old programs pass it.
        reset_configuration: has no effect here; the one before is always replaced.

    Raises:
        TypeError: it is no `IPUConfig`.
        ValueError: it selects IPUs in both ways, or fewer than one.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError(f"config is a {type(config).__name__}, and has to be an IPUConfig")
    config.numbers_of_ipus()
    if _in_force:
        logger.warning("another IPUConfig was in force, and is replaced")
    recorded = [path for path in config.changed() if path != "auto_select_ipus"]
    if recorded:
        logger.info("recorded, without effect here: %s", ", ".join(recorded))
    _in_force[:] = [copy.deepcopy(config)]


def get_ipu_config() -> list[IPUConfig]:
    """A list with a copy of the configuration in force.

    Raises:
        RuntimeError: there is none.
    """
    if not _in_force:
        raise RuntimeError("no IPUConfig is in force: call configure_ipu_system() of one first")
    return copy.deepcopy(_in_force)


def reset_ipu_configuration() -> None:
    """Take the configuration out of force; strategies keep their numbers of IPUs."""
    _in_force.clear()


def configuration_in_force() -> IPUConfig | None:
    """The configuration in force, if any, for strategies."""
    return _in_force[0] if _in_force else None


def _number(selection: Any) -> bool:
    return isinstance(selection, int) or len(selection) > 0


__getattr__ = not_offered("ipu.config")
