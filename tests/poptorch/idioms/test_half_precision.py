"""Train a language model in half precision with a loss scale, beside float32."""

import copy

import pytest
import torch
from torch import nn

import poptorch

STEPS, ACCUMULATION, TOKENS, VOCABULARY = 6, 8, 6, 20


class Language(nn.Module):
    """Two layers on two IPUs; the head has the table's weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=self.norm.weight.dtype)
        with poptorch.Block("embedding", ipu_id=0):
            x = self.table(tokens)
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"layer {number}", ipu_id=number):
                x = layer(x, src_mask=mask)
        with poptorch.Block("head", ipu_id=0):
            scores = self.head(self.norm(x)).float()
            return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches():
    drawn = torch.Generator().manual_seed(5)
    shape = (ACCUMULATION, TOKENS)
    return [
        tuple(torch.randint(VOCABULARY, shape, generator=drawn) for _ in range(2))
        for _ in range(STEPS)
    ]


def plain(model):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5), []
    for tokens, targets in batches():
        optimizer.zero_grad()
        for x, y in zip(tokens.chunk(ACCUMULATION), targets.chunk(ACCUMULATION), strict=True):
            loss = model(x, y)
            (loss / ACCUMULATION).backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


@pytest.mark.few(1)
@pytest.mark.parametrize("scaling", ["fixed", "raised", "automatic"])
def test_half_follows_float32(scaling):
    torch.manual_seed(0)
    expected = Language()
    before, model = copy.deepcopy(expected), copy.deepcopy(expected).half()
    losses = plain(expected)
    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    options.Training.setAutomaticLossScaling(scaling == "automatic")
    options.Precision.setPartialsType(torch.float32)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    optimizer = poptorch.optim.AdamW(
        model.parameters(),
        lr=2e-3,
        eps=1e-5,
        loss_scaling=256.0,
        accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
        second_order_momentum_accum_type=torch.float32,
    )
    training = poptorch.trainingModel(model, options, optimizer)
    on_device = []
    for number, (tokens, targets) in enumerate(batches()):
        if scaling == "raised" and number == 3:
            optimizer.loss_scaling = 1024.0
            training.setOptimizer(optimizer)
        on_device.append(training(tokens, targets))
    training.detachFromDevice()
    assert all(loss.dtype == torch.float32 for loss in on_device)
    torch.testing.assert_close(on_device, losses, rtol=2e-2, atol=2e-2)
    assert model.table.weight is model.head.weight
    moved = [name for name, tensor in model.named_parameters() if tensor.dtype != torch.float16]
    assert moved == []
    start, end, here = (
        nn.utils.parameters_to_vector(net.parameters()).detach()
        for net in (before, expected, model)
    )
    assert (here.float() - end).norm() < 0.15 * (end - start).norm()


@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "kdim": 5, "vdim": 7}])
def test_attention_casts_its_weights_to_half_inputs(arguments):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True, **arguments)
    widths = 6, arguments.get("kdim", 6), arguments.get("vdim", 6)
    inputs = [torch.randn(3, 4, width).half() for width in widths]
    expected, _ = copy.deepcopy(attention).half()(*inputs)
    found, _ = poptorch.inferenceModel(attention)(*inputs)
    torch.testing.assert_close(found, expected.detach())


def test_attention_with_half_inputs_trains_weights_in_float32():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x):
            return poptorch.identity_loss(self.attention(x, x, x)[0].float().square(), "sum")

    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4, 6)
    plain = copy.deepcopy(model)
    plain(x).backward()
    before = model.attention.in_proj_weight.detach().clone()
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))(x.half())
    change = before - model.attention.in_proj_weight.detach()
    assert change.dtype == torch.float32
    torch.testing.assert_close(change, plain.attention.in_proj_weight.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "operator",
    [
        lambda x: nn.functional.avg_pool3d(x, 2),
        lambda x: torch.cdist(x, x.flip(-2), p=1),
        lambda x: nn.functional.pdist(x[0, 0, 0], p=3),
    ],
)
def test_operators_without_a_kernel_on_halves_run(operator, training):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = operator(x * self.scale)
            return y, poptorch.identity_loss(y, "mean")

    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 4, 4).half()
    plain, model = Scaled(), Scaled().half()
    y, loss = plain(x.float())
    if training:
        loss.backward()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
        found = poptorch.trainingModel(model, None, optimizer)(x)[0]
        expected = 1 - plain.scale.grad
        torch.testing.assert_close(model.scale.float(), expected, rtol=1e-2, atol=1e-2)
    else:
        found = poptorch.inferenceModel(model)(x)[0]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), y, rtol=1e-2, atol=1e-2)
