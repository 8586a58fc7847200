"""Cut tensors into parts, so that a comparison needs little more memory than they have."""

from collections.abc import Iterator, Sequence

from torch import Tensor

_ELEMENTS = 1 << 16  # of a part: temporaries of some megabytes, and little time for the calls


def slices_of(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Views of tensors of one shape, some elements of each, in the order of the elements.

    Raises:
        ValueError: if the shapes differ.
    """
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors):
        raise ValueError("results of two runs have different shapes")
    if tensors[0].numel() <= _ELEMENTS:
        yield tensors
        return
    inner = shape[1:].numel()
    length = max(1, _ELEMENTS // inner)
    for start in range(0, shape[0], length):
        parts = [tensor[start : start + length] for tensor in tensors]
        if inner > _ELEMENTS:
            yield from slices_of(*(part[0] for part in parts))
        else:
            yield parts
