"""Check which later calls fit a compiled program, and what is said of those that do not."""

import numpy as np
import pytest
import torch

from ipu_dynamo import InputError, Options, compile_inference

EAGER = Options("eager")


def test_order_of_keyword_arguments_does_not_matter():
    run = compile_inference(lambda a, b: a - b, EAGER)
    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert run(a=one, b=two) == run(b=two, a=one) == -1


def first_call(**changed):
    arguments = {"x": torch.ones(4, 2), "pair": [torch.ones(4), None], "k": 1} | changed
    return arguments


def test_array_of_numpy_is_refused_as_its_values_would_stay():
    run = compile_inference(lambda x, pair: torch.as_tensor(x) + pair[0], EAGER)
    array = np.ones(3)
    message = r"argument pair\[0\] is an array of numpy, of type float64\n  try:  .*from_numpy\(pa"
    with pytest.raises(InputError, match=message):
        run(torch.ones(3), [array])
    assert run(torch.ones(3), [torch.from_numpy(array)]).tolist() == [2, 2, 2]
    with pytest.raises(
        InputError, match=r"Type mismatch for x.*\n  try:  pass a tensor, as torch.as"
    ):
        run(array, [torch.ones(3)])


DIFFERENT = {
    "shape": ({"x": torch.ones(6, 2)}, r"Shape mismatch for x: expected torch.Size\(\[4, 2\]\)"),
    "width": ({"x": torch.ones(4, 3)}, "Shape mismatch for x"),
    "dtype": ({"x": torch.ones(4, 2).half()}, "Data type mismatch for x: expected torch.float32"),
    "value": ({"k": 2}, "Value mismatch for k: expected 1 but got 2"),
    "type of value": ({"k": 1.0}, "Value mismatch for k: expected 1 but got 1.0"),
    "bool": ({"k": True}, "Value mismatch for k: expected 1 but got True"),
    "tensor for value": ({"k": torch.ones(4)}, "Type mismatch for k: expected <class 'int'>"),
    "none for tensor": ({"x": None}, "differ in structure|Type mismatch for x"),
    "length": ({"pair": [torch.ones(4)]}, "differ in structure"),
    "container": ({"pair": (torch.ones(4), None)}, "differ in structure"),
    "nested": ({"pair": [torch.ones(5), None]}, r"Shape mismatch for pair\[0\]"),
}


@pytest.mark.parametrize(("changed", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_call_is_refused_and_the_next_one_works(changed, message):
    run = compile_inference(lambda x, pair, k: x.sum() + pair[0].sum() * k, Options("eager", 2))
    expected = run(**first_call())
    with pytest.raises(InputError, match=message) as caught:
        run(**first_call(**changed))
    assert "try:" in str(caught.value)
    assert torch.equal(run(**first_call()), expected)
