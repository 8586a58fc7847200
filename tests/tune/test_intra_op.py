"""Check that a number of intra-op threads holds for a while, and is put back."""

import pytest
import torch

from ipu_dynamo.tune.intra_op import intra_op_threads


@pytest.fixture(autouse=True)
def three_threads():
    with intra_op_threads(3):
        yield
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("number", "found"), [(None, 3), (3, 3), (2, 2), (1, 1)])
def test_none_is_the_number_of_torch(number, found):
    with intra_op_threads(number):
        assert torch.get_num_threads() == found


def test_the_number_is_put_back_after_an_error():
    with pytest.raises(ValueError, match="inside"), intra_op_threads(1):
        raise ValueError("inside")
    assert torch.get_num_threads() == 3


def test_an_interrupt_while_it_is_set_puts_it_back(monkeypatch):
    change = torch.set_num_threads

    def interrupted(number):
        change(number)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    with pytest.raises(KeyboardInterrupt), intra_op_threads(1):
        pass
    assert torch.get_num_threads() == 3
