"""Check what the benchmark of half precision says about numbers."""

import pytest

from benchmarks.training import RATIO, distances


@pytest.mark.slow
@pytest.mark.inductor
def test_training_in_float16_is_as_exact_as_eagers():
    assert distances(steps=50)[RATIO] <= 1.05
