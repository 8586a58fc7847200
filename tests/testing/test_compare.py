"""Check that the comparisons see what differs, say it clearly, and accept what must be accepted."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import InputError, Options, identity_loss
from ipu_dynamo.testing import (
    Recipe,
    Step,
    assert_close,
    assert_same_bits,
    assert_same_inference,
    assert_same_training,
    with_enough_digits,
)

EAGER = {"engine": "eager"}


class Classifier(nn.Module):
    """Return logits and loss; `lie` changes one number unless it is trained in plain PyTorch."""

    def __init__(self, lie=""):
        super().__init__()
        self.fc, self.norm, self.lie = nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2), lie

    def forward(self, x, labels, seen=None):
        lies = torch.compiler.is_compiling()  # a trace of ours says so
        logits = self.norm(self.fc(x))
        if self.lie == "output" and lies:
            logits = logits + 1
        loss = F.cross_entropy(logits, labels)
        if self.lie == "gradient" and lies:
            loss = identity_loss(loss + self.fc.weight[1, 2] - self.fc.weight[1, 2].detach(), "sum")
        if self.lie == "buffer" and lies:
            self.norm.num_batches_tracked.add_(1)
        if self.lie == "input" and lies:
            seen.add_(1)
        return logits, loss


def batch(rows=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    return x, torch.randint(2, (rows,), generator=generator)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("output", r"call 0, returned value \[0\]: max \|difference\| 1 > .* expected"),
        (
            "buffer",
            r"call 0, model \['buffer norm.num_batches_tracked'\]: .* at \[\]: 2, expected 1",
        ),
        ("input", r"call 0, argument \[0\]\[2\]: 8 of 8 elements; at \[0\]: 1, expected 0"),
        ("gradient", r"call 0, model \['parameter fc.weight'\]: .* at \[1, 2\]: "),
    ],
)
def test_a_difference_is_named(lie, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_training(
            Classifier(lie), [(*batch(), torch.zeros(8, dtype=torch.int64))], EAGER
        )


def test_a_wrong_gradient_shows_in_the_momentum_although_the_weights_agree():
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)

    message = r"call 0, optimizer \['momentum_buffer of fc.weight'\]: .* at \[1, 2\]: "
    with pytest.raises(AssertionError, match=message):
        assert_same_training(Classifier("gradient"), [batch()], EAGER, optimizer=optimizer)


def test_inference_differences_are_named():
    with pytest.raises(AssertionError, match=r"call 0, returned value \[0\]"):
        assert_same_inference(Classifier("output"), [batch()], EAGER)


def test_the_call_that_differs_is_named():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            late = self.calls > 2 if torch.compiler.is_compiling() else self.calls < 0
            return x + late

    with pytest.raises(AssertionError, match="call 2, returned value"):
        assert_same_inference(Late(), [torch.zeros(1)], EAGER, steps=5)


@pytest.mark.parametrize("output_mode", ["all", "final", "sum", "every", "default"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_correct_model_passes(output_mode, reduction):
    options = Options(
        engine="eager",
        device_iterations=4,
        gradient_accumulation=2,
        replicas=2,
        output_mode=output_mode,
        return_period=2 if output_mode == "every" else 1,
        reduction=reduction,
    )
    model, before = Classifier(), {}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled = assert_same_training(model, [batch(64)], options, steps=2)
    assert compiled.program.replicas == 2
    assert_same_bits(dict(model.state_dict()), before)
    assert_same_inference(model.eval(), [batch(64)], options, steps=2)


@pytest.mark.parametrize("as_keywords", [False, True])
def test_calls_are_given_as_sequences_or_mappings(as_keywords):
    x, labels = batch()
    call = {"x": x, "labels": labels} if as_keywords else [x, labels]
    assert_same_training(Classifier(), [call], EAGER)


def test_an_optimizer_of_groups_is_followed():
    def adam(model):
        groups = [{"params": model.fc.parameters()}, {"params": model.norm.parameters(), "lr": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)

    assert_same_training(Classifier(), [batch(), batch()], EAGER, optimizer=adam)


def test_the_loss_must_be_known():
    class TwoLosses(Classifier):
        def forward(self, x, labels):
            logits, loss = super().forward(x, labels)
            return loss, logits.mean()

    with pytest.raises(InputError, match=r"2 differentiable tensors of one element"):
        assert_same_training(TwoLosses(), [batch()], EAGER)
    assert_same_training(TwoLosses(), [batch()], EAGER, loss=0)
    assert_same_training(TwoLosses(), [batch()], EAGER, loss=lambda returned: returned[0])


def test_rows_must_divide():
    with pytest.raises(InputError, match="7 rows"):
        assert_same_inference(Classifier(), [batch(7)], {**EAGER, "device_iterations": 2})


def test_close_is_relative_to_the_largest_value():
    expected = torch.tensor([1000.0, 0.0])
    assert_close(expected + 0.009, expected)
    with pytest.raises(AssertionError, match=r"1 of 2 elements; at \[1\]: 0.0199.*expected 0.0"):
        assert_close(expected + torch.tensor([0.0, 0.02]), expected)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.ones(2), torch.ones(1, 2), r"weights: shape \[2\], expected \[1, 2\]"),
        (torch.ones(2), torch.ones(2).double(), "weights: torch.float32, expected torch.float64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"1 of 2 elements; at \[1\]: 2, expected 3"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "difference.* inf > "),
        ({"a": 1}, {"a": 2}, r"weights \['a'\]: 1, expected 2"),
        ({"a": 1}, {"b": 1}, "weights: structure"),
        ({"a": 1}, {"a": 1.0}, r"weights \['a'\]: 1, expected 1.0"),
    ],
)
def test_other_differences_are_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, "weights")


def test_equal_special_values_agree():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert_close({"a": [special, torch.zeros(0, 3)]}, {"a": [special.clone(), torch.zeros(0, 3)]})
    assert_same_bits(special, special.clone())


def test_bits_distinguish_zeros_and_neighbours():
    zero = torch.zeros(2, 1)
    with pytest.raises(AssertionError, match=r"2 of 2 elements; at \[0, 0\]: 0.0, expected -0.0"):
        assert_same_bits(zero, -zero)
    one = torch.ones(3).double()
    after = torch.nextafter(one, one + 1)
    with pytest.raises(AssertionError, match="3 of 3 elements"):
        assert_same_bits(one, after)
    assert_same_bits(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())


def test_an_lstm_whose_result_changes_in_place_does_not_run_in_float64():
    """Why `recipes` asks in both: what is drawn in float32 may be compared in float64."""
    steps = (Step("lstm"), Step("change", x=1), Step("linear", x=1))
    recipe = Recipe(steps, width=1, strided=True)
    assert not replace(recipe, dtype=torch.float64).runs()


def test_a_recipe_whose_gradients_cancel_gets_more_digits():
    """The bias of attention's key has no gradient but the rounding of its terms."""
    steps = (*(Step("linear") for _ in range(4)), Step("lstm", x=1, y=1), Step("attention", y=1))
    recipe = Recipe(steps, width=3, losses=("squares",))

    def gradients(one):
        model = one.build()
        model(*one.data(1))["loss"].backward()
        return [parameter.grad for parameter in model.parameters()]

    assert with_enough_digits(recipe, gradients).dtype == torch.float64
    steady = Recipe(steps[:2], width=3, losses=("squares",))
    assert with_enough_digits(steady, gradients) == steady
