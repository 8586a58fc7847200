"""Check that what a machine decided is written down, read back, and decided by again."""

import json

import pytest
import torch
from torch import nn

from ipu_dynamo import compile_inference, load, save
from ipu_dynamo.ops import onednn
from ipu_dynamo.runtime.engines.engines import EagerEngine, InductorEngine
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.tune import matmul_choice
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_classes import MEASURED
from ipu_dynamo.whole_step.saving import decided

CONVOLUTION = ConvolutionShape((2, 3, 8, 8), (4, 3, 3, 3), (1, 1), (0, 0), (True, False, True))


def figures(torch_seconds, onednn_seconds):
    """Products of every class take so long."""
    ways = {"torch": torch_seconds, "onednn": onednn_seconds}
    return Figures(
        None, dict.fromkeys(MEASURED, ways), {CONVOLUTION: {"torch": 1e-3, "matmuls": 2e-3}}
    )


def measure(monkeypatch, found):
    """Let this be what is measured here."""
    made = matmul_choice.MatmulChoice.__init__
    monkeypatch.setattr(made, "__defaults__", (None, found.matmuls.get))


@pytest.mark.parametrize("given", [figures(2e-3, 1e-3), Figures("onednn"), Figures(None)])
def test_figures_come_back(given):
    engine = InductorEngine()
    written = json.loads(json.dumps(decided.write_decided((), engine, given)))
    assert decided.read_decided(written, engine) == given
    assert decided.read_decided(written, EagerEngine()) is None


@pytest.mark.parametrize("what", ["machine", "threads", "engine", "float32", "ipu_dynamo"])
def test_another_machine_decides_by_itself(what, caplog):
    engine = InductorEngine()
    written = decided.write_decided((), engine, figures(2e-3, 1e-3))
    written["here"][what] = "other"
    with caplog.at_level("INFO", "ipu_dynamo.program"):
        assert decided.read_decided(written, engine) is None
    assert f"saved by another {what}" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"library": "other"},
        {"matmuls": {"huge a @ b": {"torch": 1.0, "onednn": 1.0}}},
        {"matmuls": {"large a @ b": {"torch": 1.0}}},
        {"matmuls": []},
        {"convolutions": [{"x": [1]}]},
        {"more": 1},
    ],
)
def test_other_figures_are_refused(changed):
    engine = InductorEngine()
    written = decided.write_decided((), engine, figures(2e-3, 1e-3))
    written["figures"] |= changed
    with pytest.raises(SavedProgramError) as caught:
        decided.read_decided(written, engine)
    assert caught.value.reason is Reason.CONTENT


def called(run):
    """The operators of what is compiled."""
    (recipe,) = run.executable.host_program.plan.recipes
    return [node.target for node in recipe.lowered.operators]


@pytest.mark.inductor
def test_a_loaded_program_computes_with_the_libraries_that_it_was_saved_with(tmp_path, monkeypatch):
    """Whatever would be measured here now."""
    monkeypatch.delenv("IPU_DYNAMO_MATMUL", raising=False)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    measure(monkeypatch, figures(2e-3, 1e-3))
    run = compile_inference(model, {"engine": "inductor"})
    expected = run(torch.ones(128, 256))
    assert onednn.matmul in called(run)
    save(run, tmp_path / "saved")
    measure(monkeypatch, figures(1e-3, 2e-3))
    loaded = load(tmp_path / "saved")
    assert onednn.matmul in called(loaded)
    assert torch.equal(loaded(torch.ones(128, 256)), expected)
