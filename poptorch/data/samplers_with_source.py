"""Let samplers that were written for PyTorch 1 and 2.0 say what they sample from.

Their base class took the data set and did nothing with it; PyTorch's own has no such argument now,
so that `super().__init__(data_source)` would stop a program.
"""

from typing import Any

from torch.utils.data import Sampler


def accept_data_source() -> None:
    """Give `torch.utils.data.Sampler` the argument back, where it is missing."""
    if "__init__" not in vars(Sampler):
        Sampler.__init__ = _init  # type: ignore[assignment, method-assign]


def _init(self: Sampler[Any], *args: Any, **kwargs: Any) -> None:
    following = super(Sampler, self).__init__
    if getattr(following, "__objclass__", None) is object:  # nobody else waits for arguments
        _only_a_source(*args, **kwargs)
    else:
        following(*args, **kwargs)


def _only_a_source(data_source: object = None) -> None:
    """Raise TypeError for other arguments."""
