"""Check that wrong imports are found, by the rules in pyproject.toml as they are."""

import shutil
import subprocess
import sys
import tomllib
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


WRONG = [  # in which folder, what, and the contract that forbids it
    ("passes", "from ipu_dynamo.runtime import right", "levels"),
    ("runtime", "from ipu_dynamo.passes import right", "levels"),
    ("passes", "import ipu_dynamo.testing", "levels"),
    ("passes", "import ipu_dynamo.whole_step.api", "levels"),
    ("runtime", "from ipu_dynamo import capture", "runtime"),
    ("ipu_dynamo/program", "import ipu_dynamo.passes.right", "levels"),
    ("ipu_dynamo/program", "import ipu_dynamo.tune.costs", "passes"),
    ("ipu_dynamo/ops", "import ipu_dynamo.program.ir.types", "levels"),
    ("passes/joint", "import ipu_dynamo.tune.costs", "passes"),
    ("passes/traced", "import ipu_dynamo.passes.pipeline", "passes"),
    ("passes/graph", "import ipu_dynamo.passes.joint.partition", "graph"),
    ("runtime/engines", "import ipu_dynamo.runtime.execute.tasks.workers", "execute"),
    ("ipu_dynamo", "import poptorch", "facade"),
    ("ipu_dynamo/batches", "import poptorch.arg_parsers", "facade"),
    ("ipu_dynamo/batches", "import ipu_dynamo.options", "levels"),
]


def test_wrong_imports_break_their_contracts(copy):
    """All at once: reading the imports of the sources takes the time."""
    for folder in ("passes", "runtime"):
        (copy / folder / "right.py").write_text('"""Be imported."""\n')
    for number, (folder, line, _) in enumerate(WRONG):
        text = f'"""Import what must not be imported."""\n\n{line}\n'
        (copy / folder / f"wrong_{number}.py").write_text(text)
    config = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["importlinter"]
    titles = {contract["id"]: contract["name"][:60] for contract in config["contracts"]}
    result = lint_imports(copy)
    assert result.returncode == 1
    broken = result.stdout.partition("Broken contracts")[2]
    starts = {title: broken.find(title) for title in titles.values()}
    for number, (_, line, contract) in enumerate(WRONG):
        start = starts[titles[contract]]
        end = min((place for place in starts.values() if place > start), default=len(broken))
        assert f"wrong_{number} -> " in broken[start:end], (line, contract)


@pytest.mark.parametrize(
    "line", ["import passes", "from passes.emit import emit", "import runtime"]
)
def test_ruff_forbids_top_level_names(line):
    options = ["--no-cache", "--select=TID251", "--stdin-filename=tests/new.py"]
    ruff = [sys.executable, "-m", "ruff", "check", *options, "-"]
    result = subprocess.run(ruff, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True)
    assert result.returncode == 1
    assert "TID251" in result.stdout
