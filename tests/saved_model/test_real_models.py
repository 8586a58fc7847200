"""Check programs of models as users have them: transformers, and a residual net."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from ipu_dynamo.saved_model import load, save

BATCH, TOKENS = Dim("batch", min=2, max=64), Dim("tokens", min=2, max=32)


class Residual(nn.Module):
    """A small ResNet: a stem, two blocks, a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    @staticmethod
    def convolution(channels, stride):
        layer = nn.Conv2d(channels, 8, 3, stride, 1)
        return nn.Sequential(layer, nn.BatchNorm2d(8), nn.ReLU(inplace=True))

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def bert():
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(0, 50, (3, 6)),
        "attention_mask": torch.ones(3, 6, dtype=torch.int64),
    }
    return BertModel(config), inputs, {key: {0: BATCH, 1: TOKENS} for key in inputs}


def vit():
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return (
        ViTModel(config),
        {"pixel_values": torch.randn(3, 3, 16, 16)},
        {"pixel_values": {0: BATCH}},
    )


def residual():
    return Residual(), {"image": torch.randn(3, 3, 16, 16)}, {"image": {0: BATCH}}


@pytest.mark.few(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("build", [bert, vit, residual])
def test_what_is_loaded_computes_the_same(tmp_path, build, dynamic):
    torch.manual_seed(0)
    model, inputs, shapes = build()
    model.eval()
    save(tmp_path / "p", {"s": (model, (), inputs, shapes if dynamic else None)})
    with load(tmp_path / "p")["s"] as signature:
        assert list(signature.inputs) == list(inputs)
        if dynamic:
            inputs = {name: torch.cat([value, value]) for name, value in inputs.items()}
        results = signature(**inputs)
        with torch.no_grad():
            expected = model(**inputs)
        expected = dict(expected) if isinstance(expected, dict) else {"output_0": expected}
        assert list(results) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=0, atol=1e-5)
        names = [group.name for group in signature.groups()]
        assert len(set(names)) == len(names)


def test_nodes_of_bert_are_named_by_its_layers(tmp_path):
    model, inputs, _ = bert()
    save(tmp_path / "p", {"s": (model.eval(), (), inputs, None)})
    names = {group.name for group in load(tmp_path / "p")["s"].groups()}
    layer = "encoder/layer/1"
    assert {f"{layer}/attention/self/query/linear", f"{layer}/intermediate/dense/weight"} <= names
