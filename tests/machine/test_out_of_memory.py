"""Check that a program that does not fit is refused where users ask, and nowhere else."""

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Options, compile_inference, compile_training
from ipu_dynamo.errors import CompileError, OutOfMemory
from ipu_dynamo.machine import machines
from ipu_dynamo.memory_limit import ENFORCE_MEMORY


class Outer(nn.Module):
    """A model whose largest tensor is that of one line."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 3000))
        self.head = nn.Linear(3000, 2)

    def forward(self, x):
        product = x * self.w  # the largest
        return self.head(product).square().mean()


X = torch.ones(500, 1)
LARGEST = "product = x * self.w"


@pytest.fixture
def ipu_with(monkeypatch):
    """Name an IPU `small` whose tiles have so many bytes."""

    def name(tile_bytes):
        ipu = machines["bow"].ipu
        small = replace(ipu, tile_bytes=tile_bytes + int(ipu.reserved_bytes))
        monkeypatch.setitem(machines, "small", replace(machines["bow"], name="small", ipu=small))

    return name


@pytest.fixture
def tile():
    """The bytes that training needs on the fullest tile."""
    model = Outer()
    prediction = ipu_dynamo.predict(model, X, optimizer=sgd(model), loss=0)
    return prediction.verdict.tile


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(**options):
    model = Outer()
    step = compile_training(model, sgd(model), Options(engine="eager", **options), loss=0)
    return step(X)


def test_a_program_that_does_not_fit_is_refused(ipu_with, tile):
    ipu_with(tile.low - 1)
    with pytest.raises(OutOfMemory) as caught:
        train(enforce_memory="small")
    text = str(caught.value)
    assert isinstance(caught.value, CompileError)
    assert caught.value.id == "out-of-memory"
    assert "ipu_dynamo.errors out-of-memory" in caught.value.__notes__[0]
    assert "IPU 0" in text
    for nbytes in (tile.low, tile.central, tile.high):
        assert f"{nbytes / 1024:.1f} KiB" in text
    largest = [line for line in text.splitlines() if "%" in line]
    assert len(largest) == 5
    lines, start = inspect.getsourcelines(Outer)
    number = start + next(n for n, line in enumerate(lines) if LARGEST in line)
    assert f"test_out_of_memory.py:{number} in forward" in text
    assert any(f"test_out_of_memory.py:{number}" in line for line in largest[:2])


def test_the_environment_asks_for_all_programs(ipu_with, tile, monkeypatch, tmp_path):
    ipu_with(tile.low // 4)
    compiled = compile_inference(Outer(), Options(engine="eager"))
    compiled(X)
    ipu_dynamo.save(compiled, tmp_path / "outer.ipu")
    monkeypatch.setenv(ENFORCE_MEMORY, "small")
    with pytest.raises(OutOfMemory):
        train()
    with pytest.raises(OutOfMemory):
        ipu_dynamo.load(tmp_path / "outer.ipu")


def test_each_program_of_torch_compile_is_judged(ipu_with, tile):
    ipu_with(tile.low // 4)
    options = {"engine": "eager", "enforce_memory": "small"}
    compiled = torch.compile(Outer(), backend="ipu", options=options)
    with pytest.raises(OutOfMemory, match="forward program"):
        compiled(X)
    torch._dynamo.reset()


def test_a_tight_program_warns(ipu_with, tile):
    ipu_with(tile.high - 1)
    with pytest.warns(UserWarning, match="may not fit on small"):
        train(enforce_memory="small")


def test_a_program_that_fits_says_nothing(ipu_with, tile):
    ipu_with(tile.high)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(enforce_memory="small")


def test_nobody_asks(ipu_with):
    ipu_with(1)
    assert torch.isfinite(torch.as_tensor(train()))


def test_an_unknown_ipu_is_refused():
    with pytest.raises(ipu_dynamo.errors.OptionError, match="bows"):
        train(enforce_memory="bows")
