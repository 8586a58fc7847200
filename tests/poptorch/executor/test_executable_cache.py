"""Check that the next process takes all that was compiled from the folder of executables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_dynamo.options import Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import form_passes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.inductor
def test_the_next_process_only_decides_its_form_and_starts_no_compiler(tmp_path):
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
    # Only what depends on the process: its threads, tensors and figures.
    assert second["passes"] == [step.name for step in form_passes(Options(), Machine())]
    # A build of PyTorch with CUDA asks where libraries lie.
    assert [process for process in second["started"] if "ldconfig" not in process] == []
    assert second["losses"] == first["losses"]
