"""Check that the benchmark of loaders measures what it says."""

import pytest

from benchmarks.loader import MODES, Load, samples_of, step_of, with_step
from poptorch import SharingStrategy


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_with_steps_takes_at_least_its_steps(mode):
    load = Load(nbytes=4096, items=8, seconds=0.01)
    data = samples_of(load)
    assert len(data) == 32
    assert data[0].nbytes == 1024
    spent = with_step(data, 1, mode, SharingStrategy.Fork, step_of(load))
    assert 0.04 < spent < 20
