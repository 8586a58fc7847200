"""Check what a program says: homes, streams, copies, reductions, updates, equal functions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.program import AllReduce, Copy, Receive, Repeat, Send, Update
from ipu_dynamo.testing import assert_same_inference, assert_same_training


class Deep(nn.Module):
    """Equal blocks, each on an IPU of its own, between a first and a last layer."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])

    def forward(self, x, y):
        with Block("first", 0):
            x = self.first(x)
        for ipu, layer in enumerate(self.layers, start=1):
            with Block(f"layer {ipu}", ipu):
                x = torch.tanh(layer(x))
        with Block("last", len(self.layers) + 1):
            return F.mse_loss(self.last(x), y)


def batch(rows):
    return torch.ones(rows, 3), torch.ones(rows, 2)


def training(model, rows=2, *, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, Options(engine="eager", **options))
    step.compile(*batch(rows))
    return step


def of_kind(program, kind):
    return [i for i in program.walk() if isinstance(i, kind)]


# --- Functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, 12])
def test_equal_layers_become_one_function_each_way(depth):
    step = training(Deep(depth))
    step(*batch(2))
    program = step.program
    assert program.num_stages == depth + 2
    assert len(program.calls) == 2 * depth + 3
    assert len(program.functions) == 5  # first, layer, last, and the two backwards
    assert step.functions_compiled == 5


def test_different_layers_stay_different_functions():
    model = Deep(3)
    model.layers[1] = nn.Linear(4, 4, bias=False)
    assert len(training(model).program.functions) == 7


# --- Variables and homes -------------------------------------------------------------------------


def test_parameter_its_gradient_and_its_states_live_where_it_is_read():
    program = training(Deep(2)).program
    homes = {v.name: v.ipu for v in program.variables}
    for name, ipu in (("first", 0), ("layers.0", 1), ("layers.1", 2), ("last", 3)):
        for part in ("weight", "bias"):
            own = [home for v, home in homes.items() if v.startswith(f"{name}.{part}")]
            assert own == [ipu] * 3  # itself, .grad, .momentum_buffer


def test_updates_run_at_home_one_for_each_group_and_ipu():
    model = Deep(1)
    groups = [{"params": [model.first.weight, model.last.weight]}, {"params": [model.last.bias]}]
    program = training(model, optimizer=torch.optim.SGD(groups, lr=0.1)).program
    updates = of_kind(program, Update)
    assert [(u.group, u.ipu, u.parameters) for u in updates] == [
        (0, 0, ("first.weight",)),
        (0, 2, ("last.weight",)),
        (1, 2, ("last.bias",)),
    ]


def test_parameter_that_the_optimiser_has_not_got_has_no_gradient():
    model = Deep(1)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
    step = training(model, 4, optimizer=optimizer, gradient_accumulation=2)
    accumulators = [v.name for v in step.program.variables if v.kind == "accumulator"]
    assert sorted(accumulators) == ["last.bias..grad", "last.weight..grad"]
    before = model.first.weight.detach().clone()
    step(*batch(4))
    assert torch.equal(model.first.weight, before)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, y):
        with Block("a", 0):
            self.count.add_(1)
            x = self.layer(x)
        with Block("b", 1):
            return F.mse_loss(F.linear(x, self.layer.weight)[:, :2], y) + 0 * self.count


def test_shared_weight_is_copied_from_home_once_per_step_and_its_gradient_back():
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(engine="eager", gradient_accumulation=4)
    step = compile_training(model, optimizer, options, loss=0)
    step.compile(*batch(4))
    (loop,) = step.program.body
    (copy, micro_batches, *_) = loop.body
    assert isinstance(copy, Copy)
    assert (copy.value, copy.src, copy.dst) == ("layer.weight", 0, 1)
    assert isinstance(micro_batches, Repeat)
    (gradient,) = [v for v in step.program.variables if v.kind == "accumulator"]
    assert gradient.ipu == 0


def test_buffer_that_a_later_ipu_of_a_pipeline_changes_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            with Block("a", 0):
                x = x + self.count
            with Block("b", 1):
                self.count.add_(1)
                return x * 2

    options = Options(engine="eager", device_iterations=2)
    assert_same_inference(Late(), [torch.zeros(4)] * 2, options)
    pipelined = replace(options, strategy=Strategy("pipelined"))
    with pytest.raises(CompileError, match="count changes in stage 1 on IPU 1 and is read in sta"):
        compile_inference(Late(), pipelined)(torch.zeros(4))


@pytest.mark.parametrize("kind", ["shared norm", "read before"])
def test_buffer_that_a_later_stage_of_its_own_ipu_changes_is_refused(kind):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.middle = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            with Block("a", 0):
                h = self.norm(x) if kind == "shared norm" else x + self.total
            with Block("b", 1):
                h = self.middle(h)
            with Block("c", 0):
                if kind == "shared norm":
                    h = self.norm(h)
                else:
                    self.total.add_(h.detach().sum())
                return F.mse_loss(h, x)

    options = Options(engine="eager", gradient_accumulation=5)
    data = [torch.randn(5 * 3, 4)] * 2
    assert_same_training(Twice(), data, options, loss=0)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipelined = replace(options, strategy=Strategy("pipelined"))
    with pytest.raises(CompileError, match="changes in stage 2 on IPU 0 and is read in stage 0 on"):
        compile_training(model, optimizer, pipelined)(*data[:1])


# --- Loops and streams -----------------------------------------------------------------------


def test_training_repeats_micro_batches_in_steps():
    (steps,) = training(Deep(1), 12, device_iterations=2, gradient_accumulation=3).program.body
    assert (steps.over, steps.count) == ("device_iteration", 2)
    (micro_batches,) = [i for i in steps.body if isinstance(i, Repeat)]
    assert (micro_batches.over, micro_batches.count) == ("micro_batch", 3)
    assert not [i for i in micro_batches.body if isinstance(i, Update)]


def test_inference_has_one_loop_and_no_update():
    run = compile_inference(nn.Linear(3, 2), Options(engine="eager", device_iterations=4))
    run.compile(torch.ones(8, 3))
    (loop,) = run.program.body
    assert (loop.over, loop.count) == ("micro_batch", 4)
    assert run.program.kind == "inference"
    assert not of_kind(run.program, Update)


def test_input_is_received_where_it_is_read_with_micro_batch_shape():
    program = training(Deep(1), 8, gradient_accumulation=4).program
    assert [(r.stream, r.ipu) for r in of_kind(program, Receive)] == [("x", 0), ("y", 2)]
    assert [str(i.type) for i in program.inputs] == ["f32[2,3]", "f32[2,2]"]


def test_input_that_two_ipus_read_is_received_on_both():
    def model(x):
        with Block("a", 0):
            h = torch.sin(x)
        with Block("b", 1):
            return h + x

    run = compile_inference(model, {"engine": "eager"})
    run.compile(torch.ones(2))
    assert [(r.stream, r.ipu) for r in of_kind(run.program, Receive)] == [("x", 0), ("x", 1)]
    assert len(run.program.inputs) == 1


def test_unused_input_is_an_input_still():
    run = compile_inference(lambda x, unused: x + 1, {"engine": "eager"})
    assert torch.equal(run(torch.ones(2), torch.ones(3)), torch.full((2,), 2.0))


def test_result_is_sent_from_the_ipu_that_makes_it():
    (send,) = of_kind(training(Deep(2)).program, Send)
    assert (send.stream, send.ipu) == ("0", 3)
    assert "F.mse_loss" in send.source


def test_constants_come_back_once_and_parameters_with_every_micro_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("order", torch.arange(3))

        def forward(self, x):
            made = torch.ones(2)
            return x, self.weight * 2, self.order * 2, made, torch.rand(2), x.new_zeros(2)

    run = compile_inference(Model(), Options(engine="eager", device_iterations=3))
    shapes = [tuple(r.shape) for r in run(torch.ones(3, 2))]
    assert shapes == [(3, 2), (6,), (3,), (2,), (6,), (2,)]
    returns = [output.returns for output in run.program.outputs]
    assert returns == ["all", "all", "once", "once", "all", "once"]


# --- Reductions ------------------------------------------------------------------------------


def test_replicas_reduce_gradients_before_each_update():
    program = training(Deep(1), 4, replicas=2).program
    kinds = [type(i) for i in program.walk() if isinstance(i, AllReduce | Update)]
    assert kinds == [AllReduce, Update] * 3
    assert not of_kind(training(Deep(1)).program, AllReduce)


@pytest.mark.parametrize(
    ("options", "divisor"),
    [
        ({}, 6),
        ({"reduction": "sum"}, 1),
        ({"mean_strategy": "running"}, 2),
        ({"mean_strategy": "post_and_loss"}, 3),
        ({"loss_scale": 8.0}, 48),
        ({"loss_scale": 8.0, "reduction": "sum"}, 8),
    ],
)
def test_updates_divide_by_what_the_mean_strategy_leaves(options, divisor):
    program = training(Deep(1), 6, gradient_accumulation=3, replicas=2, **options).program
    assert {u.divisor for u in of_kind(program, Update)} == {divisor}


def test_only_what_replicas_change_for_themselves_is_not_shared():
    model = Deep(1)
    model.first = nn.Sequential(model.first, nn.BatchNorm1d(4))
    program = training(model, 8, replicas=2).program
    own = {v.name for v in program.variables if not v.replicated}
    accumulators = {v.name for v in program.variables if v.kind == "accumulator"}
    norm = {f"first.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert own == accumulators | norm
