"""Check what the judge lets pass: what two right computations may differ in, and nothing else."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_dynamo.runtime.engines.check import judge as module
from ipu_dynamo.runtime.engines.check.checks import by_operators
from ipu_dynamo.runtime.engines.check.classes import Class, result_classes, why_unchecked
from ipu_dynamo.runtime.engines.check.copies import copies_of
from ipu_dynamo.runtime.engines.check.judge import (
    difference,
    is_uniform,
    judge,
    largest,
    slices_of,
    spread_of,
)
from ipu_dynamo.runtime.engines.check.runs import Runs
from tests.runtime.engines.check.small_functions import function_of

aten = torch.ops.aten


def failures(compute, inputs, change=lambda results: results, state=None):
    """What the judge says of the results of `compute` once `change` has changed them."""
    function = function_of(compute, *inputs)
    before = copies_of(inputs, function.written).tensors
    if state is not None:
        torch.set_rng_state(state)
    stage = by_operators(function)
    given = copies_of(before, function.written).tensors
    expected = [*stage(list(given)), *(given[i] for i in function.written)]
    made = change([r.clone() for r in expected])
    old = [before[i] for i in function.written]
    runs = Runs(function, before, state)
    verdict = judge(made, expected, result_classes(function), runs, old)
    return [failure.place for failure in verdict.failures], verdict


def changed(place, **by):
    def change(results: list[Tensor]) -> list[Tensor]:
        flat = results[place].view(-1)
        if "factor" in by:
            flat[0] *= by["factor"]
        else:
            flat[0] = by["value"]
        return results

    return change


X = torch.linspace(-2.0, 3.0, 12).view(3, 4)


def test_an_exact_result_has_the_same_bits():
    def compute(x):
        return (torch.cat([x.t(), x.t().relu()]),)

    assert failures(compute, [X])[0] == []
    assert failures(compute, [X], changed(0, factor=1 + 2**-22))[0] == [0]


def test_the_sign_of_zero_counts_but_behind_what_orders():
    zeros = torch.tensor([-0.0, 1.0])
    assert failures(lambda x: (x.clone(),), [zeros], changed(0, value=0.0))[0] == [0]
    assert failures(lambda x: (x.relu(),), [zeros], changed(0, value=0.0))[0] == []
    assert failures(lambda x: (x.relu(),), [zeros], changed(0, value=-0.0))[0] == []


def test_a_rounded_result_may_differ_by_units_in_the_last_place():
    def compute(x):
        return (x.exp() @ x.t().cos(),)

    assert failures(compute, [X], changed(0, factor=1 + 2**-22))[0] == []
    assert failures(compute, [X], changed(0, factor=1.001))[0] == [0]


def test_a_difference_of_near_numbers_may_be_as_far_off_as_roundings_move_it():
    def compute(x):
        return (((x + 1000.0) - x - 999.9999),)

    found, verdict = failures(compute, [X], changed(0, factor=1.5))
    assert found == []
    assert verdict.spreads[0] > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_measured_in_their_own_units(dtype):
    x = X.to(dtype)

    def compute(x):
        return (x.sin() * 3,)

    assert failures(compute, [x], changed(0, factor=1 + torch.finfo(dtype).eps))[0] == []
    assert failures(compute, [x], changed(0, factor=1.5))[0] == [0]


def test_another_type_or_shape_fails():
    assert failures(lambda x: (x > 0,), [X], lambda r: [r[0].byte()])[0] == [0]
    assert failures(lambda x: (x.sin(),), [X], lambda r: [r[0].double()])[0] == [0]
    assert failures(lambda x: (x.sin(),), [X], lambda r: [r[0][:2]])[0] == [0]


def test_whole_numbers_are_equal_unless_roundings_change_them():
    close = torch.tensor([1.0, 1.0 + 2**-23, 0.5])

    def compute(x):
        return ((x * 3.3).argmax(),)

    assert failures(compute, [X], changed(0, value=3))[0] == [0]
    assert failures(compute, [close], changed(0, value=0))[0] == []
    assert failures(lambda x: (x.argmax(),), [close], changed(0, value=0))[0] == [0]


def test_an_argument_that_is_not_written_fails():
    old = torch.ones(3)

    def compute(total, x):
        total.add_(x * 1e-3)
        return (x.sin(),)

    def unwritten(results):
        return [results[0], torch.ones(3)]

    assert failures(compute, [old, torch.ones(3)])[0] == []
    assert failures(compute, [old, torch.ones(3)], unwritten)[0] == [1]
    half = [old.half(), torch.full((3,), 5.0).half()]
    assert failures(compute, half, lambda r: [r[0], torch.ones(3).half()])[0] == [1]


def test_a_written_value_that_cancels_may_be_the_old_one():
    """Deviations from a mean sum to zero, but for roundings."""

    def compute(total, x):
        total.copy_((x - x.mean(0)).sum(0))
        return (x.sum(),)

    def cancelled(results):
        results[1].zero_()
        return results

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    total = torch.zeros(1, dtype=torch.float64)
    assert (x - x.mean(0)).sum(0) != 0
    assert failures(compute, [total, x], cancelled)[0] == []


def test_what_pytorch_leaves_open_is_not_compared():
    far = torch.tensor([1e20, 1.0])
    cast = [lambda x: (x.to(torch.int8),), [far], changed(0, value=7)]
    assert failures(*cast)[0] == []
    assert failures(cast[0], [far.clamp(0, 9)], cast[2])[0] == [0]
    twice, once = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1])

    def scatter(x, i):
        return (torch.zeros(3).index_put((i,), x),)

    x = torch.tensor([5.0, 6.0, 7.0])
    assert failures(scatter, [x, twice], changed(0, value=5.0))[0] == []
    assert failures(scatter, [x, once], changed(0, value=5.0))[0] == [0]
    ties = torch.tensor([1.0, 1.0, 0.0])
    assert failures(lambda x: tuple(x.topk(2)), [ties], changed(1, value=1))[0] == []
    assert failures(lambda x: tuple(x.topk(2)), [x], changed(1, value=1))[0] == [1]


def test_a_draw_is_the_same_in_all_runs():
    state = torch.get_rng_state()

    def compute(x):
        dropped = torch.dropout(x, 0.5, True)
        return dropped + 3, (dropped.sum() - dropped[1:].sum() - dropped[0].sum()) * 1e6

    found, _ = failures(compute, [X], changed(0, value=3.01), state)
    assert found == [0]
    assert failures(compute, [X], changed(1, value=0.5), state)[0] == []


def test_equal_kinds_of_numbers_that_are_not_finite_pass():
    x = torch.tensor([0.0, 1.0, -1.0])

    def compute(x):
        return (x.log(),)

    assert failures(compute, [x], changed(0, value=-torch.inf))[0] == []
    assert failures(compute, [x], changed(0, value=torch.inf))[0] == [0]
    assert failures(compute, [x], changed(0, value=0.0))[0] == [0]


def test_results_of_one_value_are_open():
    _, verdict = failures(lambda x: (x * 0, x.sum(), x > 9, torch.ones(3)), [X])
    assert verdict.open == {0, 2}


def test_functions_with_effects_are_not_checked():
    def compute(x):
        return (torch.ops.ipu.print_tensor(x, "x"),)

    graph = function_of(lambda x: (x.sin(),), X).graph.graph
    assert not why_unchecked(graph)


def test_a_result_that_the_first_moved_run_explains_takes_no_further_one(monkeypatch):
    numbers, moved = [], Runs.moved

    def counted(runs, number, places):
        numbers.append(number)
        return moved(runs, number, places)

    monkeypatch.setattr(Runs, "moved", counted)

    def compute(x):
        return (((x + 1000) - 1000) * 1000,)

    assert failures(compute, [X], changed(0, factor=1 + 1e-4))[0] == []
    assert numbers == [0]
    assert failures(compute, [X], changed(0, factor=1.5))[0] == [0]
    assert numbers == [0, *range(16)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_quick_comparison_agrees_with_the_whole_one(dtype, monkeypatch):
    of, quick, more = Class(rounded=True), [], []
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for exponent in range(-4, 9):
        right = torch.randn(40, generator=generator, dtype=torch.float64).to(dtype)
        noise = torch.randn(40, generator=generator, dtype=torch.float64)
        made = (right.double() + noise * torch.finfo(dtype).eps * 2.0**exponent).to(dtype)
        pairs += [(made, right), (made.clone().fill_(torch.nan), right), (made, right / 0)]
    for made, right in pairs:
        quick.append(bool(difference(made, right, of)))
    monkeypatch.setattr(module, "_surely_near", lambda *arguments: False)
    for made, right in pairs:
        more.append(bool(difference(made, right, of)))
    assert quick == more
    assert {*quick} == {True, False}


class Largest(TorchDispatchMode):
    """Note how many elements the largest new tensor has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not operator.is_view:
            self.elements = max(self.elements, made.numel())
        return made


def test_a_large_result_is_compared_in_parts():
    right = torch.linspace(-2.0, 3.0, 300_000).view(3, 100_000)
    made, moved = right.clone(), right.clone()
    made[2, 77_000:77_005] += 0.5
    moved[1, 5] += 0.01
    spread = spread_of(right, moved)
    with Largest() as seen:
        assert not is_uniform(right)
        assert largest(right) == 3.0
        assert spread_of(right, made, spread).distance == pytest.approx(0.5)
        assert difference(made, right, Class(), spread).startswith(
            "5 of 300000 elements differ: [2"
        )
        problem = difference(made, right, Class(rounded=True), spread)
    assert problem.startswith("5 of 300000 elements differ: [2, 77000] is ")
    assert seen.elements < 100_000
    assert is_uniform(torch.ones(300_000))
    assert not is_uniform(torch.arange(300_000) // 299_999)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (1, 1, 20), (20, 1), (2, 9, 3), (5, 4)])
@pytest.mark.parametrize("elements", [1, 4, 100])
def test_slices_hold_all_elements_in_order(shape, elements, monkeypatch):
    monkeypatch.setattr(module, "_ELEMENTS", elements)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    y = torch.stack([x, -x], -1)[..., 1]  # lies otherwise
    parts = list(slices_of(x, y))
    assert all(one.numel() <= elements for one, _ in parts)
    assert torch.equal(torch.cat([one.flatten() for one, _ in parts]), x.flatten())
    assert all(torch.equal(one, -other) for one, other in parts)


def test_results_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        list(slices_of(torch.ones(3), torch.ones(1)))
