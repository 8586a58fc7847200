"""Check what users are told of options: those without effect, and those that errors come from."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ipu_dynamo import programs
from ipu_dynamo.saved_model import convert, load, save
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings
from ipu_dynamo.saved_model.files.named_errors import naming
from tests.saved_model.converting import embedded
from tests.saved_model.test_command import SERVE, run  # noqa: F401  a fixture

MANUAL = {"converter": "manual", "manual_pipeline_config": [["."]], "device_info": [0]}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "p"
    save(folder, {"serving_default": (nn.Linear(4, 4), (torch.randn(3, 4),))})
    return folder


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"output_dir": "file/out"}, "output_dir: .*file"),
        (embedded("../file/cache"), "embedded_runtime_exec_cachedir: .*file"),
        (
            embedded(pipeline_cfg={**MANUAL, "solution_dir": "file/s"}),
            "pipeline_cfg: solution_dir: .*file",
        ),
        (
            embedded(pipeline_cfg={**MANUAL, "profiling_root_dir": "file/p"}),
            "pipeline_cfg: profiling_root_dir: .*file",
        ),
        ({"config_file": "file/none"}, "config_file: file/none cannot be read"),
        (
            embedded(pipeline_cfg={"converter": "load", "solution_path": "none"}),
            "solution_path: none is no file",
        ),
    ],
)
def test_errors_of_the_system_name_their_option(source, tmp_path, options, problem):
    (tmp_path / "file").write_text("no folder")
    arguments = {"output_dir": "out", **options}
    with pytest.raises((OSError, ValueError), match=problem):
        convert(source, **arguments)
    assert os.listdir(tmp_path) == ["file"]


def test_proportions_are_in_the_program(tmp_path):
    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x).flatten(1) @ x.flatten(1).t()

    x = torch.randn(2, 3, 8, 8)
    save(tmp_path / "p", {"serving_default": (Model(nn.Conv2d(3, 3, 1)), (x,))})
    shares = {"matmul_amp": 0.25, "conv_amp": 0.125}
    convert(tmp_path / "p", tmp_path / "out", num_ipus=1, int64_to_int32_conversion=True, **shares)
    with load(tmp_path / "out")["serving_default"] as signature:
        signature.configure(IpuSettings(**shares))
        signature(x=x)
    program = programs()[-1]
    assert program.memory_proportions == (0.25,)
    found = {
        str(node.target): node.meta["ipu.memory"]
        for function in program.functions
        for node in function.operators
        if "ipu.memory" in node.meta
    }
    assert found == {"aten.convolution.default": 0.125}


def test_results_and_programs_that_cannot_be_reached_name_their_option(source, tmp_path, run):  # noqa: F811
    (tmp_path / "file").write_text("no folder")
    exprs = ("--input_exprs", "input=np.ones((3, 4))")
    command = ("run", "--dir", source, *SERVE, *exprs, "--outdir", tmp_path / "file/results")
    status, _, err = run(*command)
    assert status == 1
    assert re.search("^error: .*--outdir: .*file", err.splitlines()[-1])
    (tmp_path / "p").mkdir()
    (tmp_path / "p/saved_model.json").write_bytes((source / "saved_model.json").read_bytes())
    with pytest.raises((OSError, ValueError), match=r"programs/serve/serving_default\.pt2"):
        load(tmp_path / "p")


def test_the_innermost_option_is_named_and_the_kind_stays():
    missing = pytest.raises(FileNotFoundError, match=r"inner: No such file.*none")
    with missing as caught, naming("outer"), naming("inner"):
        Path("none").read_bytes()
    assert caught.value.errno == 2
    assert "outer" not in str(caught.value)
    plain = pytest.raises(IsADirectoryError, match=r"^inner: text$")
    with plain, naming("outer"), naming("inner"):
        raise IsADirectoryError("text")
