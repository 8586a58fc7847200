"""Look at what runs programs: engine, compiler, caches, devices, and a small program."""

import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import torch

from ipu_dynamo.command.findings import Finding, Problem, text_of, warnings_noted
from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.native import find_compiler
from ipu_dynamo.options import Options
from ipu_dynamo.program.ir.types import byte_text, counted
from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed, compiler_says
from ipu_dynamo.runtime.engines.engines import ENGINE, choose_engine
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF, StageStore, open_store
from ipu_dynamo.whole_step.api import compile_inference

_COMPILERS = (
    "get a C++ compiler: `apt install g++` on Debian and Ubuntu, `dnf install gcc-c++` on Fedora, "
    "`xcode-select --install` on macOS, `conda install -c conda-forge gxx` in conda"
)
_OTHER_FOLDER = f"set {CACHE_DIR} to a folder of your own, or to {OFF}"
_CACHES = ("stages", "kernels", "checks", "inductor")  # folders of the store, with their sizes


def engine() -> Iterator[Finding]:
    """The engine of programs that leave it open, and why it is this one."""
    with warnings_noted() as warnings:
        try:
            name, reason = choose_engine("auto")
        except IpuError as error:
            yield Problem(text_of(error), f"unset {ENGINE}", stops=True)
            return
    yield f"{name}, because {reason}"
    yield from (Problem(text, _COMPILERS) for text in warnings)


def compiler() -> Iterator[Finding]:
    """The C++ compiler, and whether it makes a library with OpenMP as compiled stages are made."""
    found = find_compiler()
    if found is None:
        yield "none is found: programs run operator by operator"
        return
    yield f"{found}: {compiler_says(found, '--version').partition(chr(10))[0]}"
    from ipu_dynamo.runtime.engines.trial_library import openmp_threads  # imports Inductor

    start = time.perf_counter()
    try:
        threads = openmp_threads()
    except (CompilerFailed, OSError) as error:
        yield Problem(
            f"{found} does not compile a small file with OpenMP: {error}",
            "install the headers of Python (python3-dev) and OpenMP (libomp-dev, of clang), or "
            f"another compiler, and name it with CXX; {ENGINE}=eager needs none",
        )
        return
    if threads is None:
        yield "not tried: only Inductor calls it with this PyTorch"
        return
    seconds = time.perf_counter() - start
    on = counted(threads, "thread")
    yield f"compiles a small file in {seconds:.1f} s; OpenMP runs it with {on}"


def caches() -> Iterator[Finding]:
    """Folders that are kept between processes: sizes, and whether they can be written."""
    with warnings_noted() as warnings:
        try:
            store = open_store()
            if store is not None:
                with store.building():
                    pass
        except (IpuError, OSError) as error:
            yield Problem(text_of(error), _OTHER_FOLDER)
            return
    yield from (Problem(text, _OTHER_FOLDER) for text in warnings)
    if store is None:
        yield "nothing is kept, so that each process compiles and measures again"
        return
    yield f"{store.folder}: can be written, has {_size(store.folder)}"
    yield ", ".join(f"{name}/ {_size(store.folder / name)}" for name in _CACHES)
    yield from _signing_key(store)
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "IPU_DYNAMO_HEADER_DIR", "POPTORCH_CACHE_DIR"):
        if named := os.environ.get(variable):
            yield from _folder(variable, Path(named))


def _signing_key(store: StageStore) -> Iterator[Finding]:
    """The key with which poptorch signs files."""
    if "poptorch" not in sys.modules:  # its section did not find this package's
        return
    from poptorch.saving.trust import KEY, key_problem

    path = store.folder / KEY
    if not path.exists():
        yield "poptorch makes a key for the signatures of its files when it saves the first one"
    elif problem := key_problem(path):
        yield Problem(problem, f"remove {path}: a new one is made; files signed before need trust")
    else:
        yield f"{path} signs the files of poptorch"


def _folder(variable: str, folder: Path) -> Iterator[Finding]:
    """A folder that a variable names."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        yield f"{variable}: {folder} can be written, has {_size(folder)}"
    else:
        yield Problem(
            f"{variable}: {folder} cannot be written", f"set {variable} to another folder"
        )


def _size(folder: Path) -> str:
    """The bytes of all files in a folder."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # another process has removed it
                continue
    return byte_text(total)


def cuda() -> Iterator[Finding]:
    """The devices of CUDA."""
    if torch.version.cuda is None:
        yield "this PyTorch is a build without CUDA: programs run on the CPU"
    elif not torch.cuda.is_available():
        yield f"CUDA {torch.version.cuda} finds no device: programs run on the CPU"
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield f"cuda:{index} is {device.name} with {byte_text(device.total_memory)}"


def program() -> Iterator[Finding]:
    """Run a small program, and find the backend of torch.compile."""
    if not entry_points(group="torch_dynamo_backends", name="ipu"):
        yield Problem(
            "torch.compile does not know backend='ipu' without `import ipu_dynamo.torch_compile."
            "backend`: the metadata of this package are not installed",
            "pip install the checkout or the wheel",
        )
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.GELU()), torch.ones(3, 4)
    start = time.perf_counter()
    with warnings_noted() as warnings:
        try:
            result = compile_inference(model, Options(progress=False))(x)
        except Exception as error:
            yield Problem(text_of(error), "read the traceback of a program of your own", stops=True)
            return
    yield f"a small program runs; its first call takes {time.perf_counter() - start:.1f} s"
    yield from (Problem(text, f"{ENGINE}=eager compiles nothing") for text in warnings)
    if not torch.allclose(result, model(x), rtol=1e-4, atol=1e-5):
        yield Problem("its numbers are not those of PyTorch", f"set {ENGINE}=eager", stops=True)


@cache
def how_they_run() -> str:
    """The end of the last line, for programs that run."""
    name, _ = choose_engine("auto")
    return " operator by operator" if name == "eager" else ""
