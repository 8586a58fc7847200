"""Check inference that cannot fill its pipeline: permitted it runs sharded, else it is an error."""

import logging

import pytest
import torch
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.errors import OptionError
from ipu_dynamo.passes.traced.stages.placement import PipelineSizeError
from ipu_dynamo.saved.options_json import read_options, write_options

PERMITS = Strategy(kind="pipelined", sharded_if_short=True)


def three_stages():
    """Stages on IPUs 0, 1 and 0 again."""
    layers = [BeginBlock(nn.Linear(4, 4), str(i), ipu) for i, ipu in enumerate((0, 1, 0))]
    return nn.Sequential(*layers)


def run(model, iterations, strategy=PERMITS, **more):
    options = Options(
        engine="eager", device_iterations=iterations, strategy=strategy, workers=2, **more
    )
    x = torch.randn(2 * iterations, 4)
    step = compile_inference(model, options)
    torch.testing.assert_close(step(x), model(x))
    return step.program


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("ipu_dynamo")]


@pytest.mark.parametrize("iterations", [1, 2])
def test_too_few_iterations_run_sharded_and_say_so_once(iterations, caplog):
    with caplog.at_level(logging.WARNING, "ipu_dynamo"):
        program = run(three_stages(), iterations)
    assert (program.order, program.num_ipus) == ("sequential", 2)
    (text,) = said(caplog)
    assert "3 stages" in text
    assert f"device_iterations={iterations}:" in text
    assert "inference_device_iterations=3" in text


def test_enough_iterations_make_a_pipeline_without_a_word(caplog):
    assert run(three_stages(), 3).order == "pipelined"
    assert not said(caplog)


def test_a_model_that_is_cut_by_cost_falls_back_too():
    costs = ((1.0, 0.0),) * 3
    strategy = Strategy(kind="pipelined", ipus=2, costs=costs, sharded_if_short=True)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    assert run(model, 1, strategy).order == "sequential"
    assert run(model, 2, strategy).order == "pipelined"


def test_others_stop_as_before():
    with pytest.raises(PipelineSizeError, match="3 stages needs at least 3"):
        run(three_stages(), 2, Strategy(kind="pipelined"))
    model = three_stages()
    step = compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Options(gradient_accumulation=4, strategy=PERMITS),
        loss=0,
    )
    with pytest.raises(PipelineSizeError, match="needs at least 5"):
        step(torch.randn(4, 4))
    with pytest.raises(OptionError, match="pipelined, not sharded"):
        Strategy(sharded_if_short=True)
    with pytest.raises(OptionError, match="True or False"):
        Strategy(kind="pipelined", sharded_if_short=1)


def test_saved_options_keep_the_permission():
    options = Options(strategy=PERMITS)
    assert read_options(write_options(options)) == options
