"""Check that one sweep over rows gives the loss and the gradients of the two loops."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import (
    BeginBlock,
    Options,
    Strategy,
    compile_training,
    identity_loss,
    serialized_matmul,
)
from ipu_dynamo.ops.serialized_loss import (
    serialized_loss,
    serialized_loss_backward_,
    serialized_loss_step_,
)
from ipu_dynamo.passes.host.functions import fuse_loss
from ipu_dynamo.testing import assert_close, assert_same_training
from tests.models_of_heads import Head
from tests.passes.joint.test_serialize_loss import EAGER, LOOPS, data, heads
from tests.properties.running import ENGINES

ROWS, WIDTH, CLASSES = 512, 4, 12


def rows_of(seed=0):
    """Many tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(2))


def operators(step):
    functions = step.executable.host_program.inlined.functions
    return [node for function in functions for node in function.operators]


def targets_of(step):
    return [node.target for node in operators(step)]


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
@given(
    settings=heads(),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 2),
    loss_scale=st.sampled_from([1.0, 8.0]),
)
def test_trains_as_plain_pytorch(engine, settings, accumulation, replicas, loss_scale):
    """With blocks of any size: of one row, too."""
    torch.manual_seed(0)
    options = Options(
        engine=engine,
        gradient_accumulation=accumulation,
        replicas=replicas,
        loss_scale=loss_scale,
    )
    calls = [data(accumulation * replicas, seed) for seed in range(2)]
    model = Head(**{**settings, "factor": min(settings["factor"], 6)}).double()
    loss = (lambda value: value.sum()) if settings["reduction"] == "none" else None
    with mock.patch.object(fuse_loss, "ROWS_OF_A_BLOCK", 1):
        step = assert_same_training(model, calls, options, loss=loss, rtol=1e-8, atol=1e-7)
    targets = targets_of(step)
    assert (serialized_loss_step_ in targets) is (serialized_loss_backward_ not in targets)
    if settings["tied"] or settings["padding"] is None:
        assert serialized_loss_step_ in targets


@pytest.mark.parametrize(
    ("mode", "factor", "blocks"),
    [
        ("input_channels", 4, 4),
        ("input_channels", 8, 4),  # of 128 rows each, and not of 64
        ("input_channels", 512, 4),
        ("output_channels", 4, 4),
        ("output_channels", 2, 2),
        ("output_channels", 8, None),  # an eighth of the logits is what was asked for
    ],
)
def test_blocks_have_enough_rows(mode, factor, blocks):
    model = Head(mode, factor)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    step.compile(*rows_of())
    sweeps = [node for node in operators(step) if node.target is serialized_loss_step_]
    assert [node.args[6] for node in sweeps] == ([blocks] if blocks else [])
    assert (serialized_loss in targets_of(step)) is not bool(blocks)


@pytest.mark.parametrize("keep_precision", [False, True])
def test_half_precision_is_that_of_the_loops(keep_precision):
    torch.manual_seed(0)
    heads = [Head(mode, 4, keep_precision=keep_precision).half() for mode in ("none", LOOPS[0])]
    heads[1].load_state_dict(heads[0].state_dict())
    losses = []
    for model in heads:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = compile_training(model, optimizer, EAGER)
        losses.append(step(*rows_of()))
    assert serialized_loss_step_ in targets_of(step)
    assert_close(losses[1], losses[0], rtol=2e-3)
    for name, parameter in heads[0].named_parameters():
        ours = heads[1].get_parameter(name).detach()
        assert_close(ours, parameter.detach(), name, rtol=5e-3, atol=2e-3)


def test_a_gradient_that_depends_on_the_loss_waits_for_it():
    class Squared(Head):
        def forward(self, tokens, targets):
            return identity_loss(super().forward(tokens, targets).square(), "sum")

    model = Squared("input_channels", 4).double()
    step = assert_same_training(model, [rows_of(), rows_of(1)], EAGER, rtol=1e-9, atol=1e-9)
    targets = targets_of(step)
    assert serialized_loss_step_ not in targets
    assert serialized_loss_backward_ in targets


def test_a_gradient_made_from_an_input_is_known_before():
    class Weighted(Head):
        def forward(self, tokens, targets):
            loss = super().forward(tokens, targets)
            return identity_loss(loss * (1 + tokens.sum().tanh()), "sum")

    model = Weighted("input_channels", 4).double()
    step = assert_same_training(model, [rows_of(), rows_of(1)], EAGER, rtol=1e-9, atol=1e-9)
    assert serialized_loss_step_ in targets_of(step)


@pytest.mark.parametrize(
    ("joined", "sweeps"),
    [
        (lambda a, b: a * b, 1),  # each is the gradient of the other
        (lambda a, b: b * a.detach() + a, 2),
        (lambda a, b: a * b.detach() + b, 2),
        (lambda a, b: a + b, 2),
        (lambda a, b: (a + b).square(), 0),
    ],
)
def test_two_losses_that_wait_for_each_other(joined, sweeps):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.v, self.w = (torch.nn.Parameter(torch.randn(WIDTH, CLASSES)) for _ in range(2))

        def forward(self, x, targets):
            losses = [
                torch.nn.functional.cross_entropy(
                    serialized_matmul(x, weight, "input_channels", 4), targets
                )
                for weight in (self.v, self.w)
            ]
            return identity_loss(joined(*losses), "sum")

    calls = [(torch.randn(ROWS, WIDTH).double(), rows_of()[1]) for _ in range(2)]
    step = assert_same_training(Two().double(), calls, EAGER, rtol=1e-9, atol=1e-9)
    assert targets_of(step).count(serialized_loss_step_) == sweeps


def test_a_pipeline_without_bubbles_trains_as_plain_pytorch():
    torch.manual_seed(0)
    model = Head("input_channels", 4, tied=False).double()
    BeginBlock(model.layer, ipu_id=1)
    strategy = Strategy(kind="pipelined", schedule="zero_bubble")
    options = Options(engine="eager", gradient_accumulation=4, strategy=strategy)
    calls = [tuple(torch.cat([t] * 4) for t in rows_of(seed)) for seed in range(2)]
    step = assert_same_training(model, calls, options, rtol=1e-9, atol=1e-9)
    assert step.program.num_stages == 2
    assert serialized_loss_step_ in targets_of(step)


@pytest.mark.parametrize("value", [60.0, 1e4])
@pytest.mark.parametrize("rows", [1, 512])
def test_large_logits_train_as_plain_pytorch(value, rows):
    """Their softmax has subnormal shares, which count as 0, and its exponentials overflow."""

    class Large(torch.nn.Module):
        def __init__(self, mode):
            super().__init__()
            torch.manual_seed(0)
            self.mode, self.w = mode, torch.nn.Parameter(torch.randn(WIDTH, CLASSES) * value)

        def forward(self, x, targets):
            logits = serialized_matmul(x, self.w, self.mode, 4)
            return torch.nn.functional.cross_entropy(logits, targets)

    x, targets = torch.randn(ROWS, WIDTH), rows_of()[1]
    with mock.patch.object(fuse_loss, "ROWS_OF_A_BLOCK", rows):
        for mode in LOOPS:
            assert_same_training(Large(mode), [(x, targets)], EAGER)
