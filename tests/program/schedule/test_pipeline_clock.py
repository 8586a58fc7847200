"""Check that programs of pipelines state what their stages keep."""

import pytest
import torch
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.program import Repeat, Stash, TensorType

PIPELINED = Strategy(kind="pipelined")


class Chain(nn.Module):
    def __init__(self, ipus):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in ipus)
        for ipu, layer in zip(ipus, self.layers, strict=True):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.mse_loss(h, x)


def program(ipus, **options):
    model = Chain(ipus)
    chosen = Options(**{"engine": "eager", "gradient_accumulation": 7} | options)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen)
    step.compile(torch.randn(7 * 2, 8))
    return step.program


@pytest.mark.parametrize(
    ("ipus", "copies"),
    [
        ([0, 1], [3, 1]),
        ([0, 1, 2], [5, 3, 1]),
        ([0, 1, 2, 3], [7, 5, 3, 1]),
        ([0, 1, 0, 1], [7, 5, 3, 1]),  # an IPU that has two stages runs both in each cycle
        ([0, 0, 1, 1], [3, 1]),  # neighbours on one IPU are one stage
    ],
)
def test_copies_follow_the_table(ipus, copies):
    assert [one.copies for one in program(ipus, strategy=PIPELINED).stash] == copies


def test_with_recomputation_stages_keep_their_inputs_only():
    whole = program([0, 1, 2], strategy=PIPELINED)
    assert [str(one) for one in whole.stash] == [
        "stage 0 on ipu0 keeps 5 micro-batches of %x: f32[2,8]; 320 B in all",
        "stage 1 on ipu1 keeps 3 micro-batches of %tanh..on1: f32[2,8]; 192 B in all",
        "stage 2 on ipu2 keeps 1 micro-batch",
    ]


def test_the_printed_program_states_the_stash():
    whole = program([0, 1, 2], strategy=PIPELINED, recompute="off")
    assert [str(one) for one in whole.stash] == [
        "stage 0 on ipu0 keeps 5 micro-batches of %tanh: f32[2,8], %x: f32[2,8]; 640 B in all",
        "stage 1 on ipu1 keeps 3 micro-batches of %tanh_1: f32[2,8], %tanh..on1: f32[2,8]; "
        "384 B in all",
        "stage 2 on ipu2 keeps 1 micro-batch",
    ]
    for text in (str(whole), whole.short()):
        assert all(f"  {one}\n" in text for one in whole.stash)
        assert "repeat 7 over micro-batches, pipelined\n" in text


def test_a_stage_that_computes_again_keeps_its_input_only():
    assert [str(one) for one in program([0, 1, 2], strategy=PIPELINED).stash] == [
        "stage 0 on ipu0 keeps 5 micro-batches of %x: f32[2,8]; 320 B in all",
        "stage 1 on ipu1 keeps 3 micro-batches of %tanh..on1: f32[2,8]; 192 B in all",
        "stage 2 on ipu2 keeps 1 micro-batch",
    ]


def test_others_keep_no_stash():
    sharded = program([0, 1])
    alone = program([0, 0], strategy=PIPELINED)
    inference = compile_inference(
        Chain([0, 1]), Options(engine="eager", device_iterations=7, strategy=PIPELINED)
    )
    inference.compile(torch.randn(14, 8))
    for other in (sharded, alone, inference.program):
        assert other.stash == ()
        assert "keeps" not in str(other)
    orders = [i.order for i in inference.program.walk() if isinstance(i, Repeat)]
    assert orders == ["pipelined"]
    assert sharded.order == alone.order == "sequential"


def test_a_stash_counts_all_its_copies():
    value = ("h", TensorType(torch.float16, (4, 8)))
    assert str(Stash(1, 2, 3, (value,))).endswith("%h: f16[4,8]; 192 B in all")
