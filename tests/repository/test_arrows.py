"""Check that wrong imports are found, by the rules in pyproject.toml as they are."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ipu_dynamo", "passes", "runtime", "popart", "popdist", "poptorch")


def lint_imports(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter in `root`."""
    code = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", code, "--no-cache", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    """Make a copy of the sources, with the links of the checkout."""
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_arrows_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("passes/wrong.py", "from ipu_dynamo.runtime import right", "levels"),
        ("runtime/wrong.py", "from ipu_dynamo.passes import right", "levels"),
        ("passes/wrong.py", "import ipu_dynamo.testing", "levels"),
        ("passes/wrong.py", "import ipu_dynamo.whole_step.api", "levels"),
        ("runtime/wrong.py", "from ipu_dynamo import capture", "runtime"),
        ("ipu_dynamo/program/wrong.py", "import ipu_dynamo.passes.right", "levels"),
        ("ipu_dynamo/program/wrong.py", "import ipu_dynamo.tune.costs", "passes"),
        ("ipu_dynamo/ops/wrong.py", "import ipu_dynamo.program.ir.types", "levels"),
        ("passes/joint/wrong.py", "import ipu_dynamo.tune.costs", "passes"),
        ("passes/traced/wrong.py", "import ipu_dynamo.passes.pipeline", "passes"),
        ("passes/graph/wrong.py", "import ipu_dynamo.passes.joint.partition", "graph"),
        ("runtime/engines/wrong.py", "import ipu_dynamo.runtime.execute.tasks.workers", "execute"),
        ("ipu_dynamo/wrong.py", "import poptorch", "facade"),
    ],
)
def test_a_wrong_import_breaks_its_contract(copy, module, line, contract):
    for folder in ("passes", "runtime"):
        (copy / folder / "right.py").write_text('"""Be imported."""\n')
    assert lint_imports(copy, "--contract", contract).returncode == 0
    (copy / module).write_text(f'"""Import what must not be imported."""\n\n{line}\n')
    result = lint_imports(copy, "--contract", contract)
    assert result.returncode == 1
    assert "wrong -> " in result.stdout


@pytest.mark.parametrize(
    "line", ["import passes", "from passes.emit import emit", "import runtime"]
)
def test_ruff_forbids_top_level_names(line):
    options = ["--no-cache", "--select=TID251", "--stdin-filename=tests/new.py"]
    ruff = [sys.executable, "-m", "ruff", "check", *options, "-"]
    result = subprocess.run(ruff, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True)
    assert result.returncode == 1
    assert "TID251" in result.stdout
