"""Check that kernels which are compiled together compute what each would, whatever goes wrong."""

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache

from ipu_dynamo import IpuError, Options, compile_inference
from ipu_dynamo.runtime.engines import compiled_stages, kernel_units
from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed, run_compiler
from ipu_dynamo.runtime.engines.kernel_source import Kernel, unit_source
from ipu_dynamo.runtime.engines.private import promised_kernels
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF, StageStore
from ipu_dynamo.tune.scratch_folders import remove_abandoned, scratch_folder
from tests.runtime.engines.kill_rounds import kill_round

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    {
        #pragma GCC ivdep
        out_ptr0[0] = in_ptr0[0] + FACTOR;
    }
}
"""
POINTERS = ("const float*", "float*")


def kernel(source=SOURCE, argtypes=POINTERS):
    return Kernel(argtypes, source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("extern", "static int helper;\nextern"),
        ("extern", "#include <vector>\nextern"),
        ("extern", "#define FACTOR 2\nextern"),
        ("        out", "        #define FACTOR 2\n        out"),
        ("[0];", "[0]; // the kernel ends"),
        ('extern "C"', "template <typename T> inline"),
        ("}\n}\n", "}\n}\nint kernel_after;\n"),
        ("#include <torch/csrc/inductor/cpp_prefix.h>", "#include <other.h>"),
    ],
)
def test_a_source_with_more_than_a_function_stays_alone(before, after):
    changed = SOURCE.replace("FACTOR", "in_ptr0[0]").replace(before, after)
    assert kernel(SOURCE).can_share
    assert not kernel(changed).can_share


@pytest.mark.parametrize("kind", ["int64_t", "float", "std::vector<float>", "const float* const"])
def test_what_is_not_a_tensor_stays_alone(kind):
    assert not kernel(argtypes=(*POINTERS, kind)).can_share


def test_each_kernel_stands_in_a_unit_as_it_was_generated():
    first, second = kernel(), kernel(SOURCE.replace("+", "-"))
    unit = unit_source([first, second])
    assert unit.count(first.source) == unit.count(second.source) == 1
    assert first.symbol != second.symbol
    assert kernel(argtypes=("const half*", "float*")).symbol != first.symbol


class Promised:
    """A kernel of which a test knows whether its compiler takes it, with others and alone."""

    def __init__(self, name, *, together, alone=True):
        self.kernel, self.command = kernel(SOURCE + f"// {name}\n"), ("c++",)
        self.together, self.alone, self.function = together, alone, None

    def keep(self, function):
        self.function = function

    def compiled_alone(self):
        if not self.alone:
            raise OSError("no compiler")
        self.function = "alone"


def compiled(monkeypatch, promises, problem=CompilerFailed):
    units = []

    def together(group, scratch, keep):
        units.append(len(group))
        if not all(promise.together for promise in group):
            raise problem("it does not compile")
        for promise in group:
            promise.keep("together")

    monkeypatch.setattr(kernel_units, "_compile_together", together)
    return kernel_units.compile_kernels(promises, None, None), units


def test_one_bad_kernel_is_found_by_halving(monkeypatch):
    promises = [Promised(n, together=n != 5) for n in range(8)]
    failed, units = compiled(monkeypatch, promises)
    assert failed == []
    assert units == [8, 4, 4, 2, 1, 1, 2]
    assert [p.function for p in promises] == ["together"] * 5 + ["alone"] + ["together"] * 2


def test_a_kernel_that_nobody_takes_is_named_and_equal_ones_with_it(monkeypatch):
    bad, again = (Promised("bad", together=False, alone=False) for _ in range(2))
    good = Promised("good", together=True)
    failed, _ = compiled(monkeypatch, [bad, good, again])
    assert failed == [bad, again]
    assert good.function == "together"


def test_where_nothing_can_be_written_nothing_is_halved(monkeypatch):
    promises = [Promised(n, together=False) for n in range(8)]
    _, units = compiled(monkeypatch, promises, OSError)
    assert units == [8]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    compiled_stages.forget()
    yield tmp_path
    compiled_stages.forget()


X = torch.linspace(-2, 2, 24).reshape(4, 6)


def several(x):
    """Three kernels: a matmul does not fuse."""
    y = torch.tanh(x) @ torch.sigmoid(x).t()
    return torch.softmax(y, 1).sum(0) * 3, y.exp()


def two(x):
    """Two kernels."""
    return (torch.tanh(x) @ torch.sigmoid(x).t()).exp()


def computed(function=several):
    return compile_inference(function, Options("inductor"))(X)


@pytest.mark.inductor
def test_one_compiler_serves_a_program_and_its_bits_are_inductors_own(folder, monkeypatch):
    commands = []
    original = kernel_units.run_compiler

    def run(command, scratch):
        assert scratch.parent == folder / "building"
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        commands.append(command)
        original(command, scratch)

    monkeypatch.setattr(kernel_units, "run_compiler", run)
    together = computed(two)
    assert len(commands) == 1
    assert len([*(folder / "kernels").glob("*.so")]) == 1
    assert [path.name for path in (folder / "building").iterdir()] == [".lock"]
    compiled_stages.forget()
    assert_same_bits(computed(two), together)  # loaded: the kernels are found by their names
    assert len(commands) == 1
    compiled_stages.forget()
    monkeypatch.setenv(CACHE_DIR, OFF)
    monkeypatch.setattr(promised_kernels, "compiler_command", lambda: None)
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):  # they take 6 s
        assert_same_bits(computed(two), together)
    assert len(commands) == 1


@pytest.mark.inductor
def test_a_program_runs_where_one_of_its_kernels_does_not_compile(folder, monkeypatch, caplog):
    def fails(promise):
        raise promised_kernels.COMPILER_ERRORS[0](["c++"], "internal compiler error")

    def spoilt(kernels):
        return unit_source(kernels) + ("#error no\n" if "exp" in unit_source(kernels) else "")

    monkeypatch.setattr(kernel_units, "unit_source", spoilt)
    monkeypatch.setattr(promised_kernels.Promise, "compiled_alone", fails)
    with caplog.at_level(logging.WARNING, logger="ipu_dynamo"):
        results = computed(lambda x: (torch.exp(x) * 2,))
    torch.testing.assert_close(results, (torch.exp(X) * 2,))
    (line,) = [r.getMessage() for r in caplog.records if "no compiler takes" in r.getMessage()]
    assert "runs on the eager engine" in line
    assert [*(folder / "stages").iterdir()] == []


@pytest.mark.inductor
def test_a_program_runs_where_inductor_fails(folder, monkeypatch, caplog):
    def fails(*arguments, **settings):
        raise compiled_stages.InductorError(AssertionError("no index"), None)

    monkeypatch.setattr(compiled_stages, "lower", fails)
    with caplog.at_level(logging.DEBUG, logger="ipu_dynamo"):
        torch.testing.assert_close(computed(), several(X))
    assert "runs on the eager engine, operator by operator: Inductor fails" in caplog.text
    assert "no index" in caplog.text
    assert [*(folder / "stages").iterdir()] == []


@pytest.mark.inductor
def test_a_program_runs_where_the_compiler_succeeds_and_writes_nothing(folder, monkeypatch, caplog):
    def alone(promise):
        raise IndexError("list index out of range")  # as Inductor, of what the compiler prints

    monkeypatch.setattr(kernel_units, "run_compiler", lambda command, scratch: None)
    monkeypatch.setattr(promised_kernels.Promise, "compiled_alone", alone)
    with caplog.at_level(logging.DEBUG, logger="ipu_dynamo"):
        torch.testing.assert_close(computed(), several(X))
    assert "succeeds, and writes no library" in caplog.text
    assert "runs on the eager engine" in caplog.text
    assert [*(folder / "stages").iterdir()] == []


@pytest.mark.inductor
def test_an_interrupted_compilation_leaves_nothing(folder, monkeypatch):
    def interrupted(command, scratch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernel_units, "run_compiler", interrupted)
        with pytest.raises(KeyboardInterrupt):
            computed()
    assert [path.name for path in (folder / "building").iterdir()] == [".lock"]
    assert [*(folder / "stages").iterdir()] == []
    torch.testing.assert_close(computed(), several(X))


@pytest.mark.inductor
def test_a_full_disk_is_an_error_that_says_what_to_do_and_nothing_is_kept(folder, monkeypatch):
    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))  # the tests' has files
        patch.setattr(codecache, "write_atomic", full)
        with pytest.raises(IpuError, match=r"(?s)No space left on device.*try:.*CACHE_DIR"):
            computed()
    assert [*(folder / "stages").iterdir()] == []
    torch.testing.assert_close(computed(), several(X))


def test_a_compiler_speaks_the_language_in_which_errors_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(CompilerFailed, match=r"speaks C$"):
        run_compiler(["sh", "-c", 'echo "speaks $LC_ALL"; exit 1'], tmp_path)


def test_a_compiler_that_fails_or_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CompilerFailed, match="status 3\nwhat is wrong"):
        run_compiler(["sh", "-c", "echo what is wrong >&2; exit 3"], tmp_path)
    with pytest.raises(CompilerFailed, match="status 127"):
        run_compiler(["no-such-compiler"], tmp_path)
    run_compiler(["sh", "-c", 'echo "$TMPDIR" > said'], tmp_path)
    assert (tmp_path / "said").read_text() == f"{tmp_path}\n"


# A compiler with a child of its own, which tells its number and sleeps.
_SLOW = "sh -c 'echo $$ > child; exec sleep 60'; true"


def child_of(folder):
    for _ in range(600):
        if text := (folder / "child").read_text() if (folder / "child").exists() else "":
            return int(text)
        time.sleep(0.05)
    raise AssertionError("it did not start")


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def ends(pid):
    for _ in range(600):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_no_compiler_outlives_a_killed_process(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from ipu_dynamo.runtime.engines.compiler_process import run_compiler\n"
        "run_compiler(['sh', '-c', sys.argv[1]], Path(sys.argv[2]))\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", program, _SLOW, str(tmp_path)]
    process = subprocess.Popen(command, cwd=root)
    child = child_of(tmp_path)
    process.kill()
    process.wait()
    assert ends(child)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_no_compiler_outlives_an_interrupt(tmp_path):
    def interrupt():
        child_of(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_compiler(["sh", "-c", _SLOW], tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert ends(child_of(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not swept there")
def test_what_a_killed_process_has_left_is_swept_and_nothing_else(tmp_path):
    left = tmp_path / "left"
    left.mkdir()
    (left / "unit.cpp").write_text("half")
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        remove_abandoned(tmp_path)
        assert not left.exists()
        assert first.exists()
        assert second.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_unfinished_files_of_killed_processes_are_swept(tmp_path):
    store = StageStore(tmp_path)
    old, new = (tmp_path / "kernels" / f".unfinished-{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 120,) * 2)
    store.remove_abandoned()
    assert not old.exists()
    assert new.exists()


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_processes_that_are_killed_while_they_compile_leave_nothing():
    for number in range(5):
        kill_round(number)
