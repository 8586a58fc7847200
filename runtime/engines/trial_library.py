"""Try the C++ compiler on a small file, with the command that kernels are compiled with."""

import ctypes
import tempfile
from pathlib import Path

from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed, run_compiler
from ipu_dynamo.runtime.engines.private.promised_kernels import (
    COMPILER_ERRORS,
    LIBRARY,
    SOURCE,
    compiler_command,
)
from ipu_dynamo.runtime.engines.private.vector_instructions import vector_sets_known

# Like kernels it reads the headers of Python, and runs on several threads.
_TEXT = """#include <Python.h>
#include <omp.h>

extern "C" int threads_of_a_loop() {
  int threads = 0;
#pragma omp parallel reduction(+ : threads)
  threads += 1;
  return threads;
}
"""


def openmp_threads() -> int | None:
    """Compile and load a library; return the number of threads that OpenMP gives a loop.

    None: there is no command to try, as only Inductor calls the compiler with this PyTorch.

    Raises:
        CompilerFailed: the compiler is missing, or does not take the file.
        OSError: nothing can be written, or the library does not load.
    """
    try:
        with vector_sets_known():
            command = compiler_command()
    except COMPILER_ERRORS as error:
        raise CompilerFailed(str(error)) from error
    if command is None:
        return None
    with tempfile.TemporaryDirectory(prefix="ipu_dynamo-") as name:
        folder = Path(name)
        (folder / SOURCE).write_text(_TEXT, encoding="utf-8")
        run_compiler(command, folder)
        threads: int = ctypes.CDLL(str(folder / LIBRARY)).threads_of_a_loop()
    return threads
