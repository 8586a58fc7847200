"""Give an optimiser one state, also if compiled programs and Python make its steps in turn."""

from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.private.hooks import step_hooks


class _Step(Protocol):
    """A compiled training step, as far as the state of its optimiser needs it."""

    @property
    def is_compiled(self) -> bool: ...

    @property
    def has_newer_state(self) -> bool: ...

    def read_optimizer_state(self) -> None: ...

    def write_optimizer_state(self) -> None: ...


class NewestState:
    """Knows the compiled step that has the newest state of an optimiser.

    The optimiser's hooks hold this object. It holds the step, whose state would else be lost with
    it. A `DualView` compares two copies; here each step has one, and the optimiser has another.

    Attributes:
        step: has the newest state; None: the optimiser has it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.step: _Step | None = None
        self._optimizer = ref(optimizer)

    def read(self) -> None:
        """Write the newest state into the optimiser."""
        if self.step is not None and self.step.has_newer_state:
            self.step.read_optimizer_state()

    def give(self, step: _Step) -> None:
        """Bring the newest state to a compiled step, which is about to change it."""
        if self.step is step:
            return
        self.read()
        self.step = None
        step.write_optimizer_state()
        self.step = step

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Let the optimiser's own step go on from the newest state."""
        if optimizer is self._optimizer():  # a trace of the step has a stand-in for it
            self.read()
            self.step = None


_newest: WeakKeyDictionary[Optimizer, "ref[NewestState]"] = WeakKeyDictionary()


def follow_checkpoints(step: _Step, optimizer: Optimizer) -> NewestState:
    """Add hooks that exchange the optimiser's state; return the object its steps share.

    `optimizer.state_dict()` and `optimizer.step()` read the newest state first. After
    `load_state_dict`, `step` has the loaded state.

    Raises:
        CompileError: the optimiser was not initialised.
    """
    known = ref(step)

    def write(_: Optimizer) -> None:
        alive = known()
        if alive is not None and alive.is_compiled:
            alive.write_optimizer_state()

    hooks: Any = optimizer
    try:
        newest = _newest[optimizer]() if optimizer in _newest else None
        if newest is None:
            newest = NewestState(optimizer)
            hooks.register_state_dict_pre_hook(lambda _, newest=newest: newest.read())
            hooks.register_step_pre_hook(newest.before_step)
            _newest[optimizer] = ref(newest)
        hooks.register_load_state_dict_post_hook(write)
    except AttributeError as error:
        kind = type(optimizer)
        raise CompileError(
            f"{kind.__module__}.{kind.__qualname__} lacks what torch.optim.Optimizer.__init__ sets "
            f"({error}), so that its state dictionaries cannot be followed",
            hint="call it in __init__, or pass the optimizer that this one wraps",
            id="update",
        ) from error
    return newest


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the user has registered hooks of an optimiser's step."""
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer))
    return any(not isinstance(owner, NewestState) for owner in owners)
