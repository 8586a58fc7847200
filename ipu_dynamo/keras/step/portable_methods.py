"""Let optimisers update variables one by one through `assign`, as on every backend but torch.

Keras' torch backend has forms of its own that change lists of tensors in place, which no stateless
scope sees.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from ipu_dynamo.keras.private.stateless_names import inner_optimizers

METHODS = (
    "_backend_update_step",
    "_backend_reset_gradient_accumulators",
    "_backend_increment_gradient_accumulators",
    "_apply_weight_decay",
    "_backend_apply_gradients",
)
_BACKENDS = "keras.src.backend."


@contextmanager
def portable_methods(optimizer: Any) -> Iterator[None]:
    """Give an optimiser, and its inner optimisers, methods that belong to no backend.

    Each is the first definition in the class's order of bases outside of a backend's modules. It is
    mostly that of Keras' base class. Nadam, Muon and classes of users have some of their own.
    """
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for one in inner_optimizers(optimizer):
            own = vars(one)
            changed.append((own, {name: own[name] for name in METHODS if name in own}))
            for name in METHODS:
                if name not in own:  # a user's method on the object itself stays
                    own[name] = MethodType(portable(type(one), name), one)
        yield
    finally:
        for own, before in changed:
            for name in METHODS:
                own.pop(name, None)
            own.update(before)


def portable(kind: type, name: str) -> Any:
    """The first definition of a method outside of Keras' backends."""
    for base in kind.__mro__:
        if name in vars(base) and not base.__module__.startswith(_BACKENDS):
            return vars(base)[name]
    raise AttributeError(f"{kind.__qualname__} has no method {name}")
