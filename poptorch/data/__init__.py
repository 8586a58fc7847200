"""Make what models consume, in this process or in one beside it.

A `DataLoader` gives items of as many samples as one call takes; an `AsynchronousDataAccessor` has
them made while the model computes. No process and no shared memory outlives the program.
"""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader
from poptorch.data.samplers_with_source import accept_data_source

__all__ = ["AsynchronousDataAccessor", "DataLoader"]

accept_data_source()
