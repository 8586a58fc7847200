"""Install the wheel of a folder into a new environment outside the checkout, and use it there.

Usage: python packaging/try_wheel.py dist
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

USE = Path(__file__).resolve().parent / "use_installed.py"


def main(folder: Path) -> None:
    """Install the one wheel in `folder`, with its dependencies and no extras, and run `USE`."""
    (wheel,) = folder.resolve().glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as elsewhere:
        venv.create(elsewhere, with_pip=True)
        python = [str(Path(elsewhere, "bin", "python")), "-I"]  # no PYTHONPATH, no current folder
        for arguments in (["-m", "pip", "install", "--quiet", str(wheel)], [str(USE)]):
            subprocess.run(python + arguments, cwd=elsewhere, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
