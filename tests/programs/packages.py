"""Install what programs need beside this project, as pip fetches it, each set in its own folder."""

import hashlib
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "build" / "programs"


class NotInstalled(Exception):
    """A package of a program cannot be had."""


def packages(requirements: tuple[str, ...]) -> Path | None:
    """The folder with these packages, without what they depend on; None if there are none.

    Raises:
        NotInstalled: pip does not find or cannot install one.
    """
    if not requirements:
        return None
    name = hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:12]
    folder, done = _FOLDER / name, _FOLDER / f"{name}.done"
    if not done.exists():
        pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"
        unused = "--no-compile"  # most of their files are never imported
        command = [*pip, unused, "--target", str(folder), *requirements]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise NotInstalled(f"{' '.join(requirements)}: {result.stderr.strip()[-500:]}")
        done.touch()
    return folder
