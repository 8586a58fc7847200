"""Let `optimizer.state_dict` and `load_state_dict` see the states that a program holds."""

from typing import Any, Protocol
from weakref import ref

from torch.optim import Optimizer

from ipu_dynamo.errors import CompileError


class _Step(Protocol):
    """A compiled training step, as far as checkpoints need it."""

    @property
    def is_compiled(self) -> bool: ...

    @property
    def has_newer_state(self) -> bool: ...

    def read_optimizer_state(self) -> None: ...

    def write_optimizer_state(self) -> None: ...


def follow_checkpoints(step: _Step, optimizer: Optimizer) -> None:
    """Before `optimizer.state_dict()`, read the states of `step`; after loading, write them.

    The optimiser keeps no reference to the step.
    """
    known = ref(step)

    def read(_: Optimizer) -> None:
        alive = known()
        if alive is not None and alive.has_newer_state:
            alive.read_optimizer_state()

    def write(_: Optimizer) -> None:
        alive = known()
        if alive is not None and alive.is_compiled:
            alive.write_optimizer_state()

    hooks: Any = optimizer
    try:
        hooks.register_state_dict_pre_hook(read)
        hooks.register_load_state_dict_post_hook(write)
    except AttributeError as error:
        kind = type(optimizer)
        raise CompileError(
            f"{kind.__module__}.{kind.__qualname__} lacks what torch.optim.Optimizer.__init__ sets "
            f"({error}), so that its state dictionaries cannot be followed",
            hint="call it in __init__, or pass the optimizer that this one wraps",
            id="update",
        ) from error
