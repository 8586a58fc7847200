"""Check PopTorch's for_loop and cond, as its programs write them."""

import pytest
import torch
from torch import nn

import poptorch

ONE = torch.ones(2)


def test_for_loop_runs_on_the_device_and_without_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x, y):
            def body(a, b):
                assert not traced or poptorch.isRunningOnIpu()
                a += 1
                return b, torch.tanh(self.fc(a)) + y

            traced = poptorch.isRunningOnIpu()
            return poptorch.for_loop(7, body, [x, y])

    model = Model()
    with torch.no_grad():
        expected = model(ONE, ONE * 2)
    results = poptorch.inferenceModel(model)(ONE, ONE * 2)
    assert isinstance(results, list)
    torch.testing.assert_close(results, expected)


def test_integers_are_carried_in_32_bits():
    count = torch.tensor([3, 4])
    results = poptorch.inferenceModel(
        lambda n: poptorch.for_loop(5, lambda a, b: (a + b, torch.argmax(a) + b), [n, n * 0])
    )(count)
    expected = poptorch.for_loop(5, lambda a, b: (a + b, torch.argmax(a) + b), [count, count * 0])
    assert [r.tolist() for r in results] == [e.tolist() for e in expected]


def test_loops_and_branches_in_each_other():
    def forward(c, x, y):
        def then():
            return poptorch.for_loop(2, lambda a: a * y, [x])[0]

        def otherwise(a):
            return poptorch.cond(a.sum() > 1, lambda: x - a, [], lambda b: b + y, [x])

        return poptorch.cond(c, then, [], otherwise, [y])

    model = poptorch.inferenceModel(forward)
    for c in (True, False):
        args = torch.tensor([c]), ONE * 3, ONE * 2
        torch.testing.assert_close(model(*args), forward(*args))


@pytest.mark.parametrize("name", ["for_loop", "cond"])
def test_training_is_refused(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            if name == "for_loop":
                (x,) = poptorch.for_loop(2, self.fc, [x])
            else:
                (x,) = poptorch.cond(x.sum() > 0, self.fc, [x], self.fc, [x])
            return poptorch.identity_loss(x, "sum")

    message = rf"poptorch\.{name}\(\) is only supported in inference\."
    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(Model())(ONE)


def test_inputs_are_lists_of_tensors():
    with pytest.raises(ValueError, match=r"\(Object is not list\)"):
        poptorch.for_loop(2, lambda a: a, ONE)
    with pytest.raises(ValueError, match=r"index 1 is not torch\.tensor"):
        poptorch.cond(ONE.sum() > 0, lambda a: a, [ONE, 1], lambda a: a, [ONE])


def test_other_shapes_are_refused_with_the_line():
    with pytest.raises(poptorch.Error, match="gets input 0 as") as error:
        poptorch.inferenceModel(
            lambda x: poptorch.for_loop(2, lambda a: torch.cat([a, a]), [x])[0]
        )(ONE)
    assert "test_loops.py" in str(error.value)


@pytest.mark.parametrize("count", [0, 2])
def test_results_that_no_input_has_are_refused_with_the_line(count):
    def forward(x):
        return poptorch.for_loop(2, lambda a: [a] * count, [x])

    with pytest.raises(poptorch.Error, match=f"returns {count} tensors, and gets 1") as error:
        poptorch.inferenceModel(forward)(ONE)
    assert "test_loops.py" in str(error.value)
    with pytest.raises(poptorch.Error, match=f"returns {count} tensors, and gets 1"):
        forward(ONE)
