"""Check that headers are compiled once, and that kernels which read them so are the same."""

import stat

import pytest
import torch

from ipu_dynamo import IpuError, Options, compile_inference
from ipu_dynamo.runtime.engines import compiled_stages, kernel_units, precompiled_header
from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed
from ipu_dynamo.runtime.engines.precompiled_header import HEADER_DIR, with_header
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF

COMMAND = ("g++", "unit.cpp", "-O3", "-shared", "-I/a", "-o", "unit.so", "-ltorch", "-L/b")
X = torch.linspace(-2, 2, 24).reshape(4, 6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(HEADER_DIR, str(tmp_path / "headers"))
    monkeypatch.setattr(precompiled_header, "_failed", set())
    return tmp_path / "headers"


@pytest.fixture
def commands(monkeypatch):
    """Commands for headers; what they make is a few bytes."""
    seen = []

    def run(command, scratch):
        seen.append(command)
        (scratch / command[-1]).write_bytes(b"compiled")

    monkeypatch.setattr(precompiled_header, "run_compiler", run)
    return seen


def test_without_a_folder_and_for_other_compilers_the_command_is_as_it_was(
    folder, commands, monkeypatch
):
    other = ("no-such-compiler", *COMMAND[1:])
    assert with_header(other) == other
    monkeypatch.delenv(HEADER_DIR)
    assert with_header(COMMAND) == COMMAND
    assert commands == []
    assert not folder.exists()


def test_headers_are_compiled_once_for_equal_flags(folder, commands):
    first = with_header(COMMAND)
    assert first[: len(COMMAND)] == COMMAND
    assert with_header(COMMAND) == first
    (command,) = commands
    assert command[:3] == ("g++", "-O3", "-I/a")
    assert command[3:5] == ("-x", "c++-header")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert with_header(("g++", "unit.cpp", "-O2", "-o", "unit.so"))[-1] != first[-1]
    assert len(commands) == 2


def test_where_headers_do_not_compile_kernels_do_without(folder, monkeypatch):
    tries = []

    def fails(command, scratch):
        tries.append(command)
        raise CompilerFailed("an internal error")

    monkeypatch.setattr(precompiled_header, "run_compiler", fails)
    assert with_header(COMMAND) == with_header(COMMAND) == COMMAND
    assert len(tries) == 1  # and are not tried again in this process
    assert not [*folder.glob("*.gch")]


def test_a_folder_that_others_can_write_is_refused(folder, commands):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(IpuError, match=f"others can write to .*\n.*set {HEADER_DIR}"):
        with_header(COMMAND)
    assert commands == []


@pytest.mark.slow
@pytest.mark.inductor
def test_the_bits_are_those_without(monkeypatch):
    """In the folder of all tests: headers take long. The compiler fails where it reads text."""

    def function(x):
        return torch.softmax(x.tanh() * 3, 1).sum(0), x.exp()

    def computed():
        compiled_stages.forget()
        return compile_inference(function, Options("inductor"))(X)

    seen = []
    original = kernel_units.run_compiler

    def run(command, scratch):
        seen.append(command)
        original((*command, "-Winvalid-pch", "-Werror=invalid-pch"), scratch)

    monkeypatch.setenv(CACHE_DIR, OFF)
    monkeypatch.setattr(kernel_units, "run_compiler", run)
    fast = computed()
    monkeypatch.delenv(HEADER_DIR)
    assert_same_bits(computed(), fast)
    with_headers, without = seen
    if with_headers != without:  # another compiler than GCC has none
        assert with_headers[:-2] == without
        assert with_headers[-2] == "-include"
    compiled_stages.forget()
