"""Offer PopTorch's loaders: items for one call of a model, from this process or another one.

A `DataLoader` makes items of as many samples as one call takes. An `AsynchronousDataAccessor` makes
them ahead, by `ipu_dynamo.batches`. No process and no shared memory outlives the program.
"""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
