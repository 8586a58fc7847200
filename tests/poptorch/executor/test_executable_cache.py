"""Check that the next process takes all that was compiled from the folder of executables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.inductor
def test_the_next_process_runs_no_pass_and_starts_no_compiler(tmp_path):
    environment = {
        **os.environ,
        "IPU_DYNAMO_ENGINE": "inductor",
        "IPU_DYNAMO_CACHE_DIR": str(tmp_path / "stages"),
    }
    command = [sys.executable, "-m", "tests.poptorch.executor.cached_run", str(tmp_path / "new")]
    first, second = (
        json.loads(
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=500
            ).stdout.splitlines()[-1]
        )
        for _ in range(2)
    )
    assert "Differentiate" in first["passes"]
    assert first["started"]
    assert second["passes"] == []
    assert second["started"] == []
    assert second["losses"] == first["losses"]
