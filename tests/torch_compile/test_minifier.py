"""Check that PyTorch's minifier knows the backend by its name, and finds the operator at fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = '''
import torch

from ipu_dynamo.torch_compile.backend import ipu
from ipu_dynamo.runtime.engines.engines import EagerEngine

if "ipu" not in torch._dynamo.list_backends():  # the package is not installed
    torch._dynamo.register_backend(ipu, name="ipu")
compile_right = EagerEngine.compile


def compile_wrong(self, recipes):
    """Fail where there is a tanh."""
    operators = [node for recipe in recipes for node in recipe.function.operators]
    if any(node.target is torch.ops.aten.tanh.default for node in operators):
        raise ValueError("planted")
    return compile_right(self, recipes)


EagerEngine.compile = compile_wrong
'''
PROGRAM = """
import planted
import torch
from torch import nn


def model(x):
    return torch.tanh(x.sin() + 1).relu().cos()


torch.compile(model, backend="ipu")(torch.randn(4))
"""


@pytest.mark.slow
def test_minifier_finds_the_operator_that_fails(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "IPU_DYNAMO_ENGINE": "eager",
        "TORCH_COMPILE_DEBUG_DIR": str(tmp_path),
    }

    def run(*arguments, **more):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | more, capture_output=True, text=True
        )

    failed = run("program.py", TORCHDYNAMO_REPRO_AFTER="dynamo", TORCHDYNAMO_REPRO_LEVEL="2")
    assert "ValueError while compiling: planted" in failed.stderr
    (launcher,) = tmp_path.rglob("minifier_launcher.py")
    assert "backend='ipu'" in launcher.read_text()
    start = f"import planted, runpy; runpy.run_path({str(launcher)!r}, run_name='__main__')"
    minified = run("-c", start)
    (repro,) = tmp_path.rglob("repro.py")
    text = repro.read_text()
    assert "tanh" in text, minified.stderr
    assert "sin()" not in text
    assert "cos()" not in text
