"""Check that compiling, calls and errors leave the process as it was."""

import json
import os
import subprocess
import sys

import pytest

from tests.whole_step.process_state import DOORS

EXCEPTIONS = {
    "threads": "PyTorch's interpreter of graphs makes bars of tqdm, which watches them in a thread",
    "filters of warnings": "SymPy, which PyTorch's tracer imports, has a filter of its own",
    "loggers: torch.__trace": "PyTorch removes its unused handler at the first trace",
    "environment: TORCHINDUCTOR_CACHE_DIR": "PyTorch names its cache for the processes it starts",
    "environment: RDMAV_FORK_SAFE": "PopTorch sets it, so that loaders may fork",
    "methods: torch.manual_seed": "PyTorch's tracer wraps it when it is imported",
    "methods: Module.__init__": "PyTorch's tracer counts new modules once it compiles one",
    "methods: Module.__setstate__": "the same",
    # of PyTorch's compiler, which the inductor engine imports
    "recursion limit": "it doubles it, as its graphs are deep",
    "sys.path": "it imports setuptools, which adds a folder of its own",
    "environment: _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": "its code finds PyTorch by it",
}


def found_by(door: str, engine: str) -> dict[str, dict[str, object]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.whole_step.process_state", door],
        env=os.environ | {"IPU_DYNAMO_ENGINE": engine},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.few(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_process_stays_as_it_was(door, engine):
    found = found_by(door, engine)
    assert found.keys() >= {"call", "failed call", "failed compile"}
    for after, changes in found.items():
        unknown = {name: change for name, change in changes.items() if name not in EXCEPTIONS}
        assert not unknown, after
