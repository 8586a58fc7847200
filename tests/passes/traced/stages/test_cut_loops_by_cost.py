"""Check that automatic cuts weigh loops by all of their iterations."""

from operator import getitem

import pytest
import torch
from torch import fx, nn

import ipu_dynamo
from ipu_dynamo import Options, Strategy, compile_inference, compile_training
from ipu_dynamo.ops.operator_costs import BYTES_PER_SECOND, seconds
from ipu_dynamo.passes.traced.stages.auto_partition import crossing_bytes
from ipu_dynamo.testing import assert_same_bits

aten = torch.ops.aten
WIDTH = 8
CUT = Strategy("pipelined", ipus=2)


class Looped(nn.Module):
    """Layers before a loop and behind it."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.count = count

    def forward(self, x):
        h = self.layers[0](x).relu()
        (h,) = ipu_dynamo.for_loop(self.count, lambda h: self.layers[1](h).tanh(), [h])
        return ipu_dynamo.identity_loss(self.layers[2](h).square().mean(), "none")


def trained(count, strategy, calls=1):
    model = Looped(count)
    options = Options(engine="eager", gradient_accumulation=3, strategy=strategy)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    rng = torch.Generator().manual_seed(0)
    for _ in range(calls):
        step(torch.randn(3 * 2, WIDTH, generator=rng))
    return model, step


def test_estimates_grow_with_the_iterations(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", "off")

    def of_loop(count):
        _, step = trained(count, CUT)
        return [max(cost[direction] for cost in step.costs) for direction in (0, 1)]

    few, more, many = of_loop(10), of_loop(110), of_loop(1110)
    for direction in (0, 1):
        each = (more[direction] - few[direction]) / 100
        assert each > 0
        assert many[direction] - more[direction] == pytest.approx(1000 * each)


def test_an_estimate_has_all_that_a_loop_gives():
    run = compile_inference(
        lambda a, b: tuple(ipu_dynamo.for_loop(0, lambda a, b: (b, a), [a, b])),
        Options(engine="eager"),
    )
    run.compile(torch.ones(3, 5), torch.ones(3, 5))
    (loop,) = (n for f in run.program.functions for n in f.operators if "loop" in str(n.target))
    assert seconds(loop) == pytest.approx(2 * 3 * 5 * 4 / BYTES_PER_SECOND)


def test_of_a_branch_the_longer_one_counts():
    def of(then, otherwise):
        run = compile_inference(
            lambda x: ipu_dynamo.cond(x.sum() > 0, then, [x], otherwise, [x])[0],
            Options(engine="eager"),
        )
        run.compile(torch.ones(4, 4))
        (branch,) = (n for f in run.program.functions for n in f.operators if "branch" in str(n))
        return seconds(branch)

    def long(x):
        return x @ x @ x @ x

    assert of(torch.sin, long) == of(long, torch.sin) > of(torch.sin, torch.cos)


def test_results_of_an_operator_with_several_go_over_a_cut():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4, 3)
    halves = graph.call_function(aten.split.Tensor, (x, 2))
    halves.meta["val"] = list(x.meta["val"].split(2))
    parts = [graph.call_function(getitem, (halves, i)) for i in range(2)]
    for part, value in zip(parts, halves.meta["val"], strict=True):
        part.meta["val"] = value
    first = graph.call_function(aten.sin.default, (parts[0],))
    total = graph.call_function(aten.add.Tensor, (first, parts[1]))
    first.meta["val"] = total.meta["val"] = parts[0].meta["val"]
    graph.output((total,))
    nbytes = 2 * 3 * 4
    assert crossing_bytes([halves, first, total]) == [0, 2 * nbytes, 2 * nbytes, 0]


@pytest.mark.parametrize("folder", ["off", "kept"])
def test_a_model_that_was_cut_at_a_loop_learns_the_same(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", "off" if folder == "off" else str(tmp_path))
    whole, _ = trained(5, Strategy(), calls=2)
    parts, step = trained(5, CUT, calls=2)
    assert {call.ipu for call in step.program.calls} == {0, 1}
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.timeout(120)
def test_a_while_loop_is_measured_that_other_numbers_would_not_end(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path))

    def model(x):
        h = x.abs() + 1
        (h,) = torch.while_loop(lambda h: h.min() < 100, lambda h: (h * 2,), (h,))
        return h.sin()

    run = compile_inference(model, Options(engine="eager", device_iterations=2, strategy=CUT))
    x = torch.ones(2, 3)
    torch.testing.assert_close(run(x), model(x))
    assert any(forward > 0 for forward, _ in run.costs)
