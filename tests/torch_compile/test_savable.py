"""Check what compiled callables that were saved compute, where, and which calls they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import CompileError
from ipu_dynamo.torch_compile.backend import ipu

ROOT = Path(__file__).resolve().parents[2]
SCALE = torch.full((3,), 3.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        with ipu_dynamo.Block("first", ipu_id=0):
            h = torch.tanh(self.first(x))
        with ipu_dynamo.Block("second", ipu_id=1):
            return self.second(h)


def saved(model, path, *arguments):
    compiled = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": "eager"})
    compiled = compiled.forward if isinstance(model, nn.Module) else compiled
    compiled = compiled.aot_compile((arguments, {}))
    compiled.save_compiled_function(str(path))
    torch._dynamo.reset()
    return compiled


def loaded(path):
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def test_what_was_loaded_infers_and_trains_on_the_same_ipus(tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    first = saved(model, tmp_path / "net", x)
    for run in (first, loaded(tmp_path / "net")):
        torch.testing.assert_close(run(model, x), model(x))
        found = torch.autograd.grad(run(model, x).sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected)
    forward, backward = ipu_dynamo.programs()[-2:]
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert [v.ipu for v in forward.variables] == [0, 0, 1, 1]
    assert "test_savable.py" in forward.calls[0].source


def test_new_weights_are_used_without_compiling(tmp_path):
    model, x = Net(), torch.randn(5, 4)
    saved(model, tmp_path / "net", x)
    run, other = loaded(tmp_path / "net"), Net()
    torch.testing.assert_close(run(model, x), model(x))
    count = len(ipu_dynamo.programs())
    torch.testing.assert_close(run(other, x), other(x))
    assert len(ipu_dynamo.programs()) == count


def test_another_shape_is_refused(tmp_path):
    model = Net()
    saved(model, tmp_path / "net", torch.randn(5, 4))
    with pytest.raises(RuntimeError, match=r"size mismatch at index 0\. expected 5, actual 6"):
        loaded(tmp_path / "net")(model, torch.randn(6, 4))


def double(x):
    return x * 2 + SCALE


def test_a_function_and_its_constants_are_saved(tmp_path):
    with torch.no_grad():
        saved(double, tmp_path / "double", torch.ones(3))
        run = loaded(tmp_path / "double")
        torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 5.0))


VIEWS = {
    "by a size": lambda h: h.view(h.shape[0], 3, 1),
    "parts": lambda h: torch.stack(h.chunk(3, 1)),
    "of a view": lambda h: h.t()[1:].expand(2, -1, -1),
    "detached": lambda h: h * h.detach(),
}


class Viewing(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer, self.name = nn.Linear(4, 3), name

    def forward(self, x):
        return VIEWS[self.name](self.layer(x))


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_saved(tmp_path, name):
    model, x = Viewing(name), torch.randn(5, 4)
    saved(model, tmp_path / "net", x)
    run = loaded(tmp_path / "net")
    torch.testing.assert_close(run(model, x), model(x))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    found = torch.autograd.grad(run(model, x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_an_error_comes_when_compiling_and_not_when_loading():
    def positive(x):
        return x[x > 0]

    compiled = torch.compile(positive, backend=ipu, fullgraph=True)
    with pytest.raises(CompileError, match="depends on the values of a tensor"):
        compiled.aot_compile(((torch.ones(3),), {}))


@pytest.mark.slow
def test_another_process_loads_it(tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    saved(model, tmp_path / "net", x)
    torch.save((model.state_dict(), x, model(x).detach()), tmp_path / "values")
    program = (
        "import torch, sys\n"
        "from tests.torch_compile.test_savable import Net, loaded\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "weights, x, expected = torch.load(folder / 'values', weights_only=True)\n"
        "model = Net()\n"
        "model.load_state_dict(weights)\n"
        "torch.testing.assert_close(loaded(folder / 'net')(model, x), expected)\n"
        "assert not torch._dynamo.utils.counters['frames']\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    threads = str(torch.get_num_threads())  # PyTorch refuses what was compiled for another number
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
