"""Use an installed ipu_dynamo as a stranger would: both doors, from outside the checkout."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch


def need(condition: bool, problem: str) -> None:
    """Raise SystemExit with `problem` unless `condition` holds."""
    if not condition:
        raise SystemExit(problem)


def check_names() -> None:
    """Check that the packages come from this environment, and that no other name was taken."""
    for name in ("passes", "runtime", "horovod"):
        need(importlib.util.find_spec(name) is None, f"a package named {name!r} was installed")
    beside = ("popart", "popdist", "poptorch")
    for name in ("ipu_dynamo", "ipu_dynamo.passes", "ipu_dynamo.runtime", *beside):
        spec = importlib.util.find_spec(name)
        need(spec is not None and spec.origin is not None, f"{name} was not installed")
        need(Path(sys.prefix) in Path(spec.origin).parents, f"{name} comes from {spec.origin}")


def check_backend() -> None:
    """Check that torch.compile finds the backend without an import, and computes the same."""
    need("ipu" in torch._dynamo.list_backends(), "torch.compile does not list the backend 'ipu'")
    need("ipu_dynamo" not in sys.modules, "listing the backends imported ipu_dynamo")
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    compiled = torch.compile(model, backend="ipu")
    torch.testing.assert_close(compiled(x), model(x))


def check_facade() -> None:
    """Check that a PopTorch program runs, and computes the same."""
    import poptorch

    found = importlib.metadata.version("poptorch")
    need(found == poptorch.__version__, f"the distribution poptorch has version {found}")
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x))


def check_poprun() -> None:
    """Check that the command is there, and reads its options."""
    poprun = [str(Path(sys.prefix, "bin", "poprun")), "--host", "a,b", "--num-instances", "2", "c"]
    result = subprocess.run(poprun, capture_output=True, text=True, check=False)
    need(result.returncode == 2, f"poprun ended with {result.returncode}: {result.stderr}")
    need(result.stdout.count("torchrun") == 2, f"poprun printed {result.stdout}")


def check_doctor() -> None:
    """Check that the command finds that programs run, also without a compiler."""
    command = [str(Path(sys.prefix, "bin", "ipu-dynamo")), "doctor"]
    for path, ending in ((os.environ["PATH"], "programs run"), ("", "operator by operator")):
        variables = os.environ | {"PATH": path}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        found = f"doctor ended with {result.returncode}: {result.stdout}{result.stderr}"
        need(result.returncode == 0, found)
        need(ending in result.stdout.splitlines()[-1], found)


def check_report() -> None:
    """Check that the command makes a report of a program's text."""
    import ipu_dynamo

    run = ipu_dynamo.compile_inference(torch.nn.Linear(4, 3))
    run(torch.randn(2, 4))
    Path("program.txt").write_text(run.program.text())
    command = [str(Path(sys.prefix, "bin", "ipu-dynamo")), "report", "program.txt"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    need(result.returncode == 0, f"ipu-dynamo ended with {result.returncode}: {result.stderr}")
    need("uPlot" in Path("report.html").read_text(), "the report lacks the library")


if __name__ == "__main__":
    check_backend()
    check_names()
    check_facade()
    check_poprun()
    check_doctor()
    check_report()
    print(f"both doors open in {sys.prefix}")
