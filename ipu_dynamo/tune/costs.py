"""Name the costs that decide between two ways where nothing was measured."""

LARGE_UPDATE = 100_000  # elements; they take some tenths of a millisecond
