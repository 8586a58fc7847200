"""Check that results which are all rounding pass in any order of sums, and that faults do not."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_dynamo.ops.private.native import decomposition_of
from ipu_dynamo.runtime.engines.check.checks import by_operators
from ipu_dynamo.runtime.engines.check.classes import operator_name, result_classes
from ipu_dynamo.runtime.engines.check.copies import copies_of
from ipu_dynamo.runtime.engines.check.judge import judge
from ipu_dynamo.runtime.engines.check.runs import Runs, evaluator
from tests.runtime.engines.check.cancelling_models import Drawn
from tests.runtime.engines.check.small_functions import function_of
from tests.runtime.engines.check.test_planted_faults import functions_of, plant

NORMS = {
    *("_native_batch_norm_legit_functional", "native_batch_norm_backward", "native_layer_norm"),
    *("native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("_softmax", "_softmax_backward_data"),
}


class OneByOne(TorchDispatchMode):
    """Computes norms as sums, and each sum one term after the other, 4096 of them at a time."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, kwargs = operator_name(operator), kwargs or {}
        if name in NORMS:
            with self:
                return decomposition_of(operator)(*args, **kwargs)
        made = operator(*args, **kwargs)
        if name == "sum":
            made.copy_(one_by_one(args[0], args[1] if args[1:] else ()).view(made.shape))
        if name == "convolution_backward" and made[2] is not None:
            made[2].copy_(one_by_one(args[0], (0, *range(2, args[0].dim()))))
        return made


def one_by_one(x, dims):
    """The sum over some dims, or all."""
    summed = [d % x.dim() for d in dims] or [*range(x.dim())]
    kept = [d for d in range(x.dim()) if d not in summed]
    rows = x.permute(*kept, *summed).reshape(-1, np.prod([x.shape[d] for d in summed], dtype=int))
    parts = [np.cumsum(part.numpy(), 1)[:, -1] for part in rows.split(4096, 1)]
    return torch.from_numpy(np.cumsum(np.stack(parts, 1), 1)[:, -1])


def in_another_order(function, arguments):
    """Results and written arguments of a function, by a computation as a compiler makes."""
    given = copies_of(arguments, function.written).tensors
    with OneByOne():
        results = evaluator(function.graph.graph, lambda node, call, a, k: call(*a, **k))([*given])
    return [*results, *(given[place] for place in function.written)]


def failures(function, arguments, state=None):
    """The places whose results the judge refuses if sums have another order."""
    given = copies_of(arguments, function.written).tensors
    expected = [*by_operators(function)([*given]), *(given[place] for place in function.written)]
    made = in_another_order(function, arguments)
    old = [arguments[place] for place in function.written]
    runs, classes = Runs(function, arguments, state), result_classes(function)
    return [failure.problem for failure in judge(made, expected, classes, runs, old).failures]


def bias_before_a_norm(gradient, x, weight, mean, scale):
    """The gradient of a bias before a batch norm: deviations from a mean, summed."""
    back = torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, None, None, mean, scale, True, 1e-5, [True, True, True]
    )
    return back[0].sum((0, 2, 3)), back[1]


def inputs_of_a_norm(images, edge):
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, images, 4, edge, edge, generator=generator)
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return gradient + 1, x, torch.ones(4), mean, (variance + 1e-5).rsqrt()


def test_the_gradient_of_a_bias_before_a_norm_is_all_rounding():
    inputs = inputs_of_a_norm(4, 32)
    function = function_of(bias_before_a_norm, *inputs)
    (noise, right), (other, _) = (
        by_operators(function)([*inputs]),
        in_another_order(function, inputs),
    )
    assert (noise - other).abs().max() > noise.abs().max() / 2
    assert right.abs().max() > 1e4 * other.abs().max()
    assert failures(function, inputs) == []


@pytest.mark.parametrize("lost", ["mean", "element"])
def test_a_term_that_is_lost_is_found(lost):
    """Both give a sum that is some thousand times its rounding."""
    gradient, *more = inputs_of_a_norm(4, 32)
    function = function_of(bias_before_a_norm, gradient, *more)
    right = [*by_operators(function)([gradient, *more])]
    wrong = right[0].clone()
    wrong[2] += 1.0 if lost == "element" else gradient[:, 2].sum() / 100
    runs = Runs(function, [gradient, *more], None)
    verdict = judge([wrong, right[1]], right, result_classes(function), runs)
    assert [failure.place for failure in verdict.failures] == [0]


FAST = (0, 2, 3, 5)  # without the sizes of terms, these are refused; views in 5 need layouts
NUMBERS = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in range(40)]


@pytest.mark.parametrize("number", NUMBERS)
def test_models_with_sums_in_another_order_pass(number):
    for function, arguments, state in functions_of(Drawn(number, most=4), {"FuseStep": False}):
        assert failures(function, arguments, state) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_faults_in_models_with_sums_that_cancel_are_found(number):
    counts = Counter()
    for function, arguments, state in functions_of(Drawn(number, most=4), {"FuseStep": False}):
        plant(function, arguments, state, counts)
    assert counts["planted"] > 10
