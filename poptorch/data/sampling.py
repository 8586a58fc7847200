"""Keep the import paths of samplers, for loaders that an earlier version has pickled."""

from ipu_dynamo.batches.sampling import Batches, GroupedBatches, ProcessSampler
from poptorch.data.loader import concatenated

__all__ = ["Batches", "GroupedBatches", "ProcessSampler", "concatenated"]
