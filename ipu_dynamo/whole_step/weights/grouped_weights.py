"""Check replica-grouped tensors against the model's own."""

from dataclasses import replace
from difflib import get_close_matches

from torch import Tensor, nn

from ipu_dynamo.capture.swap import Model
from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.options.replica_groups import ReplicaGroups


def with_known_groups(model: Model, options: Options) -> Options:
    """`options` with every grouped tensor under the first of its names in the model.

    Raises:
        OptionError: no parameter or buffer has the name, or two names of one tensor differ.
        CompileError: the tensor's leading dimension is not over the groups.
    """
    if not options.replica_groups:
        return options
    module = model if isinstance(model, nn.Module) else nn.Module()
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    groups_of: dict[str, ReplicaGroups] = {}
    for name, groups in options.replica_groups.items():
        if name not in named:
            near = ", ".join(get_close_matches(name, named, n=3)) or ", ".join(named) or "none"
            raise OptionError(
                f"option replica_groups has {name!r}, and the model no parameter or buffer of that "
                f"name; did you mean: {near}?"
            )
        _check_shape(name, named[name], groups.count(options.replicas))
        if groups_of.setdefault(first[id(named[name])], groups) != groups:
            raise OptionError(
                f"option replica_groups groups {name} and {first[id(named[name])]}, which are one "
                "tensor, in two ways"
            )
    return replace(options, replica_groups=groups_of)


def _check_shape(name: str, tensor: Tensor, groups: int) -> None:
    if tensor.dim() == 0 or len(tensor) != groups:
        raise CompileError(
            f"{name} has shape {list(tensor.shape)}, and {groups} groups of replicas",
            hint=f"give it a leading dimension of {groups}, a slice for each group",
        )
