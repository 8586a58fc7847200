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
HOROVOD = "ipu_dynamo_horovod"
USE_HOROVOD = "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1"
CONSTRAINTS = FOLDER.parent / "constraints.txt"


def main(folder: Path) -> None:
    """Install the wheels in `folder`, with their dependencies, no extras and the PyTorch of
    `CONSTRAINTS`, and run `USE`. The wheel of horovod comes last, as most users do without it."""
    (horovod,) = map(str, folder.resolve().glob(f"{HOROVOD}-*.whl"))
    wheels = [str(wheel) for wheel in folder.resolve().glob("*.whl") if str(wheel) != horovod]
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as elsewhere:
        venv.create(elsewhere, with_pip=True)
        python = [str(Path(elsewhere, "bin", "python")), "-I"]  # no PYTHONPATH, no current folder
        install = ["-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
        last = [*install, "--no-deps", horovod]
        for arguments in ([*install, *wheels], [str(USE)], last, ["-c", USE_HOROVOD]):
            subprocess.run(python + arguments, cwd=elsewhere, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
