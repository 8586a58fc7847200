"""Check that `ipu_dynamo.explain` says what became of a model, and leaves the model alone."""

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, Block, CompileError, Strategy

EAGER = {"engine": "eager"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        BeginBlock(self.first, "encoder", ipu_id=1)
        BeginBlock(self.second, "decoder", ipu_id=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


def test_blocks_stages_and_programs():
    explained = ipu_dynamo.explain(Model(), torch.randn(8, 4), options=EAGER)
    (graph,) = explained.graphs
    places = [(place.block, place.stage, place.ipu) for place in graph.blocks]
    assert places == [("'encoder'", 0, 1), ("'decoder'", 1, 0)]
    assert sum(place.operators for place in graph.blocks) == graph.operators
    assert [program.kind for program in graph.programs] == ["forward", "backward"]
    assert [kind for kind, _ in graph.passes] == ["captured", "joint", "forward", "backward"]
    assert "test_explain.py" in graph.first_line
    assert explained.breaks == explained.skipped == ()
    text = str(explained)
    assert text.startswith("1 graph, 0 breaks, 2 programs\n")
    assert "block 'encoder' -> stage 0 -> ipu1" in text
    with torch.no_grad():
        explained = ipu_dynamo.explain(Model(), torch.randn(8, 4), options=EAGER)
    assert [program.kind for program in explained.graphs[0].programs] == ["inference"]


def test_leaves_model_inputs_and_random_numbers_alone():
    torch.manual_seed(3)
    model, x = Model(), torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    ipu_dynamo.explain(model, x, options=EAGER)
    assert all(torch.equal(model.state_dict()[name], old) for name, old in before.items())
    assert torch.equal(torch.get_rng_state(), state)

    given = torch.zeros(3)
    ipu_dynamo.explain(lambda t: t.add_(1), given, options=EAGER)
    assert given.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.inductor
def test_which_library_computes_products(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_MATMUL", "onednn")
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    explained = ipu_dynamo.explain(model, x, options={"engine": "inductor"})
    found = {(use.of, use.choice, use.count) for use in explained.matmuls}
    assert found == {("tiny a @ b.t()", "onednn", 1), ("tiny a.t() @ b", "onednn", 1)}
    assert "matmuls:\n  1 x tiny a @ b.t(): onednn" in str(explained)
    assert ipu_dynamo.explain(model, x, options=EAGER).matmuls == ()


def test_who_set_the_options(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    options = {"micro_batches": 2}
    explained = ipu_dynamo.explain(Model(), torch.randn(8, 4), options=options)
    by = {setting.name: (setting.value, setting.by) for setting in explained.settings}
    assert by["engine"] == ("eager", "environment variable IPU_DYNAMO_ENGINE")
    assert by["micro_batches"] == (2, "given")
    assert by["fallback"] == ("error", "default")
    assert by["strategy"] == (
        Strategy(kind="pipelined"),
        "default, made pipelined by micro_batches",
    )
    assert "fallback = 'error'  (default)" in str(explained)


def test_breaks_and_what_is_not_captured():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x):
            with Block("a"):
                y = x * 2
            print()
            with Block("b"):
                y = y + 1
            return self.lstm(y)[0]

    explained = ipu_dynamo.explain(Broken(), torch.randn(2, 3), options=EAGER)
    assert len(explained.graphs) == 2
    assert explained.breaks[0].where.startswith("test_explain.py:")
    assert any("RNN" in reason for reason in explained.skipped)
    assert "ends at a graph break: test_explain.py:" in str(explained)
    assert "not captured, so PyTorch runs it itself:" in str(explained)


def test_what_cannot_be_placed():
    options = {"engine": "eager", "fallback": "allow"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = ipu_dynamo.explain(lambda x: x[x > 0], torch.randn(4), options=options)
        (graph,) = explained.graphs
        assert graph.programs == ()
        assert "cannot be placed: 1 x indexing: the shape of a result" in str(explained)
        with pytest.raises(CompileError, match="cannot be placed"):
            ipu_dynamo.explain(lambda x: x[x > 0], torch.randn(4), options=EAGER)


def test_a_compiled_model_can_be_explained():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    (graph,) = ipu_dynamo.explain(compiled, torch.randn(8, 4), options=EAGER).graphs
    assert len(graph.blocks) == 2
