"""Say which attributes of a later optimizer the device takes no notice of."""

from collections.abc import Callable

import torch

from poptorch.optim import Reading

_KNOWN_TO_TORCH = {"defaults", "state", "param_groups", "variable_attrs"}


class ExpectedAttributes:
    """The attributes of the first optimizer; those that others add are ignored, with a warning.

    Args:
        optimizer: the first one.
        say: writes the warning.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, say: Callable[[str], object]) -> None:
        self._expected, self._say = _attributes(optimizer), say
        self._said: set[str] = set()

    def warn(self, optimizer: torch.optim.Optimizer, reading: Reading) -> None:
        """Name the attributes that the first optimizer did not have; write each text once."""
        for what, names in _attributes(optimizer).items():
            unexpected = sorted(names - self._expected.get(what, names))
            text = f"Ignoring unexpected {what} in {_variant(reading)} optimizer: {unexpected}"
            if unexpected and text not in self._said:
                self._said.add(text)
                self._say(text)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The names of attributes, by their owner in words."""
    names = {
        "default group variable": set(optimizer.defaults),
        "optimizer attribute": vars(optimizer).keys() - _KNOWN_TO_TORCH,
    }
    for index, group in enumerate(optimizer.param_groups):
        names[f"group {index} attribute"] = group.keys() - {"params"}
    return names


def _variant(reading: Reading) -> str:
    """The device's name of an optimizer."""
    if reading.kind == "sgd":
        return "SGD1" if reading.settings["use_combined_accum"] else "SGD2"
    name = reading.kind.upper()
    if reading.kind == "rmsprop":
        return f"{name}_CENTERED" if reading.groups[0].values.get("centered") else name
    unbiased = reading.kind == "adam" or reading.settings["bias_correction"]
    return name if unbiased else f"{name}_NO_BIAS"
