"""Write what every test did, so that two commits can be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import provenance


class JsonReport:
    """A pytest plugin that collects outcomes and writes them into `path` at the end.

    Invariant: `tests` holds the worst outcome and the total time, in seconds, of each test's
    phases (setup, call, teardown) so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 4)
        if test["outcome"] != "failed" and report.outcome != "passed":
            test["outcome"] = "xfailed" if hasattr(report, "wasxfail") else report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        outcomes = [test["outcome"] for test in self.tests.values()]
        content = {
            **provenance(),
            "exit_status": int(exitstatus),
            "totals": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "tests": dict(sorted(self.tests.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
