"""Check that what is printed becomes streams, and nothing else of the graph changes."""

import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, print_tensor
from ipu_dynamo.capture.capture import STAGE
from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.testing import assert_close
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs


class Model(nn.Module):
    def __init__(self, *, prints=True):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = BeginBlock(nn.Linear(3, 2), ipu_id=1)
        self.prints = prints

    def print(self, x, title):
        return print_tensor(x, title) if self.prints else x

    def forward(self, x, y):
        h = torch.tanh(self.print(self.print(self.first(x), "h"), "again"))
        scores = self.second(h) * self.print(self.second.bias, "bias")
        return F.mse_loss(self.print(scores, "scores"), y)


DATA = torch.ones(4, 2), torch.ones(4, 2)
OPTIONS = Options(strategy=Strategy("pipelined"), gradient_accumulation=4)


def rewritten(*, prints=True):
    torch.manual_seed(0)
    model = Model(prints=prints)
    capture, one = captured(model, DATA, OPTIONS, before="PrintTensors")
    return model, capture, one


def test_keeps_values_and_metadata():
    model, capture, one = rewritten()
    inputs = named_inputs(model, DATA)
    before, lines = evaluate(capture, inputs), lines_of(capture.graph.graph.nodes)
    assert one(capture)
    check(capture)
    after = evaluate(capture, inputs)
    assert_close({key: after[key] for key in before}, before)
    assert lines_of(capture.graph.graph.nodes) <= lines
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


def test_streams_have_the_order_in_which_a_micro_batch_prints():
    _, capture, one = rewritten()
    one(capture)
    titles = [printing.title for printing in capture.report.prints.values()]
    forward = ["h", "again", "bias", "scores"]
    assert titles == [*forward, *(f"{t}_gradient" for t in ("scores", "bias", "again", "h"))]
    assert list(capture.report.prints) == [str(1 + place) for place in range(len(titles))]
    assert not capture.graph.graph.find_nodes(op="call_function", target=print_tensor_op)


def test_leaves_the_graph_of_the_model_that_prints_nothing():
    _, capture, one = rewritten()
    one(capture)
    _, plain, _ = rewritten(prints=False)
    operators = [n.target for n in plain.graph.graph.nodes if n.op == "call_function"]
    found = [n.target for n in capture.graph.graph.nodes if n.op == "call_function"]
    copies = found.count(torch.ops.aten.clone.default)
    assert copies == 1  # of the bias, where it is printed
    found.remove(torch.ops.aten.clone.default)
    assert found == operators


def test_a_variable_is_printed_on_the_stage_that_prints_it():
    _, capture, one = rewritten()
    one(capture)
    (copy,) = capture.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    )
    assert copy.meta[STAGE] == 1
