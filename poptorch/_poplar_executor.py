"""Offer what libraries for PopTorch reach through `poptorch._poplar_executor`."""

from poptorch.executor.executor import PoplarExecutor
from poptorch.substitutions import _OverwriteContextManager

__all__ = ["PoplarExecutor", "_OverwriteContextManager"]
