"""Show what a compilation is doing, and at its end how long everything took."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from tqdm import tqdm

from ipu_dynamo.progress import Doing, watched_by
from ipu_dynamo.rank_number import this_rank

_WHOLE = 100  # per cent
_PARTS = {  # from which per cent to which each kind of work goes
    "tracing": (0, 10),
    "measuring": (10, 15),
    "passes": (15, 30),
    "functions": (30, 80),
    "compiler": (80, 99),
}


class _Bar(tqdm):
    """A bar without a thread that watches it, which would stay to the end of the process."""

    monitor_interval = 0
    _shown: tuple[str, float] = ("", 0.0)  # what was shown last, and when

    def begins(self, doing: Doing) -> None:
        """Show what is done now; of several things, those before this one are done."""
        first, last = _PARTS[doing.what]
        done = first + (last - first) * max(doing.number - 1, 0) // max(doing.count, 1)
        self.n = max(done, self.n)
        self.set_postfix_str(str(doing), refresh=False)
        what, since = self._shown
        if doing.what != what or perf_counter() - since > self.mininterval:
            self._shown = doing.what, perf_counter()
            self.refresh()

    def is_done(self, times: str) -> None:
        """Show where the time went."""
        self.set_postfix_str(times, refresh=False)


@contextmanager
def compilation_bar(*, show: bool) -> Iterator[None]:
    """Show a bar that is full when the block ends without an error, on rank 0 of several."""
    show = show and this_rank() == 0
    with _Bar(
        total=_WHOLE,
        desc="Graph compilation",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]{postfix}",
        disable=not show,
    ) as bar:
        with watched_by(bar) if show else nullcontext():
            yield
        bar.update(_WHOLE - bar.n)
