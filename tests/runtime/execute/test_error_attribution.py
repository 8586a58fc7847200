"""Check that a failure names its operator, stage, micro-batch and source line."""

import pytest
import torch
from torch import nn

from ipu_dynamo import Block, ExecutionError, Options, compile_inference
from ipu_dynamo.program import Call, make_function
from ipu_dynamo.runtime.execute.error_attribution import explain

library = torch.library.Library("ipu_test_blame", "DEF")
library.define("at_most(Tensor x, float limit) -> Tensor")
library.impl("at_most", lambda x, limit: torch.empty_like(x), "Meta")


def at_most(x, limit):
    if x.max() > limit:
        raise ValueError(f"{x.max():g} is larger than {limit:g}")
    return x.clone()


library.impl("at_most", at_most, "CPU")


class Checked(nn.Module):
    """Fails in stage 1 for numbers above 10."""

    def forward(self, x):
        with Block("a", 0):
            h = x + 1
        with Block("b", 1):
            h = h * 2
            checked = torch.ops.ipu_test_blame.at_most(h, 22.0)
            return checked - 1


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_failure_names_operator_stage_micro_batch_and_line(engine):
    run = compile_inference(Checked(), Options(engine, device_iterations=4))
    run(torch.zeros(4))
    with pytest.raises(ExecutionError) as caught:
        run(torch.tensor([0.0, 1.0, 12.0, 50.0]))
    text = str(caught.value)
    assert text.startswith("ValueError: 26 is larger than 22")
    assert "node:  %at_most = ipu_test_blame.at_most.default" in text
    assert "stage: 1, micro-batch 2" in text
    assert "call @forward1  on ipu1" in text
    assert "in forward: checked = torch.ops.ipu_test_blame.at_most(h, 22.0)" in text
    assert (caught.value.stage, caught.value.micro_batch) == (1, 2)
    assert isinstance(caught.value.__cause__, ValueError)


def test_next_call_works():
    run = compile_inference(Checked(), Options("eager", device_iterations=2))
    with pytest.raises(ExecutionError):
        run(torch.tensor([0.0, 50.0]))
    assert run(torch.zeros(2)).tolist() == [1, 1]


def test_failure_that_does_not_repeat_names_the_whole_call():
    run = compile_inference(Checked(), Options("eager"))
    run.compile(torch.zeros(1))
    function = run.program.functions[0]
    call = run.program.calls[0]
    error = explain(RuntimeError("gone"), call, function, [torch.zeros(1)], 7)
    assert "RuntimeError: gone" in str(error)
    assert "node:" not in str(error)
    assert error.where == call.source
    assert error.micro_batch == 7


def test_search_leaves_the_arguments_as_they_were():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    added = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    added.meta["val"] = x.meta["val"]
    graph.output((added,))
    function = make_function("f", torch.fx.GraphModule(nn.Module(), graph))
    call = Call("f", 0, 0, "forward", ("x",), ("y",), "somewhere")
    given = torch.zeros(2)
    explain(RuntimeError("gone"), call, function, [given], 0)
    assert given.tolist() == [0, 0]
