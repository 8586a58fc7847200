"""Check that programs run on any number of rows where rows are independent, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    CompileError,
    InputError,
    compile_inference,
    compile_training,
    free_rows,
)

EAGER = {"engine": "eager"}


def leaves(results):
    return [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def assert_free(model, *inputs, **options):
    """Calls with fewer and more rows than it was compiled for give what plain PyTorch gives."""
    compiled = compile_inference(model, {**EAGER, **options})
    compiled(*inputs)
    run = free_rows(compiled)
    for rows in (1, inputs[0].shape[0], 7):
        taken = [x[torch.randint(0, x.shape[0], (rows,))] for x in inputs]
        with torch.no_grad():
            expected = leaves(model(*taken))
        torch.testing.assert_close(leaves(run(*taken)), expected, atol=1e-5, rtol=1e-4)
    return run


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 2),
    ).eval()  # fmt: skip


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(6, 4, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


def blocks():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), BeginBlock(nn.Linear(5, 2), "b", 1))


@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (4, 6), {}),
        (blocks(), (6, 6), {"device_iterations": 3}),
        (blocks(), (12, 6), {"device_iterations": 3, "replicas": 2}),
        (convolutions(), (3, 2, 6, 6), {}),
        (encoder(), (3, 5, 8), {}),
        (Recurrent(), (4, 3, 6), {}),
        (lambda x: (x.argmax(1), {"top": x.topk(2, 1).values}, None, 3), (4, 6), {}),
        (lambda x: x.reshape(-1, 3) * 2, (4, 2, 3), {}),  # two rows for each
        (lambda x: torch.cat([x, torch.ones(x.shape[0], 2)], 1), (4, 6), {}),
        (lambda x: x + torch.arange(6.0).expand(x.shape[0], 6), (4, 6), {}),
        (lambda x: x[torch.arange(x.shape[0]), (x[:, 0] > 0).long()], (4, 6), {}),
        (lambda x: torch.eye(3)[(x[:, 0] > 0).long()], (4, 6), {}),
    ],
)
def test_rows_are_free(model, shape, options):
    assert_free(model, torch.randn(shape), **options)


def test_language_models_have_free_rows():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 20}
    bert = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8)
    gpt = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8,
                                  bos_token_id=0, eos_token_id=0)  # fmt: skip
    gpt.use_cache = False
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    tokens = torch.randint(0, 20, (3, 4))
    assert_free(transformers.BertForSequenceClassification(bert).eval(), tokens, mask)
    assert_free(transformers.GPT2LMHeadModel(gpt).eval(), tokens)


class Weighted(nn.Module):
    """Has a weight for each place in the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda x: x - x.mean(0), "aten.mean.dim"),
        (lambda x: F.batch_norm(x, None, None, training=True), "keep the rows of a batch apart"),
        (lambda x: x.softmax(0), "may mix rows"),
        (lambda x: x @ x.T, "may mix rows"),
        (lambda x: x.view(6, 4) + 1, "may mix rows"),
        (lambda x: x.reshape(-1).roll(1).view(4, 6), "may mix rows"),
        (lambda x: x * x[:1], "may mix rows"),
        (lambda x: torch.cat([x, x]), "may mix rows"),
        (lambda x: x[torch.tensor([1, 0, 3, 2])], "may mix rows"),
        (lambda x: x[torch.arange(4).flip(0), torch.zeros(4).long()], "may mix rows"),
        (lambda x: x[torch.arange(4).bool().long(), torch.zeros(4).long()], "may mix rows"),
        (lambda x: x + torch.arange(4.0)[:, None], "place of a row"),
        (Weighted(), "place of a row"),
        (lambda x: (x, torch.ones(4)), "return once"),
        (lambda x: x.sum(1).sum(), "may mix rows"),
        (lambda x: x.t(), "has no row for each row"),
        (lambda x: x + torch.rand(4, 6), "random numbers"),
        (lambda x: x.mul_(2), "written back"),
    ],
)
def test_rows_that_are_not_independent_are_refused(model, problem):
    compiled = compile_inference(model, EAGER)
    compiled(torch.randn(4, 6))
    with pytest.raises(CompileError) as error:
        free_rows(compiled)
    assert problem in str(error.value)
    assert error.value.id == "free-rows"


class Trained(Weighted):
    def forward(self, x):
        return F.mse_loss(super().forward(x), x)


def test_what_is_written_or_trained_is_refused():
    norm = nn.BatchNorm1d(6).train()
    compiled = compile_inference(norm, EAGER)
    compiled(torch.randn(4, 6))
    with pytest.raises(CompileError):
        free_rows(compiled)
    model = Trained()
    training = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), EAGER)
    training(torch.randn(4, 6))
    with pytest.raises(CompileError, match="a program for training"):
        free_rows(training)


def test_inputs_have_the_same_number_of_rows():
    run = assert_free(lambda x, y: x + y, torch.randn(4, 3), torch.randn(4, 3))
    for rows in ((3, 2), (0, 0)):
        with pytest.raises(InputError, match="rows of the same number"):
            run(*(torch.randn(n, 3) for n in rows))
    one = compile_inference(nn.Linear(3, 2), EAGER)
    one(torch.randn(1, 3))
    with pytest.raises(CompileError, match="has one row"):
        free_rows(one)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (4, 6)),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), (4, 2, 6, 6)),
    ],
)
def test_partial_sums_of_halves_keep_rows_apart(model, shape):
    model, x = model.half().eval(), torch.randn(shape).half()
    options = {**EAGER, "partials": "half", "convolution_partials": "half"}
    compiled = compile_inference(model, options)
    expected = compiled(x)
    assert "half_partials" in str(compiled.program)
    for rows in (1, 3):
        assert torch.equal(free_rows(compiled)(x[:rows]), expected[:rows])
