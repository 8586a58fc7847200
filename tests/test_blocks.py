"""Check what blocks do to models: nothing outside a trace, markers inside."""

import copy
import pickle

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo import BeginBlock, Block, BlockFunction, IpuError
from ipu_dynamo.blocks import remove_blocks
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.errors import OptionError
from ipu_dynamo.ops.marks.markers import NO_IPU, begin_block, end_block
from ipu_dynamo.options import StageSpec

OUTSIDE = pytest.mark.filterwarnings("ignore:the tensor _param_constant")


def markers(model):
    """The arguments of the markers that a trace of `model` has, `end` for an end."""
    capture = trace(model, read_arguments(model, (torch.ones(1, 2),), {}), training=False)
    found = {begin_block: lambda n: n.args, end_block: lambda n: "end"}
    return [found[n.target](n) for n in capture.graph.graph.nodes if n.target in found]


def test_context_begins_and_ends_a_block():
    def model(x):
        with Block("a", ipu_id=3):
            return x + 1

    assert markers(model) == [("a", 3), "end"]


def test_block_ends_also_when_its_body_fails():
    def model(x):
        try:
            with Block("a"):
                raise KeyError
        except KeyError:
            return x

    assert markers(model) == [("a", NO_IPU), "end"]


@pytest.mark.parametrize(("user_id", "name"), [(None, ""), ("", ""), (0, ""), (7, "7"), ("7", "7")])
def test_ids_are_names_and_false_ones_are_automatic(user_id, name):
    def model(x):
        with Block(user_id):
            return x + 1

    assert markers(model)[0] == (name, NO_IPU)


def test_decorated_function_keeps_its_name_arguments_and_result():
    @BlockFunction("a", 1)
    def scaled(x, factor=2):
        """Scale."""
        return x * factor

    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Scale."
    assert scaled(torch.ones(1), factor=3) == 3
    assert markers(scaled) == [("a", 1), "end"]


@OUTSIDE
def test_layer_begins_a_block_each_time_it_is_called_and_never_ends_it():
    layer = nn.Linear(2, 2)
    assert BeginBlock(layer, "a", 1) is layer
    assert markers(lambda x: layer(layer(x))) == [("a", 1), ("a", 1)]


@pytest.mark.parametrize(
    "container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
)
def test_container_that_nothing_calls_is_refused_and_poptorch_warns(container, capsys):
    with pytest.raises(IpuError, match=r"has no forward\n  try:  .*BeginBlock\(layers\[0\]"):
        BeginBlock(container, ipu_id=1)
    assert poptorch.BeginBlock(container, ipu_id=1) is container
    assert "no effect on a Module" in capsys.readouterr().err
    assert not container._forward_pre_hooks


@pytest.mark.parametrize("layer", ["a", torch.relu, nn.Parameter(torch.ones(1))])
def test_block_that_begins_at_no_module_is_refused(layer):
    with pytest.raises(IpuError, match=f"not the {type(layer).__name__}( 'a')?\n  try: "):
        BeginBlock(layer)


@OUTSIDE
def test_layer_whose_forward_is_its_own_attribute_begins_a_block():
    layer = nn.Module()
    layer.forward = lambda x: x + 1
    BeginBlock(layer, "a", 1)
    assert markers(layer) == [("a", 1)]


@OUTSIDE
def test_layer_without_an_id_keeps_one_of_its_own():
    one, two = BeginBlock(nn.Linear(2, 2)), BeginBlock(nn.Linear(2, 2))
    names = [name for name, _ in markers(lambda x: one(two(one(x))))]
    assert names[0] == names[2] != names[1]


def test_layer_begins_one_block_only():
    layer = BeginBlock(nn.Linear(2, 2), "a")
    with pytest.raises(IpuError, match="module has already been assigned to a block"):
        BeginBlock(layer, "b")


def test_begun_layer_stays_what_it_was():
    layer = BeginBlock(nn.Linear(2, 2), "a", 1)
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == ["weight", "bias"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert markers(other) == [("a", 1)]


def test_blocks_do_nothing_outside_a_trace():
    layer = BeginBlock(nn.Linear(2, 2), "a", 1)
    plain = nn.Linear(2, 2)
    plain.load_state_dict(layer.state_dict())
    with Block("b", 2):
        assert torch.equal(layer(torch.ones(1, 2)), plain(torch.ones(1, 2)))


def test_removed_blocks_leave_other_hooks():
    model = nn.Sequential(BeginBlock(nn.Linear(2, 2), "a"), BeginBlock(nn.Linear(2, 2), "b"))
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(1))
    remove_blocks(model)
    assert markers(model) == []
    assert seen == [1]
    BeginBlock(model[0], "again")


@pytest.mark.parametrize("remove", [remove_blocks, poptorch.removeBlocks])
def test_either_remover_removes_blocks_of_both_front_ends(remove):
    model = nn.Sequential(
        poptorch.BeginBlock(nn.Linear(2, 2), "a"), BeginBlock(nn.Linear(2, 2), "b")
    )
    assert markers(model) == [("a", NO_IPU), ("b", NO_IPU)]
    for begin in (BeginBlock, poptorch.BeginBlock):
        for layer in model:
            with pytest.raises((IpuError, poptorch.Error), match="already been assigned"):
                begin(layer, "c")
    remove(model)
    assert markers(model) == []
    assert not any(layer._forward_pre_hooks for layer in model)


def test_poptorch_blocks_act_without_its_executors():
    layer = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1)
    called = poptorch.BeginBlock(lambda x: x + 1, "called", ipu_id=2)

    def model(x):
        with poptorch.Block("inside", ipu_id=3):
            y = layer(x)
        return called(y)

    names = markers(model)
    assert names[0] == ("inside", 3)
    assert names[1] == (layer._forward_pre_hooks.popitem()[1].name, 1)
    assert names[2:] == ["end", ("called", 2)]


def test_core_blocks_without_a_name_are_numbered_in_a_trace_of_poptorch():
    model = nn.Sequential(BeginBlock(nn.Linear(1, 1), ipu_id=0), nn.Linear(1, 1))
    poptorch.BeginBlock(model[1], ipu_id=0)
    poptorch.inferenceModel(model, poptorch.Options())(torch.ones(1, 1))
    assert "BeginBlock(user_id=0" in poptorch.module_repr(model)
    assert "BeginBlock(user_id=1" in poptorch.module_repr(model)


@pytest.mark.parametrize("ipu_id", ["1", 1.0, True, -1, 100_000])
def test_what_names_no_ipu_is_refused_at_once(ipu_id):
    begun = nn.Linear(2, 2)
    for begin in (
        lambda: Block(ipu_id=ipu_id),
        lambda: BlockFunction(ipu_id=ipu_id),
        lambda: BeginBlock(begun, ipu_id=ipu_id),
        lambda: StageSpec(("a",), ipu_id),
    ):
        with pytest.raises(OptionError, match=f"ipu_id is {ipu_id!r}"):
            begin()
    for begin in (
        lambda: poptorch.Block(ipu_id=ipu_id),
        lambda: poptorch.Block.start("a", ipu_id),
        lambda: poptorch.BlockFunction(ipu_id=ipu_id),
        lambda: poptorch.BeginBlock(begun, ipu_id=ipu_id),
        lambda: poptorch.BeginBlock(torch.relu, ipu_id=ipu_id),
    ):
        with pytest.raises(poptorch.Error, match=f"ipu_id is {ipu_id!r}"):
            begin()
    assert not begun._forward_pre_hooks
