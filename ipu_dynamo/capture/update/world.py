"""Take an optimiser apart: states and numbers that a step reads or writes, and constants.

A *leaf* is a tensor, a number, or anything else in `state`, in the groups or among the attributes;
its path says where. Everything else than tensors and numbers is part of the program, and compared
before each step.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipu_dynamo.capture.private.tracing import flatten_with_path, key_text, pytree

# Attributes that do not affect a step's values, or that are taken apart separately.
_LEFT = {"state", "param_groups", "defaults", "_opt_called", "_step_count"}
_PARAMETERS = ("params", "param_names")  # of a group
_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
_OWN = {key: value for key, value in _PLAIN.items() if key != "foreach"}


@dataclass(frozen=True)
class Leaf:
    """A value that a step finds.

    Args:
        path: where it is, such as `state 0 exp_avg` or `group 1 lr`; `self.name` for attributes.
        value: a tensor, a number, or anything else.
        parameter: index of the parameter whose state it is; None: of none.
        group: index of the group that it belongs to, directly or through a parameter; None: none.
        refers: index of the parameter that it is; None: it is not a parameter.
        keys: the path, key by key.
        key: its name within the group, the state of a parameter, or the attributes.
    """

    path: str
    value: Any
    parameter: int | None
    group: int | None
    key: str
    refers: int | None = None
    keys: tuple[Any, ...] = ()

    @property
    def is_number(self) -> bool:
        return type(self.value) in (int, float)

    @property
    def hyperparameter(self) -> tuple[int, str]:
        """Group and name of a number that only users change. An attribute of the optimiser counts
        as one of the first group, under a name that no key of a group has."""
        return (0, f"self.{self.key}") if self.group is None else (self.group, self.key)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, Tensor) and self.refers is None


@dataclass(frozen=True)
class World:
    """All leaves of an optimiser, in order, and how they are nested.

    Args:
        names: of the parameters, by index.
        members: indices of the parameters of each group.
        called: the names that each group has for them, where it has any.
        own_foreach: groups keep their settings of `foreach`, and are not stepped tensor by tensor.
    """

    optimizer: Optimizer
    parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    leaves: tuple[Leaf, ...]
    spec: Any
    called: tuple[tuple[str, ...], ...] = ()
    own_foreach: bool = False

    @property
    def tree(self) -> tuple[Any, ...]:
        """The paths and kinds of all leaves: worlds with equal trees have the same leaves."""
        return tuple(sorted((leaf.path, _kind(leaf)) for leaf in self.leaves))

    @property
    def fixed(self) -> tuple[tuple[str, Any], ...]:
        """Leaves other than tensors and numbers: they are part of the program."""
        return tuple((x.path, _kind(x)) for x in self.leaves if not x.is_number and not x.is_tensor)

    def is_known(self, leaf: Leaf) -> bool:
        """Whether Python may decide by the value of a tensor: it looks like a counter."""
        if not leaf.is_tensor or leaf.value.dim():
            return False
        own = leaf.parameter
        return own is None or self.parameters[own].dim() > 0 or leaf.key == "step"

    def shadow(
        self,
        values: Sequence[Any],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> Any:
        """A stand-in for the optimiser, with other values for its leaves."""
        world = pytree.tree_unflatten(list(values), self.spec)
        own: Any = object.__new__(type(self.optimizer))
        vars(own).update(vars(self.optimizer))
        vars(own).pop("step", None)  # schedulers patch the instance; the class's own step counts
        vars(own).update(world["attributes"])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        vars(own)["param_groups"] = [
            {**numbers, **self._plain(numbers), "params": [parameters[i] for i in members]}
            for numbers, members in zip(world["groups"], self.members, strict=True)
        ]
        for group, called in zip(vars(own)["param_groups"], self.called, strict=False):
            group["param_names"] = list(called)
        state = {
            parameters[key] if type(key) is int else key[1]: held
            for key, held in world["state"].items()
        }
        vars(own)["state"] = defaultdict(dict, state)
        return own

    def of_shadow(self, shadow: Any, parameters: Sequence[Tensor]) -> list[tuple[str, Any]]:
        """Return paths and values of a shadow after its step."""
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        originals = [
            {key: value for key, value in group.items() if key not in _PARAMETERS}
            for group in self.optimizer.param_groups
        ]
        groups = [
            {
                key: original.get(key) if key in self._plain(original) else value
                for key, value in group.items()
                if key not in _PARAMETERS
            }
            for group, original in zip(shadow.param_groups, originals, strict=True)
        ]
        tree = _tree(shadow.state, groups, _attributes(shadow), index)
        return [(key_text(path), value) for path, value in flatten_with_path(tree)[0]]

    def of_changed(self, shadow: Any, parameters: Sequence[Tensor]) -> "World":
        """Return the world of a shadow whose leaves have changed."""
        for group, original in zip(shadow.param_groups, self.optimizer.param_groups, strict=True):
            group |= {key: original[key] for key in self._plain(original)}
        for parameter in parameters:
            parameter.requires_grad_()
        names = dict(zip(map(id, parameters), self.names, strict=True))
        return world_of(shadow, names, own_foreach=self.own_foreach)

    def _plain(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of a group that let torch compute tensor by tensor, as a trace needs it."""
        flags = _OWN if self.own_foreach else _PLAIN
        return {key: value for key, value in flags.items() if key in group}


def world_of(
    optimizer: Optimizer,
    names: Mapping[int, str],
    without: Collection[str] = (),
    *,
    own_foreach: bool = False,
) -> World:
    """The world of an optimiser.

    Args:
        names: of the model's parameters, by identity.
        without: parameters that have no gradient.
        own_foreach: its groups keep their settings of `foreach`.
    """
    members: list[tuple[int, ...]] = []
    called: list[tuple[str, ...]] = []
    parameters: list[Tensor] = []
    group_of: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        places = [
            place
            for place, p in enumerate(group["params"])
            if p.requires_grad and names.get(id(p)) not in without
        ]
        trained = [group["params"][place] for place in places]
        if "param_names" in group:
            called.append(tuple(group["param_names"][place] for place in places))
        members.append(tuple(range(len(parameters), len(parameters) + len(trained))))
        parameters += trained
        group_of += [number] * len(trained)
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups = [
        {key: value for key, value in group.items() if key not in _PARAMETERS}
        for group in optimizer.param_groups
    ]
    tree = _tree(optimizer.state, groups, _attributes(optimizer), index)
    found, spec = flatten_with_path(tree)
    leaves = tuple(
        replace(
            _leaf(path, value, group_of),
            refers=index.get(id(value)) if isinstance(value, Tensor) else None,
            keys=tuple(_key(part) for part in path),
        )
        for path, value in found
    )
    return World(
        optimizer,
        tuple(parameters),
        tuple(names[id(parameter)] for parameter in parameters),
        tuple(members),
        leaves,
        spec,
        tuple(called),
        own_foreach,
    )


def _tree(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Any],
    index: Mapping[int, int],
) -> dict[str, Any]:
    """States by the index of their parameter, or by another key as it is."""
    held = {
        index.get(id(key), ("other", key)): dict(own) if isinstance(own, Mapping) else own
        for key, own in state.items()
        if not (isinstance(key, Tensor) and id(key) not in index)
    }
    ordered = dict(
        sorted(held.items(), key=lambda pair: (type(pair[0]) is not int, str(pair[0]).zfill(9)))
    )
    return {"state": ordered, "groups": list(groups), "attributes": dict(attributes)}


def _attributes(optimizer: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(vars(optimizer).items())
        if name not in _LEFT
        and not name.endswith("_hooks")
        and not callable(value)
        and not name.startswith("_warned")
    }


def _key(part: Any) -> Any:
    return getattr(part, "key", getattr(part, "idx", None))


def _leaf(path: Any, value: Any, group_of: Sequence[int]) -> Leaf:
    kind, *rest = (_key(part) for part in path)
    text = key_text(path)
    if kind == "state":
        owner, *inner = rest
        parameter = owner if type(owner) is int else None
        if type(owner) is tuple and isinstance(owner[1], str):
            inner = [owner[1], *inner]  # a state under a name of its own
        name = ".".join(map(str, inner)) or "value"
        return Leaf(
            text, value, parameter, None if parameter is None else group_of[parameter], name
        )
    if kind == "groups":
        number, *inner = rest
        return Leaf(text, value, None, number, ".".join(map(str, inner)))
    return Leaf(text, value, None, None, "self." + ".".join(map(str, rest)))


def _kind(leaf: Leaf) -> str:
    value = leaf.value
    if leaf.refers is not None:
        return f"parameter {leaf.refers}"
    if leaf.is_tensor:
        return f"{value.dtype} {tuple(value.shape)}"
    if leaf.is_number:
        return type(value).__name__
    if value is None or isinstance(value, bool | str | torch.dtype | torch.device):
        return f"{value!r}"
    return f"{type(value).__name__} {id(value)}"  # the same object
