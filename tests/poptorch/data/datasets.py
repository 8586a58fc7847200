"""Hold the data sets that the tests of the data loader read."""

import os
import signal
import time

import torch
from torch.utils.data import IterableDataset, get_worker_info

import poptorch


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


class MeasuredStream(Stream):
    def __len__(self):
        return self.length


class SharedStream(MeasuredStream):
    """A stream of which each worker gives a part."""

    def __iter__(self):
        info = get_worker_info()
        numbers = torch.arange(self.length).float()
        return iter(numbers if info is None else numbers[info.id :: info.num_workers])


class Failing(Numbers):
    """Numbers that cannot be read from one on."""

    def __init__(self, length, bad, error=KeyError):
        super().__init__(length)
        self.bad, self.error = bad, error

    def __getitem__(self, index):
        if index >= self.bad:
            raise self.error(f"no sample {index}")
        return super().__getitem__(index)


class Dying(Numbers):
    """Numbers whose reader is killed at the third one."""

    def __getitem__(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Numbers):
    """Numbers of which each takes a while after the first."""

    def __init__(self, length, seconds):
        super().__init__(length)
        self.seconds = seconds

    def __getitem__(self, index):
        if index:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class Draws(Numbers):
    """Random numbers of PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        import random

        import numpy

        return torch.rand(2), torch.tensor([numpy.random.rand(), random.random()])


class Arrays(Numbers):
    """Arrays made by NumPy, each of the same number of bytes."""

    def __init__(self, length, nbytes):
        super().__init__(length)
        self.nbytes = nbytes

    def __getitem__(self, index):
        import numpy

        return torch.from_numpy(numpy.random.default_rng(index).random(self.nbytes // 8))


class Pair:
    """Two tensors and a word; `PairParser` takes it apart."""

    def __init__(self, one, two, word):
        self.one, self.two, self.word = one, two, word


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.one
        yield struct.two

    def reconstruct(self, original_structure, tensor_iterator):
        return Pair(next(tensor_iterator), next(tensor_iterator), original_structure.word)


class Pairs(Numbers):
    def __getitem__(self, index):
        return Pair(torch.tensor([index]), torch.tensor([-index]), f"number {index}")


class Lengths:
    """A sampler of batches of 1, 2, 3, 1, 2, 3, ... samples, without a `batch_size`."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size % 3 + 1


def first(batch):
    """A `collate_fn` that makes a dict of what is no tensor."""
    return {"x": len(batch)}


def numbers(loader):
    """The first tensor of every item, as lists."""
    return [(item[0] if isinstance(item, list | tuple) else item).tolist() for item in loader]


def flat(lists):
    """The elements of several lists in one."""
    return [element for part in lists for element in part]
