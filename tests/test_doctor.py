"""Check `ipu-dynamo doctor`: what programs meet, a remedy for each problem, and an exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ipu_dynamo.command.installation import VARIABLES
from ipu_dynamo.command.subcommands import main
from ipu_dynamo.version import __version__

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "import sys; from ipu_dynamo.command.subcommands import main; sys.exit(main(['doctor']))"
_OWN = ("IPU_DYNAMO_", "POPTORCH_", "TORCHINDUCTOR_")


def doctor(folder, **variables):
    """The exit code and output of the command in a process of its own, in an empty folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder)} | variables
    with (folder / "out.txt").open("w+") as out:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            timeout=300,
            check=False,
        )
        out.seek(0)
        return done.returncode, out.read()


def problems(text):
    """Each problem with its remedy; fails where one has none."""
    found = re.findall(r"^  problem: (.*)\n((?:    .*\n)*)", text, re.M)
    assert all(re.search(r"^    try:  \S", more, re.M) for _, more in found)
    return [first for first, _ in found]


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ipu-dynamo {__version__}\n"


@pytest.mark.slow  # the wheel's check looks at it, too
def test_here_programs_run_compiled(tmp_path):
    folders = {name: os.environ[name] for name in ("IPU_DYNAMO_CACHE_DIR", "IPU_DYNAMO_HEADER_DIR")}
    code, text = doctor(tmp_path, **folders)
    assert (code, problems(text)) == (0, []), text
    assert text.endswith("\nprograms run: no problem\n")
    assert "\n  inductor, because " in text
    assert re.search(r"OpenMP runs it with \d+ threads", text)
    assert f"{folders['IPU_DYNAMO_CACHE_DIR']}: can be written" in text


def test_without_a_compiler_it_says_how_programs_run_and_how_to_get_one(tmp_path):
    (tmp_path / "file").touch()
    code, text = doctor(tmp_path, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "file"))
    assert code == 0, text
    assert text.endswith("\nprograms run operator by operator: 2 problems\n")
    no_compiler, no_cache = problems(text)
    assert no_compiler.startswith("no C++ compiler found (tried ")
    assert "apt install g++" in text
    assert no_cache.startswith("compiled stages cannot be kept: ")
    assert "set IPU_DYNAMO_CACHE_DIR to a folder of your own" in text


@pytest.mark.slow
def test_a_named_cache_that_cannot_be_written_stops_compiled_programs(tmp_path):
    (tmp_path / "file").touch()
    code, text = doctor(tmp_path, IPU_DYNAMO_CACHE_DIR=str(tmp_path / "file"))
    assert code == 1, text
    assert "set IPU_DYNAMO_CACHE_DIR to another folder" in text
    assert text.endswith("\nprograms cannot run: 1 problem\n")


@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    """The exit code and output of the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")

    def call():
        return main(["doctor"]), capsys.readouterr().out

    return call


def test_an_engine_that_does_not_exist_stops_programs(here, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "fast")
    code, text = here()
    assert code == 1
    assert problems(text)[0] == ("IPU_DYNAMO_ENGINE is 'fast': choose one of auto, inductor, eager")
    assert text.endswith("\nprograms cannot run: 1 problem\n")


def test_a_misspelt_variable_and_a_refused_value_are_problems(here, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_CACH_DIR", "/tmp/cache")
    monkeypatch.setenv("IPU_DYNAMO_MESH", "two")
    monkeypatch.setenv("IPU_DYNAMO_MACHINE", "bow-pod17")
    code, text = here()
    assert code == 0
    unknown, machine, mesh = problems(text)
    assert unknown == "no part of this package reads IPU_DYNAMO_CACH_DIR"
    assert "did you mean IPU_DYNAMO_CACHE_DIR" in text
    assert "bow-pod17" in machine
    assert "'two'" in mesh
    assert "\n  IPU_DYNAMO_MESH=two\n" in text


def test_a_value_that_programs_refuse_stops_them(here, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_WITHOUT", "Outlin")
    code, text = here()
    assert code == 1
    assert problems(text)[0].startswith("there is no pass 'Outlin'; did you mean: Outline")


def test_another_poptorch_that_comes_first_is_named(here, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    (tmp_path / "poptorch").mkdir()
    (tmp_path / "poptorch" / "__init__.py").touch()
    code, text = here()
    assert code == 1
    (problem,) = problems(text)
    assert str(tmp_path / "poptorch") in problem


def test_a_pytorch_of_another_version_ends_it(here, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipu_dynamo.ops.private.native", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    code, text = here()
    assert code == 1
    (problem,) = problems(text)
    assert "2.12.1" in problem
    assert "pip install 'torch>=2.13,<2.15'" in text


def test_the_variables_are_those_of_the_guide():
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\bIPU_DYNAMO_[A-Z_]+\b", text)} == VARIABLES
