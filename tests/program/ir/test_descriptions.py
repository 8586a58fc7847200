"""Check that instructions describe all that their lines of text name."""

import re
from typing import get_args

import pytest
import torch

from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program import (
    Accumulate,
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    ClipFactor,
    ClipGlobalNorm,
    ClipValues,
    Collective,
    Copy,
    GradientNorm,
    JointUpdate,
    Load,
    Plain,
    Receive,
    ReceiveFromRank,
    ReduceScatter,
    Send,
    SendToRank,
    Store,
    TensorType,
    Update,
    UpdateFactors,
    UpdatePart,
    WriteBuffer,
)
from ipu_dynamo.program.ir.update_rules import TracedRule

ONE, FOUR = TensorType(torch.float32, ()), TensorType(torch.float32, (4,))
TRACED = TracedRule(hyperparameters=("lr",), name="Mine", key="1")
EXAMPLES = (
    Receive("x", "x", 1),
    Send("0", "loss", 1, "line"),
    Copy("h", "h..on1", FOUR, 0, 1, "line"),
    Collective("all_gather", "h", "g..received", FOUR, 2, 1, "line"),
    Call("f", 1, 0, "forward", ("w", "x"), ("h", None, "loss"), "line"),
    Accumulate(("w..grad",), ("g",), "mean", 1, 0, "backward", "line", weight="share"),
    WriteBuffer(("mean", "count"), ("m", "n"), 1, 0, "forward", "line"),
    Store("h", "h..off", FOUR, 1, None, "line"),
    Store("w", "w", FOUR, 1, None, "line"),
    Load("h..off", "h..again", FOUR, 1, None, "line"),
    Load("w", "w", FOUR, 1, None, "line"),
    AllGather("w", FOUR, 2, 1, None, None, "line"),
    ReduceScatter(("v..grad", "w..grad"), (FOUR, FOUR), 2, 1),
    AllReduce(("v..grad", "w..grad"), 1),
    GradientNorm(("w",), ("w..grad",), ".norm", ONE, 2.0, 4, 1, "scale"),
    ClipFactor(ClipGlobalNorm(1.0), (".norm0", ".norm1"), ".factor", ONE, 1),
    ClipValues(("w",), ("w..grad",), 1.0, 4, 1, "scale"),
    UpdateFactors("f", ((0, 0, "lr"),), ("count",), (".lr",), (ONE,), 1),
    UpdatePart("f", "w", "w..grad", ("m",), (".lr",), (".part",), (ONE,), 4, 1, "scale", ".factor"),
    JointUpdate("f", (".part", "w"), (".joint",), (ONE,), ("count",), 1),
    Update(
        TRACED, 0, 1, ("w",), ("w..grad",), (("m", ("w..m",)),), 4, True,
        loss_scale="scale", clip=".factor", function="f", numbers=((".lr",),),
    ),
    AdjustLossScale("scale", ("counter",), 8, 0.5, 1.0, 64.0, 1, 2, "steps", "so_far"),
    SendToRank(3, "h", FOUR, 0, 1, True, "line"),
    ReceiveFromRank(3, "h..on1", FOUR, 1, 0, True, "line"),
)  # fmt: skip


def described(instruction):
    """All names that an instruction reads, makes or writes."""
    return {*instruction.read_names, *instruction.made_names, *instruction.written_names}


def test_every_instruction_has_an_example():
    assert {type(example) for example in EXAMPLES} == {*get_args(Plain)}


@pytest.mark.parametrize("instruction", EXAMPLES, ids=str)
def test_it_describes_the_names_and_ipus_of_its_text(instruction):
    text = str(instruction)
    assert {*re.findall(r"%([\w.]+)", text)} <= described(instruction)
    assert {int(ipu) for ipu in re.findall(r"\bipu(\d+)\b", text)} == {*instruction.ipus}


def test_a_replica_moves_the_bytes_of_what_it_gets():
    moved = {type(example): example.nbytes for example in EXAMPLES if example.nbytes}
    whole, shard = 16, 8
    assert moved == {
        Copy: whole,
        Collective: whole,
        Store: whole,
        Load: whole,
        AllGather: shard,
        ReduceScatter: 2 * shard,
    }


def test_an_update_describes_states_and_numbers_that_its_text_leaves_out():
    (update,) = (example for example in EXAMPLES if isinstance(example, Update))
    assert {"w..m", ".lr"} <= described(update)
    assert {*update.written_names} == {"w", "w..m", "w..grad"}
    assert {*update.read_names} == {"w..grad", "scale", ".factor", ".lr"}


def test_a_value_is_made_where_it_arrives_and_a_variable_is_not():
    moves = (Receive, Send, Copy, Store, Load, AllGather)
    made = {str(example): example.made_names for example in EXAMPLES if isinstance(example, moves)}
    assert [*made.values()] == [("x",), (), ("h..on1",), ("h..off",), (), ("h..again",), (), ()]


def test_arithmetic_is_done_over_what_an_instruction_names():
    computed = {type(e).__name__: e.computes for e in EXAMPLES if e.computes}
    assert {name: [*dict.fromkeys(c.does for c in of)] for name, of in computed.items()} == {
        "Accumulate": ["mean"],
        "WriteBuffer": ["store"],
        "GradientNorm": ["norm"],
        "ClipFactor": ["factor"],
        "ClipValues": ["clamp"],
        "UpdateFactors": ["function"],
        "UpdatePart": ["function"],
        "JointUpdate": ["function"],
        "Update": ["update"],
        "AdjustLossScale": ["factor"],
    }
    for example in EXAMPLES:
        assert {c.over for c in example.computes} - {""} <= described(example)
    functions = {name for name, of in computed.items() if any(c.function for c in of)}
    assert functions == {"UpdateFactors", "UpdatePart", "JointUpdate", "Update"}


def test_an_all_reduce_of_groups_names_their_size():
    groups = ReplicaGroups(2)
    assert [move.shards for move in AllReduce(("g",), 0, groups).moves] == [2]
    assert [move.shards for move in AllReduce(("g",), 0).moves] == [None]
