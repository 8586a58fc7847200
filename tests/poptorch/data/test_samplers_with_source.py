"""Check that samplers may pass a data source to their base class."""

import pytest
from torch.utils.data import Sampler, SequentialSampler

import poptorch  # noqa: F401 - which lets them


class Mixin:
    def __init__(self, size):
        self.size = size


class Both(Sampler, Mixin):
    def __init__(self):
        super().__init__(size=3)


class Old(Sampler):
    def __init__(self, source):
        super().__init__(source)
        self.source = source


def test_a_sampler_passes_its_source_or_none():
    assert Old([1, 2]).source == [1, 2]
    Sampler()
    Sampler(data_source=None)
    assert list(SequentialSampler([1, 2])) == [0, 1]


def test_other_arguments_are_refused_or_reach_the_next_class():
    with pytest.raises(TypeError, match="size"):
        Sampler(size=3)
    assert Both().size == 3
