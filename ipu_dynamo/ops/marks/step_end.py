"""Let models change a variable once in a step, after its last micro-batch.

`ipu::write_at_step_end` is the mark, which `defer_writes` reads. `ipu::accumulation_weight` is
1 / (k + 1) at micro-batch k of a step, which comes from the host. Outside of a program a step is
one call.
"""

import torch
from torch import Tensor

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("write_at_step_end(Tensor(a!) variable, Tensor value) -> ()")
_library.define("accumulation_weight() -> Tensor")


def _write(variable: Tensor, value: Tensor) -> None:
    variable.copy_(value)


def _weight() -> Tensor:
    return torch.ones(())


_library.impl("write_at_step_end", _write, "CompositeExplicitAutograd")
_library.impl("accumulation_weight", _weight, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::write_at_step_end", lambda *_: None, lib=_library)
torch.library.register_fake("ipu::accumulation_weight", _weight, lib=_library)
write_at_step_end_op = torch.ops.ipu.write_at_step_end.default
accumulation_weight_op = torch.ops.ipu.accumulation_weight.default


def write_at_step_end(variable: Tensor, value: Tensor) -> None:
    """Give a parameter that is not trained, or a buffer, the value of a step's last micro-batch.

    All readers in the step get the variable's old value, also those after this call.
    """
    write_at_step_end_op(variable, value)
