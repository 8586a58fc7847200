"""Write kernels that Inductor generated into one C++ file, with one entry point for each.

A C++ compiler spends most of a kernel's time on headers. In one file it reads them once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

ENTRY = "kernel"  # name of the function in generated code, and of the module in Python
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
_POINTER = re.compile(r"(?:const )?[\w:]+\*", re.ASCII)
_SIGNATURE = re.compile(rf'extern "C" +void +{ENTRY}\(', re.ASCII)


@dataclass(frozen=True)
class Kernel:
    """A function in C++, and its arguments from Python.

    Args:
        argtypes: types of its parameters, such as `const float*`.
        source: a whole file that defines `kernel`.
    """

    argtypes: tuple[str, ...]
    source: str

    @cached_property
    def digest(self) -> str:
        return sha256(repr((list(self.argtypes), self.source)).encode()).hexdigest()

    @property
    def symbol(self) -> str:
        """Its name among several kernels."""
        return f"k_{self.digest[:32]}"

    @cached_property
    def can_share(self) -> bool:
        """Whether it is a function on tensors and nothing else.

        Templates of matrix products, for instance, define more than one name.
        """
        if not all(map(_POINTER.fullmatch, self.argtypes)):
            return False
        if len(re.findall(rf"\b{ENTRY}\b", self.source)) != 1:
            return False
        lines = [line for line in self.source.splitlines() if line.strip()]
        directives = [line for line in lines if line.lstrip().startswith("#")]
        if any(not line.lstrip().startswith("#pragma ") for line in directives[1:]):
            return False
        outside = [line for line in lines if not line[0].isspace()]
        return (
            len(outside) == 4
            and outside[0].rstrip() == _INCLUDE
            and _SIGNATURE.match(outside[1]) is not None
            and [line.rstrip() for line in outside[2:]] == ["{", "}"]
            and lines[0] is outside[0]
            and lines[-1].rstrip() == "}"
        )


def unit_source(kernels: Sequence[Kernel]) -> str:
    """A file whose module has each kernel under its symbol.

    Every kernel is copied as it was generated, into its own namespace, with another name for its
    function. Python passes tensors. PyTorch passes, in an environment variable, the address of its
    function that returns the address of their elements.
    """
    methods = "\n".join(
        f'    {{"{kernel.symbol}", {_space(kernel)}::call, METH_VARARGS, ""}},'
        for kernel in kernels
    )
    return "\n".join([_HEAD, *map(_part, kernels), _TAIL.replace("METHODS", methods)])


def _part(kernel: Kernel) -> str:
    arguments = ", ".join(
        f"address_of<{kind.removeprefix('const ')}>(args, {place})"
        for place, kind in enumerate(kernel.argtypes)
    )
    return (
        f"#define {ENTRY} {kernel.symbol}\n"
        f"namespace {_space(kernel)} {{\n"
        f"{kernel.source}\n"
        f"PyObject* call(PyObject*, PyObject* args) {{\n"
        f"  return called(args, {len(kernel.argtypes)}, [&] {{ {ENTRY}({arguments}); }});\n"
        "}\n}\n"
        f"#undef {ENTRY}\n"
    )


def _space(kernel: Kernel) -> str:
    return f"of_{kernel.symbol}"


# The beginning of every unit: the compiler can read it before the kernels are known.
HEADERS = f"""{_INCLUDE}
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
"""
_HEAD = f"""{HEADERS}
static void* (*data_of_tensor)(PyObject*);

template <typename T> static inline T address_of(PyObject* args, Py_ssize_t place) {{
  return static_cast<T>(data_of_tensor(PyTuple_GET_ITEM(args, place)));
}}

template <typename Run> static inline PyObject* called(PyObject* args, Py_ssize_t count, Run run) {{
  try {{
    if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != count) [[unlikely]]
      throw std::runtime_error("a kernel was called with another number of arguments");
    run();
    Py_RETURN_NONE;
  }} catch (std::exception const& error) {{
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }} catch (...) {{
    PyErr_SetString(PyExc_RuntimeError, "unhandled error");
  }}
  return nullptr;
}}
"""
_TAIL = f"""static PyMethodDef methods_of_unit[] = {{
METHODS
    {{nullptr, nullptr, 0, nullptr}}}};

static PyModuleDef definition_of_unit = {{
    PyModuleDef_HEAD_INIT, "{ENTRY}", nullptr, -1, methods_of_unit}};

PyMODINIT_FUNC PyInit_{ENTRY}(void) {{
  const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
  char* end = nullptr;
  data_of_tensor = reinterpret_cast<decltype(data_of_tensor)>(
      static_cast<uintptr_t>(address ? std::strtoull(address, &end, 10) : 0));
  if (!data_of_tensor || *end) {{
    PyErr_SetString(PyExc_RuntimeError, "PyTorch does not say where its tensors' data are");
    return nullptr;
  }}
  PyObject* module = PyModule_Create(&definition_of_unit);
#ifdef Py_GIL_DISABLED
  if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}}
"""
