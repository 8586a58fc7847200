"""Check what conftest.py and json_report.py promise to the other tests."""

import importlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.json_report import JsonReport


@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param({"ci": 6, "all": 1000}, id="no marker"),
        pytest.param({"ci": 3, "all": 50}, marks=pytest.mark.inductor),
        pytest.param({"ci": 5, "all": 5}, marks=pytest.mark.examples(5)),
    ],
)
@given(number=st.integers())
def test_markers_limit_examples(allowed, number):
    own = test_markers_limit_examples._hypothesis_internal_use_settings
    assert own.max_examples == allowed[settings.get_current_profile_name()]


@given(number=st.integers())
@settings(max_examples=3)
def test_own_settings_are_kept(number):
    own = test_own_settings_are_kept._hypothesis_internal_use_settings
    assert own.max_examples == 3
    assert own.deadline is None


@pytest.mark.parametrize("number", [1, 2])
def test_dynamo_is_reset_after_each_test(number):
    assert not torch._dynamo.utils.counters["frames"]
    torch.compile(torch.sin, backend="eager")(torch.ones(number))
    assert torch._dynamo.utils.counters["frames"]["total"] == 1


@pytest.mark.cuda
def test_a_cuda_test_has_a_device():
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_json_report_keeps_the_worst_phase_and_sums_the_time(tmp_path):
    def phase(test, when, outcome, duration):
        return pytest.TestReport(
            nodeid=test,
            location=("test.py", 0, test),
            keywords={},
            outcome=outcome,
            longrepr=None,
            when=when,
            duration=duration,
        )

    report = JsonReport(tmp_path / "new" / "report.json")
    report.pytest_runtest_logreport(phase("b", "setup", "skipped", 0.5))
    report.pytest_runtest_logreport(phase("b", "teardown", "passed", 0.5))
    report.pytest_runtest_logreport(phase("a", "setup", "passed", 0.5))
    report.pytest_runtest_logreport(phase("a", "call", "passed", 1.0))
    report.pytest_runtest_logreport(phase("a", "teardown", "failed", 0.25))
    report.pytest_sessionfinish(exitstatus=1)
    content = json.loads(report.path.read_text())
    assert content["tests"]["a"] == {"outcome": "failed", "seconds": 1.75}
    assert content["tests"]["b"] == {"outcome": "skipped", "seconds": 1.0}
    assert content["totals"] == {"failed": 1, "skipped": 1}
    assert content["torch"] == torch.__version__
    assert {"commit", "cpu", "cores", "date", "exit_status", "python"} <= content.keys()


def test_the_operator_database_keeps_the_profile():
    before = settings.get_current_profile_name()
    importlib.import_module("tests.torch_compile.database")
    assert settings.get_current_profile_name() == before
