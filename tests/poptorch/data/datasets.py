"""Hold the data sets that the tests of the data loader read."""

import torch
from torch.utils.data import IterableDataset


class Numbers(torch.utils.data.Dataset):
    """The samples 0, 1, 2, ..., each with its negative."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(float(index)), torch.tensor(-index)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(torch.arange(self.length).float())


class Lengths:
    """A sampler of batches of 1, 2, 3, 1, 2, 3, ... samples, without a `batch_size`."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size % 3 + 1


def numbers(loader):
    """The first tensor of every item, as lists."""
    return [(item[0] if isinstance(item, list | tuple) else item).tolist() for item in loader]


def flat(lists):
    """The elements of several lists in one."""
    return [element for part in lists for element in part]
