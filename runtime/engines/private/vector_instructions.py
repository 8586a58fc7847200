"""Say which vector instructions a compiler knows, without compiling.

Inductor tries each set that the processor has in the C++ compiler, for a second or two each. Its
trial code is known: intrinsics that compilers have since certain versions, and functions of the
library Sleef in PyTorch's own. Inductor itself asks the processor. Checked on PyTorch 2.13.0;
2.14.1 has the same names.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512, VecAVX512VNNI, VecISA

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.compiler_process import compiler_says


@dataclass(frozen=True)
class _Since:
    """The first major versions of compilers, and the version of GNU's assembler, that know a set.

    Source: release notes of GCC, LLVM and binutils. Older compilers than 10 and 12 do not know the
    C++20 that PyTorch's headers are in.
    """

    gcc: int = 10
    clang: int = 12
    assembler: tuple[int, int] = (2, 34)


_CHECKS: Mapping[str, _Since] = {
    code: since
    for code, since in (
        (getattr(VecISA, "_avx_code", ""), _Since()),
        (getattr(VecAVX512, "_avx512_bf16_code", ""), _Since()),
        (getattr(VecAVX512VNNI, "_avx512_vnni_code", ""), _Since()),
        (getattr(VecAMX, "_amx_code", ""), _Since(gcc=11, assembler=(2, 36))),
        (getattr(VecAMX, "_amx_fp16_code", ""), _Since(gcc=13, clang=16, assembler=(2, 40))),
    )
    if code  # another release of PyTorch may try others
}
_SLEEF = {512: "Sleef_expf16_u10", 256: "Sleef_expf8_u10"}  # by bits of a vector


@contextmanager
def vector_sets_known() -> Iterator[None]:
    """Answer for this thread's compilations in this block which sets the compiler knows.

    Inductor tries as before if the processor, the compiler or the set is another one, or if the
    compiler is too old.
    """
    original = VecISA.check_build

    def check_build(isa: VecISA, code: str) -> bool:
        return _is_known(isa, code) or original(isa, code)

    with replaced(VecISA, "check_build", in_this_thread(check_build, original)):
        yield


def _is_known(isa: VecISA, code: str) -> bool:
    since, compiler = _CHECKS.get(code), _compiler(get_cpp_compiler())
    if since is None or compiler is None:
        return False
    if isa.bit_width() not in _SLEEF or not _has_sleef(_SLEEF[isa.bit_width()]):
        return False
    kind, major, assembler = compiler
    if kind == "clang":  # it assembles by itself
        return major >= since.clang
    return major >= since.gcc and assembler >= since.assembler


@cache
def _compiler(command: str) -> tuple[str, int, tuple[int, int]] | None:
    """Kind and major version of a compiler, and the version of its assembler."""
    said = re.sub(r"\(.*?\)", "", compiler_says(command, "--version").partition("\n")[0])
    if match := re.search(r"\bclang version (\d+)\.", said):
        return None if "Apple" in said else ("clang", int(match[1]), (0, 0))
    if match := re.match(r"\S*(?:g\+\+|gcc|c\+\+)\S* .*?(\d+)\.\d+", said):
        assembler = compiler_says(
            compiler_says(command, "-print-prog-name=as").strip(), "--version"
        )
        if version := re.match(r"GNU assembler .*?(\d+)\.(\d+)", assembler):
            return "gcc", int(match[1]), (int(version[1]), int(version[2]))
    return None


@cache
def _has_sleef(function: str) -> bool:
    """Whether PyTorch's library has a function for others."""
    (path, *_) = [*(Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), Path()]
    try:
        return hasattr(ctypes.CDLL(str(path)), function)
    except OSError:
        return False
