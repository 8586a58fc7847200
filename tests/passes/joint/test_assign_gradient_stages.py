"""Check that every operator of a joint graph has a stage, and that stages follow the data."""

import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Block
from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.passes.joint.assign_gradient_stages import AssignGradientStages, slot, stage_of_slot
from tests.properties.evaluate import captured, check


class Net(nn.Module):
    """Three stages on three IPUs, a skip over the middle one, and a weight on the outer ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x, y):
        with Block("a", 0):
            first = self.layers[0](x)
        with Block("b", 1):
            second = torch.tanh(self.layers[1](first))
        with Block("c", 2):
            third = F.linear(self.layers[2](second) + first, self.layers[0].weight)
            return F.mse_loss(third, y)


def placed():
    x = torch.ones(2, 2)
    return captured(Net(), (x, x), before="AssignGradientStages")[0]


def operators(capture):
    return [n for n in capture.graph.graph.nodes if n.op not in ("placeholder", "output")]


def test_slots_go_up_the_stages_and_down_again():
    assert [slot(s, False, 3) for s in range(3)] == [0, 1, 2]
    assert [slot(s, True, 3) for s in (2, 1, 0)] == [2, 3, 4]
    assert [stage_of_slot(i, 3) for i in range(5)] == [0, 1, 2, 1, 0]


def test_every_operator_gets_a_stage():
    capture = placed()
    assert any(STAGE not in node.meta for node in operators(capture))  # sums of gradients
    AssignGradientStages()(capture)
    check(capture)
    assert all(node.meta[STAGE] in (0, 1, 2) for node in operators(capture))


def test_no_operator_runs_before_what_it_reads():
    capture = placed()
    AssignGradientStages()(capture)

    def when(node):
        return slot(node.meta[STAGE], node.meta[BACKWARD], 3)

    for node in operators(capture):
        for source in node.all_input_nodes:
            assert source.op == "placeholder" or when(source) <= when(node)


def test_sum_of_gradients_runs_where_its_last_part_is_made():
    capture = placed()
    AssignGradientStages()(capture)
    gradients = {
        role.name: node
        for node, role in zip(capture.returned, capture.outputs, strict=True)
        if role.kind == "gradient"
    }
    assert gradients["layers.0.weight"].meta[STAGE] == 0
    assert gradients["layers.1.weight"].meta[STAGE] == 1
    assert gradients["layers.2.weight"].meta[STAGE] == 2


def test_backward_runs_on_the_stage_of_its_forward():
    capture = placed()
    AssignGradientStages()(capture)
    stages = {n.target: n.meta[STAGE] for n in operators(capture)}
    assert stages[torch.ops.aten.mse_loss_backward.default] == 2
    assert stages[torch.ops.aten.tanh_backward.default] == 1


def test_second_run_changes_nothing():
    capture = placed()
    AssignGradientStages()(capture)
    assert not AssignGradientStages()(capture)
