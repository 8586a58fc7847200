"""Check setters that do more than store one value."""

import pytest
import torch

import poptorch
from poptorch import enums


def test_the_seed_reaches_the_hosts_generator_at_once():
    poptorch.Options().randomSeed(1234)
    drawn = torch.rand(4)
    torch.manual_seed(1234)
    assert torch.equal(drawn, torch.rand(4))


def test_the_output_mode_has_a_default():
    options = poptorch.Options()
    assert options.defaultOutputMode()
    with pytest.raises(AssertionError, match="output mode"):
        options.toDict()
    assert not options.outputMode(enums.OutputMode.All).defaultOutputMode()


def test_anchors_are_stored_with_their_period():
    options = poptorch.Options()
    options._freeze()  # which does not catch anchors
    assert options.anchorTensor("a", "long a") is None
    options.anchorTensor("b", "long b", enums.OutputMode.EveryN, 4)
    options.anchorTensor(
        short_name="c", long_name="long c", output_mode=enums.OutputMode.Sum, output_return_period=4
    )
    assert options.anchored_tensors == {
        "a": ["long a", True, None, 1],
        "b": ["long b", False, enums.OutputMode.EveryN, 4],
        "c": ["long c", False, enums.OutputMode.Sum, 1],
    }


def test_precision_and_dithering_share_the_convolutions_settings():
    options = poptorch.Options()
    options.Training.setConvolutionDithering(False)
    options.Precision.setPartialsType(torch.float)
    assert options._Popart.options["convolutionOptions"] == {
        "enableConvDithering": "false",
        "partialsType": "float",
    }


def test_the_environment_of_mpi_names_the_process(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("WORLD", "2")
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    distributed.setEnvVarNames(var_num_processes="WORLD", var_process_id="NOT_SET")
    assert (distributed.processId, distributed.numProcesses) == (0, 2)
    distributed.configureProcessId(7, 2)  # is not checked
    assert distributed.disable() is distributed
    assert (distributed.processId, distributed.numProcesses) == (0, 1)


def test_engine_options_of_the_environment_go_first(monkeypatch, capsys):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "there"}')
    options = poptorch.Options().enableProfiling("here")
    assert "POPLAR_ENGINE_OPTIONS sets autoReport.directory" in capsys.readouterr().err
    assert options._Popart.options["engineOptions"]["autoReport.directory"] == "there"
    assert options._Popart.options["engineOptions"]["autoReport.all"] == "true"
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "not JSON")
    with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS must be a JSON object"):
        poptorch.Options().enableProfiling()


def test_stable_norms_compute_in_float32():
    norm = torch.nn.GroupNorm(1, 2).half()
    types = []
    for enabled in (False, True):
        options = poptorch.Options().showCompilationProgressBar(False).enableStableNorm(enabled)
        executor = poptorch.inferenceModel(norm, options)
        executor.compile(torch.ones(2, 2, dtype=torch.half))
        text = str(executor._core.program)
        (line,) = [line for line in text.splitlines() if "aten.native_group_norm" in line]
        types.append("_f32 = " in line)
    assert types == [False, True]
