"""Check that another process goes on with a saved program, with the bits of not stopping."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    AutomaticLossScaling,
    BeginBlock,
    Location,
    Locations,
    ReplicaGroups,
    StageSpec,
    Strategy,
    compile_training,
    save,
)
from ipu_dynamo.testing import assert_same_bits
from tests.whole_step.saving.go_on import go_on

ROOT = Path(__file__).parents[3]


class Net(nn.Module):
    """Tied weights, a batch norm, dropout."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(8, 4)
        self.register_buffer("unused", torch.ones(2), persistent=False)
        self.to(dtype)

    def forward(self, x, y):
        h = torch.relu(self.norm(self.first(x)))
        h = F.dropout(torch.tanh(self.tied(h)), 0.2)
        scores = self.last(h)
        return F.cross_entropy(scores, y), scores


class Grouped(nn.Module):
    """A weight of which each group of replicas has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x, y):
        scores = x @ self.weight
        return F.cross_entropy(scores, y), scores


def staged(model):
    """`model` in two blocks."""
    BeginBlock(model.norm, "second", ipu_id=1)
    return model


TWO = (StageSpec(("first",)), StageSpec(("second",)))
PHASES = ((StageSpec(("first",)),), (StageSpec(("second",)),))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any]
    model: Any = Net
    optimizer: Any = sgd
    dtype: torch.dtype = torch.float32
    blocks: bool = False
    marks: list[Any] = field(default_factory=list)


def options_of(kind, **more):
    options = {"gradient_accumulation": 3, "seed": 3, "engine": "eager", **more}
    return options | {"strategy": Strategy(kind=kind)}


OFF_CHIP = Locations(
    weights=Location(off_chip=True, sharded=True),
    optimizer_state=Location(off_chip=True, sharded=True),
)
CASES = [
    Case("one", options_of("sharded", device_iterations=2)),
    Case("sharded", options_of("sharded"), blocks=True),
    Case("pipelined", options_of("pipelined", device_iterations=2), blocks=True),
    Case(
        "zero-bubble",
        options_of("pipelined") | {"strategy": Strategy(kind="pipelined", schedule="zero_bubble")},
        blocks=True,
    ),
    Case("replicas", options_of("sharded", replicas=2, recompute="all")),
    Case("shards", options_of("sharded", replicas=2, locations=OFF_CHIP)),
    Case(
        "adamw",
        options_of("sharded", floating_point_exceptions=True),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    ),
    Case(
        "rmsprop",
        options_of("sharded", guard_updates=True),
        optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    ),
    Case(
        "half",
        options_of(
            "sharded",
            narrow=True,
            stochastic_rounding=True,
            automatic_loss_scaling=AutomaticLossScaling(period=2),
        ),
        dtype=torch.float16,
    ),
    Case(
        "groups",
        options_of("sharded", replicas=4, replica_groups={"weight": ReplicaGroups(2)}),
        model=Grouped,
    ),
]
for kind, liveness in (
    ("serial_phased", "off_chip_after_each_phase"),
    ("parallel_phased", "off_chip_after_fwd"),
):
    strategy = Strategy(kind=kind, phases=PHASES, liveness=liveness)
    CASES.append(Case(kind, options_of("sharded") | {"strategy": strategy}, blocks=True))
FEW = ("one", "pipelined", "replicas", "half", "parallel_phased")
INDUCTOR = [
    Case("fused", {"seed": 3, "engine": "inductor"}),
    Case(
        "deferred",
        {"gradient_accumulation": 3, "seed": 3, "engine": "inductor", "side_by_side": True},
        model=Grouped,
    ),
]
del kind, liveness, strategy


def begun(case):
    """A trained model with its batch."""
    torch.manual_seed(1)
    model = case.model() if case.model is not Net else Net(case.dtype)
    if case.blocks:
        BeginBlock(model.first, "first", ipu_id=0)
        staged(model)
    if case.name == "deferred":
        model.weight.data = model.weight.data[0].clone()
    options = case.options
    rows = options.get("gradient_accumulation", 1) * options.get("device_iterations", 1)
    rows *= options.get("replicas", 1) * 4
    batch = [torch.randn(rows, 8, dtype=case.dtype), torch.randint(0, 4, (rows,))]
    run = compile_training(model, case.optimizer(model), options, loss=0)
    for _ in range(2):
        run(*batch)
    return model, run, batch


def check(cases, folder, **environment):
    """Save each case, let another process go on with all of them, and compare."""
    runs = {}
    for case in cases:
        model, run, batch = begun(case)
        save(run, folder / f"{case.name}.saved")
        torch.save(batch, folder / f"{case.name}.batch")
        run.state_dict = model.state_dict
        runs[case.name] = go_on(run, batch)
    command = [sys.executable, "-m", "tests.whole_step.saving.go_on", str(folder)]
    environment = {**os.environ, "THREADS": str(torch.get_num_threads()), **environment}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=3000)
    for name, expected in runs.items():
        found = torch.load(folder / f"{name}.found", weights_only=True)
        assert_same_bits(found["returned"], expected["returned"])
        weights = expected["weights"]
        assert found["weights"].keys() == weights.keys()
        for key, tensor in weights.items():
            assert torch.equal(found["weights"][key], tensor), (name, key)


@pytest.mark.slow
def test_strategies_go_on(tmp_path):
    check([case for case in CASES if case.name in FEW], tmp_path)


@pytest.mark.slow
def test_all_strategies_go_on(tmp_path):
    check(CASES, tmp_path)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_functions_go_on(tmp_path):
    check(INDUCTOR[:1], tmp_path)


@pytest.mark.slow
@pytest.mark.inductor
def test_another_cache_folder_changes_no_bit(tmp_path):
    cases = [*INDUCTOR]
    for case in (case for case in CASES if case.name in FEW):
        options = case.options | {"engine": "inductor"}
        cases.append(Case(f"{case.name}-compiled", options, case.model, case.optimizer,
                              case.dtype, case.blocks))  # fmt: skip
    cache = tmp_path / "cache"
    check(
        cases, tmp_path, IPU_DYNAMO_CACHE_DIR=str(cache), TORCHINDUCTOR_CACHE_DIR=str(cache / "i")
    )
