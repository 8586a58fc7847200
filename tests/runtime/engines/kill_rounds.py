"""Kill processes while they compile, and look whether the next one is right and all is swept.

Usage: python -m tests.runtime.engines.kill_rounds ROUNDS [FIRST]
Every round has a number, which decides all that is drawn.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ipu_dynamo.tune.artifact_store import CACHE_DIR

ROOT = Path(__file__).resolve().parents[3]
# Three kernels in two functions of a pipeline; its results are checked against plain PyTorch.
PROGRAM = """
import torch, ipu_dynamo
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softmax(1))
ipu_dynamo.BeginBlock(model[2], ipu_id=1)
run = ipu_dynamo.compile_inference(model, {"engine": "inductor"})
x = torch.randn(3, 6)
torch.testing.assert_close(run(x), model(x))
print("right")
"""


def kill_round(number: int) -> None:
    """Start two processes with one folder, end one or both, and run a third.

    Raises:
        AssertionError: it is wrong, or something is left.
    """
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "cache"
        both = [_start(folder), _start(folder)]
        if draw.random() < 0.7:
            _wait_for_a_compiler(folder, both)
        time.sleep(draw.uniform(0, 3))
        killed = both[: draw.choice((1, 2))]
        for process in killed:
            process.send_signal(draw.choice((signal.SIGKILL, signal.SIGINT)))
        for process in both:
            printed, said = process.communicate(timeout=600)
            assert process in killed or printed == "right\n", said
        last = _start(folder)
        printed, said = last.communicate(timeout=600)
        assert printed == "right\n", said
        assert "damaged" not in said, said
        assert _is_quiet(folder), "a compiler is left"
        left = [path.name for path in (folder / "building").iterdir()]
        assert left in ([], [".lock"]), left


def _start(folder: Path) -> "subprocess.Popen[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    environment |= {CACHE_DIR: str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_a_compiler(folder: Path, processes: "list[subprocess.Popen[str]]") -> None:
    building = folder / "building"
    while all(process.poll() is None for process in processes):
        if building.exists() and any(path.is_dir() for path in building.iterdir()):
            return
        time.sleep(0.02)


def _is_quiet(folder: Path) -> bool:
    """Whether no process works in the folder, a second after the last one has ended."""
    for _ in range(20):
        if not _processes_in(folder):
            return True
        time.sleep(0.05)
    return False


def _processes_in(folder: Path) -> list[str]:
    """The numbers of processes whose working directory is in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = Path(os.readlink(process / "cwd"))
        except OSError:
            continue
        if folder in where.parents:
            found.append(process.name)
    return found


def main() -> None:
    """Run the rounds that the command line names, and print a line for each."""
    rounds, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for number in range(first, first + rounds):
        kill_round(number)
        print(f"round {number}: right", flush=True)


if __name__ == "__main__":
    main()
