"""Check what `import poptorch` offers, and beside what it refuses to be imported."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import poptorch
from tests.poptorch.fresh_process import fresh_processes

ROOT = Path(__file__).resolve().parents[2]


def environment_with(**more):
    """The environment of a process, without what is ours here."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POPTORCH", "RDMAV"))}
    return {**inherited, **more}


@pytest.fixture(scope="module")
def python():
    """Run code in a process of its own, in which `folder` can be imported from."""
    with fresh_processes() as processes:

        def run(code, folder=None, **environment):
            path = [str(ROOT), *([str(folder)] if folder else [])]
            return processes.run(code, folder or ROOT, path, environment_with(**environment))

        yield run


def installed(folder, version):
    """Make a folder look as if a distribution `poptorch` were installed in it."""
    info = folder / f"poptorch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: poptorch\nVersion: {version}\n")


def test_every_exported_name_exists():
    assert len(set(poptorch.__all__)) == len(poptorch.__all__)
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "ops",
            "BeginBlock Block BlockFunction CPU LegacyBeginBlockFn MultiConv NameScope cond "
            "ctc_beam_search_decoder custom_op dynamic_slice dynamic_update for_loop fps "
            "identity_loss ipu_print_tensor nearest nop recomputationCheckpoint removeBlocks "
            "serializedMatMul set_available_memory set_overlap_for_input set_overlap_for_output",
        ),
        (
            "options",
            "Attribute BlockId ConfigFileError Options ParallelPhasedExecution Phase "
            "PipelinedExecution SerialPhasedExecution ShardedExecution Stage "
            "TensorLocationSettings",
        ),
    ],
)
def test_names_are_in_the_modules_that_poptorch_has_them_in(module, names):
    found = importlib.import_module(f"poptorch.{module}")
    for name in names.split():
        assert getattr(found, name) is getattr(poptorch, name)
        assert name in found.__all__


def test_importing_loads_nothing_that_compiles(python):
    done = python(
        """
import sys, torch
before = set(sys.modules)
import poptorch
assert "trainingModel" in dir(poptorch)
poptorch.DataLoader(poptorch.Options(), torch.arange(4))
new = set(sys.modules) - before
heavy = ("sympy", "torch._dynamo", "torch._inductor", "ipu_dynamo.passes", "ipu_dynamo.capture")
assert not [name for name in new if name.startswith(heavy)], sorted(new)
"""
    )
    assert not done.returncode, done.stderr


def test_the_first_name_that_compiles_loads_all_of_them(python):
    done = python(
        """
import pickle, sys, poptorch
poptorch.nop = "set by a program"
assert not hasattr(poptorch, "trainingmodel")
from poptorch import inferenceModel, _impl
assert set(poptorch.__all__) <= set(vars(poptorch))
assert poptorch.nop == "set by a program"
assert pickle.loads(pickle.dumps(poptorch.PoplarExecutor)) is poptorch.PoplarExecutor
assert poptorch._impl is _impl is sys.modules["poptorch._impl"]
assert poptorch.poptorch_core.Error is poptorch.Error
"""
    )
    assert not done.returncode, done.stderr


def test_the_version_is_poptorchs_with_our_label():
    assert poptorch.__version__ == "3.4.0+ipu.dynamo"


def test_graphcores_distribution_stops_the_import(python, tmp_path):
    installed(tmp_path, "3.4.0+1234")
    done = python(
        """
import importlib
for name in ("poptorch", "popart", "popdist.poptorch", "poptorch"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(repr(error))
""",
        tmp_path,
    )
    errors = done.stdout.splitlines()
    assert len(errors) == 4, done.stderr
    assert all("3.4.0+1234" in error and "pip uninstall" in error for error in errors)


def test_our_own_distribution_does_not(python, tmp_path):
    installed(tmp_path, poptorch.__version__)
    assert not python("import poptorch", tmp_path).returncode


@pytest.mark.parametrize(("given", "expected"), [({}, "1"), ({"RDMAV_FORK_SAFE": "0"}, "0")])
def test_import_makes_verbs_fork_safe_unless_told(python, given, expected):
    code = "import os, poptorch; print(os.environ['RDMAV_FORK_SAFE'])"
    assert python(code, **given).stdout.strip() == expected


def test_an_unknown_log_level_stops_the_import(python):
    done = python("import poptorch", POPTORCH_LOG_LEVEL="LOUD")
    assert done.returncode
    assert "Unknown log level: LOUD" in done.stderr


@pytest.mark.parametrize("name", ["stdout", "stderr", "run.log"])
def test_the_log_goes_where_the_environment_says(python, tmp_path, name):
    code = "import poptorch; poptorch.logger.warning('hello')"
    done = python(code, tmp_path, POPTORCH_LOG_DEST=name)
    texts = {"stdout": done.stdout, "stderr": done.stderr}
    if name == "run.log":
        texts[name] = (tmp_path / name).read_text()
    assert [where for where, text in texts.items() if "hello" in text] == [name]


def test_a_process_that_ends_with_trained_models_says_nothing():
    code = """
import torch, poptorch

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.MSELoss())
model.forward = lambda x: model[1](model[0](x), x)
options = poptorch.Options().showCompilationProgressBar(False)
executor = poptorch.trainingModel(
    model, options, poptorch.optim.SGD(model.parameters(), lr=0.1)
)
executor(torch.ones(2, 2))
executor.cycle = executor  # so that only the end of the process destroys it
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment_with(IPU_DYNAMO_ENGINE="eager", PYTHONPATH=str(ROOT)),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
