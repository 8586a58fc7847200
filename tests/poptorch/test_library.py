"""Check `poptorch.fps`, `poptorch.nearest` and `poptorch.ctc_beam_search_decoder` in executors."""

import pytest
import torch

import poptorch
from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


def test_points_are_chosen_in_programs_as_outside():
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(6, 3)
    batch_y = torch.tensor([0, 0, 1, 1, 1, 1])

    def forward(x, y, batch_y):
        chosen = poptorch.fps(x, [0, 4, 8], ratio=0.75)
        return chosen, x[chosen], poptorch.nearest(x, y, [0] * 5 + [1] * 3, batch_y)

    found = poptorch.inferenceModel(forward)(x, y, batch_y)
    expected = forward(x, y, batch_y)
    assert [t.dtype for t in found] == [torch.int32, torch.float32, torch.int32]
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: poptorch.fps([1], [0, 1]), "src must be a torch.tensor"),
        (lambda: poptorch.fps(torch.ones(3), [0]), "at least two integers"),
        (lambda: poptorch.fps(torch.ones(3), [0, 3], 1), "ratio must be a float"),
        (lambda: poptorch.fps(torch.ones(3), [0, 9]), "not in 3 rows"),
        (lambda: poptorch.nearest(torch.ones(3), 1), "y must be a torch.tensor"),
        (lambda: poptorch.nearest(torch.ones(3), torch.ones(2), "no"), "batch_x must be"),
        (lambda: poptorch.nearest(torch.ones(3), torch.ones(2), [1]), "for 3 rows"),
        (lambda: poptorch.ctc_beam_search_decoder(1, torch.ones(1)), "probs must be"),
        (
            lambda: poptorch.ctc_beam_search_decoder(torch.ones(2, 2), torch.ones(1)),
            "Incorrect shape",
        ),
        (
            lambda: poptorch.ctc_beam_search_decoder(torch.ones(2, 1, 2), torch.tensor([2]), 2),
            "there are 2 classes",
        ),
    ],
)
def test_other_arguments_are_refused(call, problem):
    with pytest.raises(poptorch.Error, match=problem):
        call()


def test_the_decoder_runs_in_programs_and_outside():
    torch.manual_seed(0)
    log_probs, lengths = torch.randn(6, 2, 4).log_softmax(2), torch.tensor([6, 3])
    expected = ctc_beam_search(log_probs, lengths, 1, 30, 3)
    settings = {"blank": 1, "beam_width": 30, "top_paths": 3}
    outside = poptorch.ctc_beam_search_decoder(log_probs, lengths, **settings)
    model = poptorch.inferenceModel(lambda x, n: poptorch.ctc_beam_search_decoder(x, n, **settings))
    for found in (outside, model(log_probs, lengths)):
        assert torch.allclose(found[0], expected[0])
        assert all(map(torch.equal, found[1:], expected[1:]))
        assert [t.dtype for t in found] == [torch.float32, torch.int32, torch.int32]


def test_a_ctc_loss_without_reduction_is_refused_as_in_poptorch():
    def forward(x, targets):
        return torch.nn.CTCLoss(reduction="none")(x, targets, (3, 3), (1, 1))

    with pytest.raises(poptorch.Error, match='CTCLoss with reduction="none" is currently not'):
        poptorch.inferenceModel(forward)(torch.zeros(3, 2, 4), torch.ones(2, 1, dtype=torch.int))
