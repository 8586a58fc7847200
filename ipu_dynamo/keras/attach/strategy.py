"""Describe how many IPUs there are, and open the scope in which Keras models run on them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from ipu_dynamo.keras.attach.scope import enter_scope, leave_scope
from ipu_dynamo.keras.attach.thread_state import innermost_strategy
from ipu_dynamo.keras.ipu.config import IPUConfig, configuration_in_force

_DEVICE = re.compile(r"/device:IPU:(\d+)", re.IGNORECASE)


class IPUStrategy:
    """Run the Keras models that are made, or extended, in its scope on virtual IPUs.

    Args:
        num_ipus: how many IPUs there are; else that of `config`, else that of the configuration in
            force (`ipu.config`), else 1. `"/device:IPU:n"` in its place means `device_id=n`.
        config: an `ipu.config.IPUConfig`.
        device_id: which entry of the configuration's numbers of IPUs counts.
        enable_keras_extensions: False leaves Keras' own training loop; `jit_compile=True` then
            compiles for the IPUs.
        ipu_device: `"/device:IPU:n"`, as old programs write it.
        cpu_device: has no effect here; old programs pass it.
        enable_dataset_iterators: has no effect here; old programs pass it.
    """

    def __init__(
        self,
        num_ipus: int | str | None = None,
        config: Any = None,
        device_id: int = 0,
        enable_keras_extensions: bool = True,
        *,
        ipu_device: str | None = None,
        cpu_device: Any = None,
        enable_dataset_iterators: Any = None,
    ) -> None:
        if isinstance(num_ipus, str):
            num_ipus, ipu_device = None, num_ipus
            if isinstance(config, str):  # the second argument of old programs is the CPU's device
                config = None
        if ipu_device is not None:
            device_id = _device_number(ipu_device)
        self.num_ipus = _number_of_ipus(num_ipus, config, device_id)
        self.enable_keras_extensions = bool(enable_keras_extensions)

    @contextmanager
    def scope(self) -> Iterator[Self]:
        """Make this strategy the thread's, until the block ends."""
        enter_scope(self)
        try:
            yield self
        finally:
            leave_scope()

    def __repr__(self) -> str:
        return f"IPUStrategy(num_ipus={self.num_ipus})"


IPUStrategyV1 = IPUStrategy


def current_strategy() -> IPUStrategy | None:
    """The strategy whose scope this thread is in."""
    strategy = innermost_strategy()
    assert strategy is None or isinstance(strategy, IPUStrategy)
    return strategy


def _device_number(device: Any) -> int:
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f'ipu_device is {device!r}, and has to be like "/device:IPU:0"')
    return int(match[1])


def _number_of_ipus(num_ipus: Any, config: Any, device_id: Any) -> int:
    """The number of IPUs of a new strategy, from the first place that gives one."""
    if num_ipus is not None:
        if isinstance(num_ipus, bool) or not isinstance(num_ipus, int) or num_ipus < 1:
            raise ValueError(f"num_ipus is {num_ipus!r}, and has to be a positive integer")
        return num_ipus
    if config is not None and not isinstance(config, IPUConfig):
        raise TypeError(f"config is a {type(config).__name__}, and has to be an IPUConfig")
    config = config if config is not None else configuration_in_force()
    numbers: list[int] = [] if config is None else config.numbers_of_ipus()
    if not numbers:
        return 1
    if isinstance(device_id, bool) or not isinstance(device_id, int) or device_id < 0:
        raise ValueError(f"device_id is {device_id!r}, and has to be an integer from 0 on")
    if device_id >= len(numbers):
        raise ValueError(
            f"device_id is {device_id}, and auto_select_ipus of the configuration has "
            f"{len(numbers)} entries: {numbers}"
        )
    return numbers[device_id]
