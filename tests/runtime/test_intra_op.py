"""Check with how many intra-op threads programs run: small operators with one."""

import pytest
import torch
from torch import Tensor, nn

from ipu_dynamo import ExecutionError, Options, compile_inference, compile_training
from ipu_dynamo.runtime.engines import EagerEngine
from ipu_dynamo.runtime.intra_op import intra_op_threads

SMALL, LARGE = 4, 4096
seen: list[int] = []


@torch.library.custom_op("tests_intra_op::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    """A copy; the number of threads is put on the list."""
    seen.append(torch.get_num_threads())
    if x.isnan().any():
        raise ValueError("not a number")
    return x.clone()


noted.register_fake(torch.empty_like)
noted.register_autograd(lambda context, gradient: gradient)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x):
        h = noted(self.layer(x))
        return nn.functional.mse_loss(h, torch.ones_like(h))


@pytest.fixture(autouse=True)
def three_threads():
    seen.clear()
    with intra_op_threads(3):
        yield
        assert torch.get_num_threads() == 3


def step_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return compile_training(model, optimizer, Options("eager", **options))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("rows", "threads"), [(SMALL, 1), (LARGE, 3)])
def test_a_step_of_small_operators_runs_them_in_one_thread(monkeypatch, links, rows, threads):
    monkeypatch.setattr(EagerEngine, "links", links)
    run = step_of(Model(), device_iterations=2)
    run(torch.randn(2 * rows, 64))
    assert seen == [threads] * 2
    assert (run.executable.linked is not None) == links


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize(("rows", "threads"), [(SMALL, {1: 1, 2: 1}), (LARGE, {1: 3, 2: 1})])
def test_inference_too(iterations, rows, threads):
    run = compile_inference(Model().eval(), Options("eager", device_iterations=iterations))
    run(torch.randn(iterations * rows, 64))
    assert seen == [threads[iterations]] * iterations  # several share the threads between them


@pytest.mark.parametrize("links", [True, False])
def test_a_failing_operator_leaves_the_number_of_threads(monkeypatch, links):
    monkeypatch.setattr(EagerEngine, "links", links)
    run = step_of(Model())
    with pytest.raises(ExecutionError, match="not a number"):
        run(torch.full((SMALL, 64), torch.nan))
    assert seen[0] == 1
    assert torch.get_num_threads() == 3


def test_none_is_the_number_of_torch():
    with intra_op_threads(None):
        assert torch.get_num_threads() == 3
    with intra_op_threads(2):
        assert torch.get_num_threads() == 2
