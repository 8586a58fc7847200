"""Set up every test: hypothesis profiles, threads, Inductor's folder, the CUDA marker, --json."""

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.json_report import JsonReport

ROOT = Path(__file__).resolve().parent.parent
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Folders for all workers and runs: what one compiled, the others load. Set before the first use.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor"))
os.environ.setdefault("IPU_DYNAMO_CACHE_DIR", str(ROOT / "build" / "stages"))
os.environ.setdefault("IPU_DYNAMO_HEADER_DIR", str(ROOT / "build" / "headers"))
os.environ.setdefault("IPU_DYNAMO_PROGRESS", "0")  # tests compare what is written to stderr
if IN_WORKER:
    torch.set_num_threads(1)  # the workers share the cores; so do the pools that Inductor starts
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell in the background leaves it
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", COMMON, max_examples=6, derandomize=True)
settings.register_profile("all", COMMON, max_examples=1000)
settings.load_profile("ci")  # unless --hypothesis-profile names another
INDUCTOR_EXAMPLES = {"ci": 3, "all": 50}  # a compilation takes a second, an eager example does not

GARBAGE = 20_000  # new objects between two looks for garbage; Python's 700 cost a tenth of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", type=Path, help="write the outcome of every test into this file")
    parser.addoption(
        "--record-raises",
        action="store_true",
        help="record where errors are made: `python -m tests.docs.errors --coverage` reads it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("json")) and not IN_WORKER:
        config.pluginmanager.register(JsonReport(path))
    if config.getoption("record_raises"):
        from tests.raise_record import RaiseRecord  # imports the package

        config.pluginmanager.register(RaiseRecord())
    if "TORCH_TRACE" not in os.environ:
        _nobody_reads_traces()


def _nobody_reads_traces() -> None:
    """Keep pytest from reading PyTorch's structured trace: each graph would be printed for it.

    pytest puts its handlers on loggers that do not propagate, and PyTorch makes what it traces if
    there is a handler.
    """
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_parameters_to_test_all(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _leave_parameters_to_test_all(items: list[pytest.Item]) -> None:
    """Mark as slow what `few(count, start)` leaves out: all but `count` parameters, evenly spread.

    `start` is the first one that stays, so tests of one list can share it out among them.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        count, start = (*tests[0].get_closest_marker("few").args, 0)[:2]
        stay = {(start + i * len(tests) // count) % len(tests) for i in range(count)}
        for index, item in enumerate(tests):
            if index not in stay:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Let Python look for garbage among what tests make, and not among all that was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Draw as many examples of a property as its markers `inductor`, `examples` and `quick` allow.

    A function that is parametrized with engines is one object, so its settings change by the call.
    """
    function = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    if not is_hypothesis_test(function):
        return (yield)
    own = function._hypothesis_internal_use_settings
    limits = [own.max_examples]
    limits += [marker.args[0] for marker in item.iter_markers("examples")]
    if settings.get_current_profile_name() == "ci":
        limits += [marker.args[0] for marker in item.iter_markers("quick")]
    if item.get_closest_marker("inductor"):
        limits.append(INDUCTOR_EXAMPLES.get(settings.get_current_profile_name(), 3))
    function._hypothesis_internal_use_settings = settings(own, max_examples=min(limits))
    try:
        return (yield)
    finally:
        function._hypothesis_internal_use_settings = own


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Reset Dynamo after a test that used it, so that none meets the guards of another; forget
    the programs that were compiled."""
    yield
    if recent := sys.modules.get("ipu_dynamo.program_history"):
        recent.forget()
    utils = sys.modules.get("torch._dynamo.utils")
    if utils and (utils.counters["frames"] or utils.counters["stats"]):  # "stats": fullgraph
        torch._dynamo.reset()
        utils.counters.clear()
