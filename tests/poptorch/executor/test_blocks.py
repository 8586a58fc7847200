"""Check that blocks become stages on IPUs, and the errors of impossible ones."""

import pytest
import torch
from torch import nn

import poptorch
from tests.poptorch.executor.models import Classifier, batch

ONE = torch.ones(1)


def ipus(executor, *args):
    """The IPUs of a model's calls, in order."""
    executor.compile(*args)
    return [call.ipu for call in executor._core.program.calls if call.direction != "backward"]


def sharded():
    return poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())


def test_every_form_places_operators():
    @poptorch.BlockFunction("c", ipu_id=2)
    def third(x):
        return x * 4

    def forward(x):
        with poptorch.Block("a", ipu_id=0):
            x = x + 1
        poptorch.Block.start("b", ipu_id=1)
        x = third(x * 3)
        last = poptorch.BeginBlock(lambda x: x - 1, "d", ipu_id=3)
        return last(x)

    executor = poptorch.inferenceModel(forward, sharded())
    assert ipus(executor, ONE) == [0, 1, 2, 3]
    assert executor(ONE) == forward(ONE)


@pytest.mark.parametrize("options", [sharded(), poptorch.Options().deviceIterations(2)])
def test_placement_keeps_results(options):
    x, _ = batch(4)
    spread, alone = Classifier(second=1), Classifier()
    assert torch.equal(poptorch.inferenceModel(spread, options)(x), alone(x))


def test_automatic_ids_count_up():
    options = poptorch.Options().deviceIterations(4)
    options.setExecutionStrategy(poptorch.PipelinedExecution("0", "1", "2", "3"))

    def forward(x):
        poptorch.Block.useAutoId()
        for _ in range(4):
            poptorch.Block.start()
            x = x + 1
        return x

    assert ipus(poptorch.inferenceModel(forward, options), torch.ones(4)) == [0, 1, 2, 3]


def test_a_hook_keeps_the_id_that_it_got():
    layer = poptorch.BeginBlock(nn.Linear(1, 1))
    options = sharded().setExecutionStrategy(poptorch.ShardedExecution("0"))
    for _ in range(2):
        poptorch.inferenceModel(layer, options).compile(ONE)
    assert "BeginBlock(user_id=0" in poptorch.module_repr(layer)


def test_begin_block_refuses():
    layer = poptorch.BeginBlock(nn.Linear(1, 1), "a")
    with pytest.raises(poptorch.Error, match="module has already been assigned to a block"):
        poptorch.BeginBlock(layer, "b")
    with pytest.raises(poptorch.Error, match="callable"):
        poptorch.BeginBlock(3)


def test_removed_blocks_place_nothing():
    model = Classifier(second=1)
    poptorch.removeBlocks(model)
    x, _ = batch(1)
    assert ipus(poptorch.inferenceModel(model), x) == [0]
    with pytest.raises(AssertionError):
        poptorch.removeBlocks(lambda x: x)


def test_operators_after_a_scope_need_a_block():
    def forward(x):
        with poptorch.Block("a", ipu_id=0):
            x = x + 1
        return x + 1

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block"):
        poptorch.inferenceModel(forward)(ONE)


@pytest.mark.parametrize(
    ("strategy", "error", "words"),
    [
        (poptorch.PipelinedExecution("a", "b"), AssertionError, "Unknown Block 'first' list of"),
        (poptorch.PipelinedExecution(), poptorch.Error, "deviceIterations must be greater"),
    ],
)
def test_impossible_stages(strategy, error, words):
    options = poptorch.Options().setExecutionStrategy(strategy)
    with pytest.raises(error, match=words):
        poptorch.inferenceModel(Classifier(second=1), options)(batch(1)[0])


def test_same_as_ipu_needs_an_ipu():
    layer = poptorch.BeginBlock(nn.Linear(1, 1), "a")
    with pytest.raises(AssertionError, match="SameAsIpu was selected but no IPU was specified"):
        poptorch.inferenceModel(layer)(ONE)


def test_training_pipelines_need_micro_batches():
    model = Classifier(second=1)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(model, options)
    with pytest.raises(
        poptorch.Error,
        match=r"pipeline stages \(3\).* a model with 2 pipeline stages .* additional 1 stages",
    ):
        executor(*batch(2))


def test_a_number_of_ipus_is_a_power_of_two():
    model = Classifier(second=2)
    x, _ = batch(1)
    with pytest.raises(poptorch.Error, match=r"specifies the use of 3 IPUs.* a minimum of 4 in"):
        poptorch.inferenceModel(model, sharded())(x)
    for options in (sharded().autoRoundNumIPUs(True), sharded().useIpuModel(True)):
        assert poptorch.inferenceModel(model, options)(x).shape == (1, 3)
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)"):
        poptorch.inferenceModel(Classifier(second=64), sharded())(x)


def test_a_weight_has_one_ipu_in_a_pipeline():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            for ipu in range(2):
                poptorch.Block.start(str(ipu), ipu_id=ipu)
                x = self.layer(x)
            return x

    options = poptorch.Options().deviceIterations(2)
    with pytest.raises(poptorch.Error, match=r"Can not copy variable tensor layer\.weight between"):
        poptorch.inferenceModel(Tied(), options)(torch.ones(2, 2))


def test_blocks_do_nothing_on_the_host():
    model = Classifier(second=1)
    x, _ = batch(2)
    assert torch.equal(model(x), Classifier()(x))
