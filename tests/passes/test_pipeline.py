"""Check the order of the passes, what they leave between each other, and what they dump."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Block, CompileError, Options, compile_inference, compile_training
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.passes.pipeline import DUMP, lower, pipeline
from ipu_dynamo.passes.traced.differentiate import Differentiate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), BeginBlock(nn.Linear(4, 2), "second", 1)

    def forward(self, x, y):
        return F.mse_loss(self.second(F.dropout(self.first(x), 0.5)), y)


def batch():
    return torch.ones(2, 3), torch.ones(2, 2)


def captured(model, *, training=True):
    return trace(model, read_arguments(model, batch(), {}), training=training)


def names(passes):
    return [getattr(one, "__name__", type(one).__name__) for one in passes]


def test_order_of_the_passes():
    assert names(pipeline(Options(), training=True)) == [
        "OverlapIO",
        "mark_convolutions",
        "Placement",
        "IdentityLoss",
        "Precision",
        "Differentiate",
        "serialize_loss",
        "serialize_matmul",
        "round_scalars",
        "random_streams",
        "place_gradients",
        "ScaleLoss",
        "group_convolutions",
        "HalfPartials",
        "float_products",
        "StochasticRounding",
        "Recompute",
        "FloatingPointExceptions",
    ]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_every_pass_leaves_a_valid_capture_with_source_lines(training, narrow):
    capture = captured(Net(), training=training)
    for one in pipeline(Options(narrow=narrow), training=training):
        one(capture)
        capture.check()
        for node in capture.graph.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                assert "forward" in (node.meta.get("stack_trace") or ""), (
                    f"%{node.name} after {one}"
                )


@pytest.mark.parametrize("training", [False, True])
def test_every_pass_but_precision_changes_nothing_when_run_again(training):
    capture = captured(Net(), training=training)
    for one in pipeline(Options(), training=training):
        one(capture)
        before = str(capture.graph.graph)
        assert not one(capture)
        assert str(capture.graph.graph) == before


def test_options_are_the_fields_of_the_passes():
    options = Options(loss_scale=4.0, narrow=True, gradient_accumulation=8)
    _, _, placement, loss, precision, differentiate, *_ = pipeline(options, training=True, loss=1)
    assert placement.micro_batches == 8
    assert loss.output == 1
    assert precision.narrow
    assert differentiate.start == 4.0


def test_post_and_loss_divides_the_start_gradient_by_the_replicas():
    options = Options(mean_strategy="post_and_loss", replicas=4)
    passes = pipeline(options, training=True)
    (start,) = [one.start for one in passes if isinstance(one, Differentiate)]
    assert start == 0.25


def test_error_is_noted_with_its_pass():
    def model(x, y):
        return x.sum() + y.sum()

    with pytest.raises(CompileError, match="Couldn't find a loss") as caught:
        lower(captured(model), Options(), passes=pipeline(Options(), training=True))
    assert caught.value.__notes__ == ["in pass IdentityLoss(output=None)"]


# --- Dumps -------------------------------------------------------------------------------------


def test_dump_writes_the_graph_after_each_pass_and_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP, str(tmp_path / "new" / "folder"))
    model = Net()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), {"engine": "eager"})
    step.compile(*batch())
    files = sorted((tmp_path / "new" / "folder").iterdir())
    passes = [name.lower() for name in names(pipeline(Options(), training=True))]
    written = ["traced", *passes, "program"]
    assert [file.name for file in files] == [f"{i:02}_{name}.txt" for i, name in enumerate(written)]
    texts = dict(zip(written, [file.read_text() for file in files], strict=True))
    assert "ipu.begin_block" in texts["traced"]
    assert "ipu.begin_block" not in texts["placement"]
    assert texts["identityloss"] == texts["placement"]
    assert "mse_loss_backward" in texts["differentiate"]
    assert "aten.native_dropout.default" not in texts["random_streams"]
    assert texts["program"] == f"{step.program}\n"


def test_dump_of_a_model_that_fails_ends_before_the_pass(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP, str(tmp_path))

    def model(x):
        with Block("a", 0):
            x = x + 1
        return x * 2

    with pytest.raises(CompileError):
        compile_inference(model, {"engine": "eager"})(torch.ones(1))
    files = sorted(file.name for file in tmp_path.iterdir())
    # the next is placement, which failed
    assert files == ["00_traced.txt", "01_overlapio.txt", "02_mark_convolutions.txt"]


def test_nothing_is_dumped_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(DUMP, raising=False)
    monkeypatch.chdir(tmp_path)
    compile_inference(lambda x: x + 1, {"engine": "eager"})(torch.ones(1))
    assert not list(tmp_path.iterdir())
