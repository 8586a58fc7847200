"""Check that another process does the same for a program, to the bit, however busy the machine is.

What is measured decides which code runs; so it is measured once and kept, or not at all.
"""

import json
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ipu_dynamo.capture.trace import read_arguments
from ipu_dynamo.options import Options, Strategy
from ipu_dynamo.testing import BlockPlacement, Recipe, Step, options_for, recipes
from ipu_dynamo.tune.intra_op import intra_op_threads
from ipu_dynamo.whole_step.compile_model import compile_model
from ipu_dynamo.whole_step.optimizer.torch_optimizers import describe
from tests.properties.jobs import THREADS, Images, Job
from tests.properties.running import draw_placement, slow

ROOT = Path(__file__).parents[2]
# Of 8 million operations, which is enough for the libraries to be measured.
WIDE = Recipe((Step("linear"), Step("gelu"), Step("linear")), width=256, rows=64, losses=("mse",))
CUT = Strategy("pipelined", ipus=2)


def drawn(count, engine):
    """Jobs with every strategy; some models are cut by what their operators take."""
    jobs = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=recipes(random=True), automatic=st.booleans(), data=st.data())
    def draw(recipe, automatic, data):
        kind = data.draw(st.sampled_from(["sharded", "pipelined"]))
        if automatic and (kind == "sharded" or not recipe.shares_buffers):
            placement = BlockPlacement(strategy=Strategy(kind, ipus=2))
        else:
            placement = draw_placement(data, recipe)
        options = data.draw(options_for(engine=engine, placement=placement))
        options = replace(options, gradient_accumulation=max(3, options.gradient_accumulation))
        jobs.append(Job(recipe, placement, replace(options, seed=7)))

    draw()
    return jobs


@contextmanager
def busy_machine():
    """As many processes that compute as there are cores."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def assert_another_process_does_the_same(jobs, folder, monkeypatch, here, there, beside):
    """For every job the same host text and bits.

    Args:
        here, there: environment variables that name the cache folder, in this and in the other one.
        beside: what is done beside the other process, once that has imported all it needs.
    """
    monkeypatch.delenv("IPU_DYNAMO_CACHE_DIR")
    with monkeypatch.context() as patch, intra_op_threads(THREADS):
        for name, value in here.items():
            patch.setenv(name, value)
        expected = [job.run(workers=1) for job in jobs]
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    files = [str(folder / "jobs"), str(folder / "found")]
    command = [sys.executable, "-m", "tests.properties.jobs", *files, "4"]
    environment = {**os.environ, **there}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        with beside:
            assert other.wait(timeout=3000) == 0
    found = json.loads((folder / "found").read_text())
    for job, (text, bits), (other_text, other_bits) in zip(jobs, expected, found, strict=True):
        assert other_text == text, job
        assert other_bits == bits, job


def assert_same_with_a_folder(jobs, folder, monkeypatch):
    """In two processes that share a folder, the second beside busy loops."""
    shared = {"IPU_DYNAMO_CACHE_DIR": str(folder / "shared")}
    assert_another_process_does_the_same(jobs, folder, monkeypatch, shared, shared, busy_machine())


def assert_same_without_a_folder(jobs, folder, monkeypatch):
    """In two processes that can write none."""
    (folder / "file").touch()
    off, nowhere = {"IPU_DYNAMO_CACHE_DIR": "off"}, {"XDG_CACHE_HOME": str(folder / "file")}
    assert_another_process_does_the_same(jobs, folder, monkeypatch, off, nowhere, nullcontext())


@pytest.mark.slow
def test_a_process_with_the_same_folder_decides_and_computes_the_same(tmp_path, monkeypatch):
    options = Options("inductor", gradient_accumulation=3, seed=7)
    wide = Job(Recipe(width=256, rows=64), BlockPlacement(), options)
    cut = Job(WIDE, BlockPlacement(), replace(options, engine="eager", strategy=CUT))
    assert_same_with_a_folder([wide, cut, *drawn(3, "eager")], tmp_path, monkeypatch)


@pytest.mark.slow
def test_processes_without_a_folder_decide_and_compute_the_same(tmp_path, monkeypatch):
    cut = Job(
        WIDE, BlockPlacement(), Options("eager", gradient_accumulation=3, seed=7, strategy=CUT)
    )
    assert_same_without_a_folder([cut, *drawn(3, "eager")], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("check", [assert_same_with_a_folder, assert_same_without_a_folder])
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_other_processes_decide_and_compute_the_same(engine, check, tmp_path, monkeypatch):
    options = Options(engine, gradient_accumulation=4, seed=7)
    chosen = [
        Job(WIDE, BlockPlacement(), options),
        Job(WIDE, BlockPlacement(), replace(options, side_by_side=True)),
        Job(WIDE, BlockPlacement(), replace(options, strategy=Strategy("sharded", ipus=2))),
        Job(WIDE, BlockPlacement(), replace(options, strategy=CUT)),
        Job(Images(), BlockPlacement(), options),
        Job(Images(), BlockPlacement(), replace(options, strategy=CUT)),
    ]
    check([*chosen, *drawn(40 if engine == "eager" else 8, engine)], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.examples(60)
@pytest.mark.quick(7)
@given(recipe=recipes(random=True), kind=st.sampled_from(["sharded", "pipelined"]), data=st.data())
def test_equal_costs_cut_a_model_equally(recipe, kind, data):
    """For any engine, any number of workers, in any process."""
    if recipe.shares_buffers:
        kind = "sharded"
    options = data.draw(options_for(placement=BlockPlacement(strategy=Strategy(kind, ipus=2))))
    options = replace(options, gradient_accumulation=max(3, options.gradient_accumulation))
    texts, costs = set(), ()
    for engine, workers in (("eager", 1), ("inductor", 4)):
        model = recipe.build()
        strategy = replace(options.strategy, costs=costs)
        chosen = replace(options, engine=engine, workers=workers, strategy=strategy)
        example = read_arguments(model, recipe.data(1), {})
        groups = describe(slow(model), dict(model.named_parameters()))
        compiled = compile_model(model, example, chosen, groups, training=True)
        texts.add(compiled.program.text())
        costs = compiled.costs
    assert torch.tensor(costs).sum() > 0
    assert len(texts) == 1
