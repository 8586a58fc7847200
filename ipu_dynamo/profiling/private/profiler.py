"""Ask PyTorch's profiler whether it runs, and give it rows."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.autograd.profiler

# Whether a profiler runs in this process, on any thread. It is no Python function, so that asking
# costs no frame; `torch.autograd._profiler_enabled` answers for the calling thread alone.
profiler_runs: Callable[[], bool] = partial(
    attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)


# A context manager: a row while a profiler runs, as `torch.profiler.record_function`. That one
# calls operators of PyTorch, which a trace of the model would take for a part of the model.
ProfilerRow: Any = torch._C._profiler._RecordFunctionFast
