"""Show that a model is being compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_WHOLE = 100  # per cent


@contextmanager
def compilation_bar(*, show: bool) -> Iterator[None]:
    """Show a bar that is full when the block ends without an error."""
    with tqdm(
        total=_WHOLE,
        desc="Graph compilation",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
        disable=not show,
    ) as bar:
        yield
        bar.update(_WHOLE)
