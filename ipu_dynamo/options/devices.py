"""Say which torch device does the work of each virtual IPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError

Device = str | torch.device
KINDS = ("cpu", "cuda")


def read_devices(given: Device | Sequence[Device]) -> tuple[str, ...]:
    """The names of devices, in the form in which tensors state them: one for all IPUs, or one for
    each.

    Raises:
        ValueError: one that torch does not know or this machine does not have, or devices of
            different kinds.
    """
    names = [given] if isinstance(given, str | torch.device) else list(given)
    if not names:
        raise ValueError("names none; leave it out for that of the model")
    found = [_read(name) for name in names]
    if len({device.type for device in found}) > 1:
        raise ValueError(
            f"is {', '.join(map(str, found))}; all IPUs of a program must be on devices of one kind"
        )
    return tuple(map(str, found))


def devices_of_ipus(devices: Sequence[torch.device], num_ipus: int) -> tuple[torch.device, ...]:
    """A device for every IPU of a program.

    Args:
        devices: one for all, or at least one for each.

    Raises:
        CompileError: there are too few.
    """
    if len(devices) == 1:
        return tuple(devices) * num_ipus
    if len(devices) < num_ipus:
        raise CompileError(
            f"the model is on {num_ipus} IPUs, and option devices names {len(devices)} devices",
            hint="name one device for each IPU, or one for all",
        )
    return tuple(devices[:num_ipus])


def devices_to_use(names: Sequence[Device] | None, tensors: Sequence[Tensor]) -> list[torch.device]:
    """The devices that were asked for; else that of the first of `tensors`, else the CPU."""
    if names is not None:
        return [torch.device(name) for name in names]
    return [tensor.device for tensor in tensors[:1]] or [torch.device("cpu")]


def cuda_devices() -> tuple[int, int]:
    """How many CUDA devices this machine has, and the index of the current one."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.device_count(), torch.cuda.current_device()


def _read(name: object) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise ValueError(f"has {name!r}; name devices such as 'cpu' or 'cuda:0'")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"has {name!r}, which is no torch device") from error
    if device.type not in KINDS:
        raise ValueError(f"has {name!r}; choose one of {', '.join(KINDS)}")
    if device.type == "cpu":
        return torch.device("cpu")
    count, current = cuda_devices()
    if count == 0:
        raise ValueError(
            f"has {name!r}, and this PyTorch finds no CUDA device: install a CUDA "
            "build and driver, or use 'cpu'"
        )
    index = current if device.index is None else device.index
    if index >= count:
        raise ValueError(f"has {name!r}, and there are {count} CUDA devices")
    return torch.device("cuda", index)
