"""Show that a model is being compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_WHOLE = 100  # per cent


class _Bar(tqdm):
    """A bar without a thread that watches it, which would stay to the end of the process."""

    monitor_interval = 0


@contextmanager
def compilation_bar(*, show: bool) -> Iterator[None]:
    """Show a bar that is full when the block ends without an error."""
    with _Bar(
        total=_WHOLE,
        desc="Graph compilation",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
        disable=not show,
    ) as bar:
        yield
        bar.update(_WHOLE)
