"""Check that functions become the same code whichever process lowers them."""

import threading
import time

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo import Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import recipe_of
from ipu_dynamo.program import make_function
from ipu_dynamo.runtime.engines import compiled_stages, kernel_units, lowering_pool
from ipu_dynamo.runtime.engines.engines import InductorEngine
from ipu_dynamo.runtime.engines.job_process import CannotStart, JobFailed, JobProcess, ProcessDied
from ipu_dynamo.runtime.engines.lowering_job import JOB, load_lowered
from ipu_dynamo.runtime.engines.sent_functions import SentFunctions, can_be_sent
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR

pytestmark = pytest.mark.inductor


def recipe_for(function, *examples):
    """How a function of tensors becomes a callable."""
    graph = make_fx(function, tracing_mode="fake")(*examples)
    made = make_function(function.__name__, graph)
    return keyed(recipe_of(made, Options(), Machine("inductor")))


def recipes():
    """Of three functions, which have shapes of their own."""

    def scaled(x):
        return torch.softmax(x, 1) * 3, x.sum(0)

    return [recipe_for(scaled, torch.randn(4, width)) for width in (8, 16, 24)]


def inputs():
    torch.manual_seed(0)
    return [[torch.randn(4, width)] for width in (8, 16, 24)]


@pytest.fixture(scope="module")
def process():
    """One process for the file: its imports take four seconds."""
    process = JobProcess()
    yield process
    process.stop()


@pytest.fixture
def pool(process, monkeypatch, tmp_path):
    """Let two processes be worth it, of which the second is `process`; keep its outcomes."""
    monkeypatch.setattr(process, "stop", lambda: None)
    monkeypatch.setattr(process, "kill", lambda: None)
    monkeypatch.setattr(lowering_pool, "JobProcess", lambda: process)
    monkeypatch.setattr(lowering_pool, "WORTH_A_PROCESS", 1e-9)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    compiled_stages.forget()
    with torch._inductor.config.patch(compile_threads=2):
        yield
    compiled_stages.forget()


@pytest.fixture
def lowered_here(monkeypatch):
    """The widths of the functions that this process lowers, once all others have ended."""
    widths, lower = [], compiled_stages.lower

    def note(recipe):
        for thread in threading.enumerate():
            if thread.name == "lowering":
                thread.join()
        widths.append(recipe.lowered.inputs[0].shape[1])
        return lower(recipe)

    monkeypatch.setattr(compiled_stages, "lower", note)
    return widths


@pytest.fixture
def units(monkeypatch):
    """The files with kernels that a compiler gets."""
    sources, source_of = [], kernel_units.unit_source
    monkeypatch.setattr(
        kernel_units,
        "unit_source",
        lambda kernels: sources.append(source_of(kernels)) or sources[-1],
    )
    return sources


def compiled():
    """The results of the functions, compiled together."""
    stages = InductorEngine("off").compile(recipes())
    with torch.no_grad():
        return [stage(values) for stage, values in zip(stages, inputs(), strict=True)]


def lower_all(*, last_first=False):
    """Lower the functions and compile nothing; the last may be wanted while it is lowered."""
    first, second, third = recipes()
    codes = compiled_stages.MachineCodes()
    codes.begin([first, second, third])
    while last_first and not codes._pool.is_begun(third.key):
        time.sleep(0.01)
    for recipe in (third, first, second) if last_first else (first, second, third):
        assert codes.code_of(recipe) is not None
    codes.close()
    assert not codes.some_failed


def test_the_library_and_results_are_those_of_one_process(pool, lowered_here, units, tmp_path):
    found = compiled()
    assert lowered_here == [8]  # the process has lowered the others
    assert len(list((tmp_path / "stages").iterdir())) == 3  # each is kept under its key
    compiled_stages.forget()
    assert_same_bits(compiled(), found)  # from the disk
    assert lowered_here == [8]
    compiled_stages.forget()
    for path in (tmp_path / "stages").iterdir():
        path.unlink()
    with torch._inductor.config.patch(compile_threads=1):
        assert_same_bits(compiled(), found)
    assert lowered_here == [8, 8, 16, 24]
    together, alone = units
    assert together == alone


@pytest.mark.parametrize("failure", [ProcessDied("killed"), JobFailed("no", "no"), TypeError()])
def test_this_process_lowers_what_another_one_has_not(pool, lowered_here, monkeypatch, failure):
    class Failing:
        pid = 0

        def ask(self, *_):
            raise failure

        def stop(self):
            pass

        kill = stop

    monkeypatch.setattr(lowering_pool, "JobProcess", Failing)
    lower_all()
    assert lowered_here == [8, 16, 24]


def test_no_process_is_needed(pool, lowered_here, monkeypatch):
    def fail():
        raise CannotStart

    monkeypatch.setattr(lowering_pool, "JobProcess", fail)
    lower_all()
    assert lowered_here == [8, 16, 24]


def test_this_process_lowers_others_while_it_waits(pool, monkeypatch):
    """Another process keeps a function until this one has lowered all the others, and fails."""
    widths, lower, others = [], compiled_stages.lower, threading.Event()

    class Slow:
        pid = 0

        def ask(self, *_):
            pass

        def answer(self):
            assert others.wait(120)
            raise JobFailed("no", "no")

        def stop(self):
            pass

        kill = stop

    def note(recipe):
        widths.append(recipe.lowered.inputs[0].shape[1])
        if widths == [8, 16]:
            others.set()
        return lower(recipe)

    monkeypatch.setattr(compiled_stages, "lower", note)
    monkeypatch.setattr(lowering_pool, "JobProcess", Slow)
    lower_all(last_first=True)
    assert widths == [8, 16, 24]


def test_processes_start_only_for_much_to_lower(monkeypatch):
    many = recipes()
    operators = sum(len(recipe.lowered.operators) for recipe in many)

    class Started:
        def __init__(self, recipes, processes):
            self.recipes, self.processes = recipes, processes

        worth_it = classmethod(lowering_pool.LoweringPool.worth_it.__func__)

    def started(each, threads, of=many):
        monkeypatch.setattr(lowering_pool, "WORTH_A_PROCESS", each)
        with torch._inductor.config.patch(compile_threads=threads):
            found = Started.worth_it(of)
        return found.processes if found else 0

    seconds = operators * lowering_pool.LOWERING_AN_OPERATOR
    assert started(seconds * 1.01, threads=8) == 0
    assert started(seconds * 0.99, threads=8) == 1
    assert started(seconds / 2.1, threads=8) == 2
    assert started(seconds / 100, threads=8) == 2  # this process lowers a function, too
    assert started(seconds / 100, threads=2) == 1
    assert started(seconds / 100, threads=1) == 0
    assert started(seconds / 100, threads=8, of=many[:1]) == 0
    assert started(seconds / 100, threads=8, of=[many[0]] * 5) == 0  # one function


SETTINGS = {"cpp.simdlen": 1, "cpp.max_horizontal_fusion_size": 1}


def test_settings_of_this_process_hold_in_the_other(process):
    (recipe, *_) = recipes()
    threads = torch.get_num_threads()
    default = _lowered_there(process, recipe)
    torch.set_num_threads(threads + 1)
    try:
        with torch._inductor.config.patch(SETTINGS):
            recipe = keyed(recipe)
            here = compiled_stages.lower(recipe)
            there = _lowered_there(process, recipe)
    finally:
        torch.set_num_threads(threads)
    assert there.kernels.keys() == here.kernels.keys()
    assert there.kernels.keys() != default.kernels.keys()
    assert there.code.layouts == here.code.layouts
    commands = [[kernel.command for kernel in of.kernels.values()] for of in (here, there)]
    assert commands[0] == commands[1]
    again = _lowered_there(process, keyed(recipe))  # the settings before are in force again
    assert again.kernels.keys() == default.kernels.keys()


def test_a_process_without_the_passes_of_the_user_refuses(process):
    class Pass(CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return "mine"

    with torch._inductor.config.patch(post_grad_custom_post_pass=Pass()):
        recipe = keyed(recipes()[0])
        with pytest.raises(JobFailed, match="would become other code here"):
            _lowered_there(process, recipe)


def test_operators_of_the_user_stay_here():
    @torch.library.custom_op("pool_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    assert can_be_sent(recipes()[0])
    assert not can_be_sent(recipe_for(lambda x: (double(x) + 1,), torch.randn(3)))


def _lowered_there(process, recipe):
    process.ask(JOB, SentFunctions.of([recipe]))
    return load_lowered(process.answer(), recipe)
