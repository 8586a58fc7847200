"""Stand for modules that programs import and that do nothing for one process: logs, launchers."""

import ctypes
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class _Anything:
    """Whatever a program asks of such a module: it is called, entered and read, to no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # as the base of a class, too

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self

    def __getattr__(self, name: str) -> "_Anything":
        return attribute(name)

    def __or__(self, other: Any) -> "_Anything":
        return self

    def __enter__(self) -> "_Anything":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def attribute(name: str) -> _Anything:
    """Be any attribute of a module or object."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


def write(names: Iterable[str], folder: Path) -> None:
    """Write inert modules of these dotted names, which a path to `folder` lets `import` find.

    They import nothing of these tests: programs have folders of that name.
    """
    parts = "from typing import Any", inspect.getsource(_Anything), inspect.getsource(attribute)
    text = "\n\n".join((*parts, "__getattr__ = attribute\n"))
    for name in names:
        package = folder
        for part in name.split("."):
            package = package / part
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(text)


def allow_missing_libraries() -> None:
    """Let programs load native operators that nobody has built; ours are found by name."""
    load = ctypes.LibraryLoader.LoadLibrary

    def load_if_built(loader: Any, name: Any) -> Any:
        file = Path(str(name))
        if file.suffix == ".so" and (not file.is_file() or not file.stat().st_size):
            return _Anything()
        return load(loader, name)

    ctypes.LibraryLoader.LoadLibrary = load_if_built  # type: ignore[method-assign]
