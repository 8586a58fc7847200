"""Train a recurrent language model whose hidden state goes from batch to batch in buffers."""

import copy

import pytest
import torch
from torch import nn

import poptorch

STEPS, ROWS, TIME, WIDTH, WORDS = 4, 3, 5, 6, 11


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("hidden", torch.zeros(1, ROWS, WIDTH))
        self.register_buffer("cell", torch.zeros(1, ROWS, WIDTH))
        self.register_buffer("usage", torch.zeros(WORDS), persistent=False)

    def forward(self, tokens, targets):
        state = self.hidden.clone(), self.cell.clone()
        x, (hidden, cell) = self.lstm(self.table(tokens), state)
        self.hidden.copy_(hidden.detach())
        self.cell.copy_(cell.detach())
        self.usage.index_add_(0, tokens.flatten(), torch.ones(tokens.numel()))
        scores = self.head(x).transpose(1, 2)
        return nn.functional.cross_entropy(scores, targets, ignore_index=0)


def text(iterations):
    drawn = torch.Generator().manual_seed(6)
    shape = (ROWS * iterations, TIME)
    return [
        tuple(torch.randint(WORDS, shape, generator=drawn) for _ in range(2)) for _ in range(STEPS)
    ]


@pytest.mark.parametrize("iterations", [1, 3])
def test_losses_weights_and_states_are_those_of_a_plain_loop(iterations):
    torch.manual_seed(0)
    expected = Language()
    model = copy.deepcopy(expected)
    optimizer, losses = torch.optim.Adam(expected.parameters(), lr=1e-2, eps=1e-4), []
    for batch in text(iterations):
        for part in zip(*(x.chunk(iterations) for x in batch), strict=True):
            optimizer.zero_grad()
            loss = expected(*part)
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.detach())
    options = poptorch.Options().deviceIterations(iterations).outputMode(poptorch.OutputMode.All)
    ours = poptorch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=0.25)
    training = poptorch.trainingModel(model, options, ours)
    on_device = torch.cat([training(*batch).flatten() for batch in text(iterations)])
    training.copyWeightsToHost()
    torch.testing.assert_close(on_device, torch.stack(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(model.usage, expected.usage)
    assert torch.equal(model.table.weight[0], torch.zeros(WIDTH))
    with torch.no_grad():
        model.hidden.zero_()
        model.cell.zero_()
    training.copyWeightsToDevice()
    first, again = (training(*text(iterations)[0]) for _ in range(2))
    assert not torch.equal(first, again)
