"""Install the wheels of a folder into a new environment outside the checkout, and use it there.

Usage: python packaging/try_wheel.py dist
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
USE = FOLDER / "use_installed.py"
CONSTRAINTS = FOLDER.parent / "constraints.txt"


def main(folder: Path) -> None:
    """Install the wheels in `folder`, with their dependencies, no extras and the PyTorch of
    `CONSTRAINTS`, and run `USE`."""
    wheels = [str(wheel) for wheel in folder.resolve().glob("*.whl")]
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as elsewhere:
        venv.create(elsewhere, with_pip=True)
        python = [str(Path(elsewhere, "bin", "python")), "-I"]  # no PYTHONPATH, no current folder
        install = ["-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *wheels]
        for arguments in (install, [str(USE)]):
            subprocess.run(python + arguments, cwd=elsewhere, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
