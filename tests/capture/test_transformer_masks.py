"""Check that masks of `nn.Transformer` are applied, and not looked at, when a model is traced."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Options, compile_inference, compile_training
from ipu_dynamo.capture.private.tracing import masks_unread

LENGTH, WIDTH = 5, 16
SIZES = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}


class Encoder(nn.Module):
    def __init__(self, *, causal):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask if causal else mask.flip(0))

    def forward(self, x, padding):
        return self.layers(x, self.mask, padding)


class Translator(nn.Module):
    def __init__(self, *, causal):
        super().__init__()
        self.whole = nn.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1)
        self.causal = causal

    def forward(self, x, padding):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        mask = mask if self.causal else mask.flip(0)
        return self.whole(x, x.flip(1), tgt_mask=mask, tgt_key_padding_mask=padding)


def data():
    torch.manual_seed(1)
    padding = torch.zeros(3, LENGTH).masked_fill(torch.arange(LENGTH) == 2, -torch.inf)
    return torch.randn(3, LENGTH, WIDTH), padding


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Encoder, Translator])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_are_applied(kind, causal, engine):
    torch.manual_seed(0)
    model = kind(causal=causal)
    for given in data(), (data()[0], None):
        expected = model(*given)
        found = compile_inference(copy.deepcopy(model).train(), Options(engine))(*given)
        torch.testing.assert_close(found, expected)


def test_training_agrees_with_pytorch():
    torch.manual_seed(0)
    model = Encoder(causal=True)
    own = copy.deepcopy(model)
    (x, padding), target = data(), torch.randn(3, LENGTH, WIDTH)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = own

        def forward(self, x, padding, target):
            return F.mse_loss(self.model(x, padding), target)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile_training(
        WithLoss(), torch.optim.SGD(own.parameters(), lr=0.1), Options("eager")
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, padding), target)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(compiled(x, padding, target).sum(), loss.detach())
    for found, expected in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_given_hint_is_kept():
    with masks_unread():
        detect = nn.modules.transformer._detect_is_causal_mask
        assert [detect(torch.ones(2, 2), hint) for hint in (None, False, True)] == [
            False,
            False,
            True,
        ]
    assert nn.modules.transformer._detect_is_causal_mask is not detect
