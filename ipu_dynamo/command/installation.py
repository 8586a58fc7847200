"""Look at installed packages and at the environment: the part of `doctor` without an engine."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from ipu_dynamo.command.findings import Finding, Problem, text_of
from ipu_dynamo.version import __version__

_PARENT = Path(__file__).resolve().parents[2]  # of ipu_dynamo and of the packages next to it
_BESIDE = ("poptorch", "popart", "popdist")
_PREFIX = "IPU_DYNAMO_"
# Variables of this package; a test compares them with those that the guide explains.
VARIABLES = frozenset(
    {
        "IPU_DYNAMO_CACHE_DIR",
        "IPU_DYNAMO_CHECK_COMPILED",
        "IPU_DYNAMO_DEVICES",
        "IPU_DYNAMO_DUMP",
        "IPU_DYNAMO_ENFORCE_MEMORY",
        "IPU_DYNAMO_ENGINE",
        "IPU_DYNAMO_HARDWARE",
        "IPU_DYNAMO_HEADER_DIR",
        "IPU_DYNAMO_MACHINE",
        "IPU_DYNAMO_MATMUL",
        "IPU_DYNAMO_MESH",
        "IPU_DYNAMO_OFFLINE",
        "IPU_DYNAMO_PROGRESS",
        "IPU_DYNAMO_RANK_TIMEOUT",
        "IPU_DYNAMO_START",
        "IPU_DYNAMO_TRACE",
        "IPU_DYNAMO_TRUST",
        "IPU_DYNAMO_WITHOUT",
    }
)
_OTHERS = (
    "CXX",
    "KERAS_BACKEND",
    "OMP_NUM_THREADS",
    "PVTI_OPTIONS",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "XDG_CACHE_HOME",
)
_PREFIXES = (_PREFIX, "POPTORCH_", "POPLAR_", "POPDIST_", "TORCHINDUCTOR_")


def packages() -> Iterator[Finding]:
    """The versions of this package, of Python, and of packages that it works with."""
    yield f"ipu_dynamo {__version__}, in {_PARENT}"
    yield f"Python {platform.python_version()}, {sys.executable}"
    yield f"{platform.platform()}, {os.cpu_count()} processors"
    for name in ("numpy", "torch", "keras", "transformers"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} is not installed"


def pytorch() -> Iterator[Finding]:
    """Whether PyTorch can be imported, and is a version whose private names are known."""
    remedy = "pip install 'torch>=2.13,<2.15'"
    try:
        import torch

        import_module("ipu_dynamo.ops.private.native")  # it looks at the version
    except Exception as error:  # also of a broken library
        yield Problem(f"PyTorch cannot be used: {type(error).__name__}: {error}", remedy, True)
        return
    threads = torch.get_num_threads()
    with_ = f"with {threads} thread{'s' * (threads != 1)}"
    yield f"torch {torch.__version__} is supported, {with_}"


def environment() -> Iterator[Finding]:
    """The variables that are set, unknown ones, and values that are refused."""
    chosen = [name for name in sorted(os.environ) if name.startswith(_PREFIXES) or name in _OTHERS]
    yield from (f"{name}={os.environ[name]}" for name in chosen)
    if not chosen:
        yield "none of this package's is set"
    for name in chosen:
        if name.startswith(_PREFIX) and name not in VARIABLES:
            near = get_close_matches(name, sorted(VARIABLES), n=2)
            which = f"did you mean {' or '.join(near)}?" if near else f"unset {name}"
            yield Problem(f"no part of this package reads {name}", which)
    for name, read in _readers().items():
        if os.environ.get(name):
            try:
                read()
            except Exception as error:
                yield Problem(text_of(error), f"unset {name}, or set it to another value")


def _readers() -> Mapping[str, Callable[[], object]]:
    """The readers of variables that a small program does not read, by variable; each raises."""
    from ipu_dynamo.machine.system import system_of
    from ipu_dynamo.runtime.ranks.process_group import mesh_of_environment
    from ipu_dynamo.runtime.ranks.watch import limit_of_environment
    from ipu_dynamo.tune.matmul_choice import matmul_choice

    return {
        "IPU_DYNAMO_MACHINE": lambda: system_of(os.environ["IPU_DYNAMO_MACHINE"]),
        "IPU_DYNAMO_MATMUL": matmul_choice,
        "IPU_DYNAMO_MESH": mesh_of_environment,
        "IPU_DYNAMO_RANK_TIMEOUT": limit_of_environment,
    }


def poptorch_package() -> Iterator[Finding]:
    """Whether `import poptorch` in a program of this folder gives this package's."""
    here = Path.cwd()  # a checkout in which a program runs comes before what is installed
    parent = here if (here / "ipu_dynamo" / "__init__.py").is_file() else _PARENT
    shadowed = False
    for name in _BESIDE:
        found = _found(name)
        if found is None:
            shadowed = True
            yield Problem(f"{name} is missing", "install ipu_dynamo again", stops=True)
        elif not found.exists() or not found.samefile(parent / name):
            shadowed = True
            yield Problem(
                f"`import {name}` gives {found}, and not the {name} of ipu_dynamo",
                f"rename or remove {found}, or take its folder from PYTHONPATH",
                stops=True,
            )
    if shadowed:
        return
    try:
        from poptorch import __version__ as version
    except ImportError as error:  # Graphcore's distribution is installed, too
        yield Problem(text_of(error), "pip uninstall poptorch", stops=True)
        return
    yield f"poptorch {version}, in {_PARENT / 'poptorch'}"


def _found(name: str) -> Path | None:
    """The file or folder of the module that a program in the current folder would import."""
    sys.path.insert(0, "")
    try:
        spec = find_spec(name)
    finally:
        sys.path.remove("")
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]).absolute()
    return Path(spec.origin or name).absolute()
