"""Watch how much memory a process and its children hold together."""

import os
import threading
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest sum of resident bytes of a session's processes, looked at 20 times a second."""

    def __init__(self, session: int) -> None:
        self.nbytes = 0
        self._session, self._over = session, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.nbytes = max(self.nbytes, resident_bytes(self._session))


def resident_bytes(session: int) -> int:
    """What the processes of a session hold now; shared pages count in each of them."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int((folder / "statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue  # it has ended
    return total
