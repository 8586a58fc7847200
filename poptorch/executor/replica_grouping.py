"""Let groups of replicas have values of their own for a parameter."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ipu_dynamo.program import ReplicaGroups
from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import createPoptorchError
from poptorch.host_weights import ReplicaSlices

Grouping = tuple[CommGroupType, int, VariableRetrievalMode]
_OWN = frozenset(  # of the object that stands for a parameter, and not of the parameter
    {
        "__class__",
        "__delattr__",
        "__dir__",
        "__getattribute__",
        "__getstate__",
        "__init__",
        "__init_subclass__",
        "__new__",
        "__setattr__",
        "__setstate__",
        "__sizeof__",
        "__subclasshook__",
        "__torch_dispatch__",
        "__torch_function__",
    }
)


def read_grouping(
    name: str,
    comm_group_type: CommGroupType,
    shards: int,
    variable_retrieval_mode: VariableRetrievalMode,
    *,
    replicas: int,
) -> Grouping:
    """The arguments of `replicaGrouping`, checked, but for `All`, which groups nothing.

    Raises:
        ValueError: a type or mode that does not exist.
        poptorch.Error: groups that do not divide the replicas.
    """
    kind, mode = CommGroupType(comm_group_type), VariableRetrievalMode(variable_retrieval_mode)
    if kind in (CommGroupType.Consecutive, CommGroupType.Orthogonal):
        whole = isinstance(shards, int) and not isinstance(shards, bool)
        if not whole or shards < 1 or replicas % shards:
            raise createPoptorchError(
                f"replicaGrouping of {name}: shards is the number of replicas in a group and must "
                f"divide the replication factor {replicas} (got {shards!r})",
                id="option",
            )
    return kind, shards, mode


def replica_groups(grouping: Grouping) -> ReplicaGroups:
    """The core's groups, where not all replicas share the parameter."""
    kind, shards, _ = grouping
    if kind is CommGroupType.NoGrouping:
        return ReplicaGroups(1)
    return ReplicaGroups(shards, orthogonal=kind == CommGroupType.Orthogonal)


def groups_of_model(
    model: Any, groupings: Mapping[str, Grouping], replicas: int
) -> dict[str, ReplicaGroups]:
    """The groups of every parameter, for a compilation.

    Raises:
        poptorch.Error: a parameter has no leading dimension over its groups.
    """
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    found = {}
    for name, grouping in groupings.items():
        if grouping[0] == CommGroupType.All:
            continue  # whatever else is said
        groups = replica_groups(read_grouping(name, *grouping, replicas=replicas))
        found[name] = groups
        parameter, count = parameters.get(name), groups.count(replicas)
        if parameter is None:
            continue  # a second name, or none of the model's: the core says which
        if parameter.dim() == 0:
            raise createPoptorchError(
                f"Scalars cannot be passed as per-replica weight tensor values ({name} is one)",
                id="model",
            )
        comes_back = grouping[2] == VariableRetrievalMode.AllReplicas
        if len(parameter) != count and not (comes_back and len(parameter) == replicas):
            raise createPoptorchError(
                f"Parameter {name} has shape {list(parameter.shape)}: per-replica weights have one "
                f"slice for each group of replicas, so its leading dimension has to be {count}",
                id="model",
            )
    return found


def slices_of_model(model: Any, groupings: Mapping[str, Grouping], replicas: int) -> ReplicaSlices:
    """The parameters that come back with a slice for each replica."""
    named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else ()
    return ReplicaSlices(
        (parameter, replica_groups(groupings[name]).of(replicas))
        for name, parameter in named
        if name in groupings and groupings[name][2] == VariableRetrievalMode.AllReplicas
    )


class ExecutorParameter:
    """Stands for a parameter of an executor's model: only `replicaGrouping` is its own.

    Args:
        parameter: gets all other accesses.
        register: takes the arguments of `replicaGrouping`.
    """

    __slots__ = ("_parameter", "_register")

    def __init__(self, parameter: nn.Parameter, register: Callable[..., None]) -> None:
        object.__setattr__(self, "_parameter", parameter)
        object.__setattr__(self, "_register", register)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas a slice of this parameter, along a leading dimension.

        Gradients are summed over the replicas of a group only. Call it before compiling.

        Args:
            comm_group_type: which replicas form a group.
            shards: replicas in a group; of no meaning for All and NoGrouping.
            variable_retrieval_mode: the slices that the host reads back: one for each group, or
                with AllReplicas for each replica; then the parameter has that shape on the host,
                too.

        Raises:
            poptorch.Error: groups that do not divide the replicas, or a compiled model.
        """
        self._register(comm_group_type, shards, variable_retrieval_mode)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._parameter)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        plain = {key: _plain(value) for key, value in (kwargs or {}).items()}
        return func(*(_plain(argument) for argument in args), **plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._parameter, name, value)


def _plain(argument: Any) -> Any:
    """`argument` with parameters in place of the objects that stand for them."""
    if type(argument) is ExecutorParameter:
        return argument._parameter
    if type(argument) in (list, tuple):
        return type(argument)(map(_plain, argument))
    return argument


def _passed_on(name: str) -> Callable[..., Any]:
    """An operator, which Python looks for in the class, of the parameter."""

    def operator(self: ExecutorParameter, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._parameter, name)(*map(_plain, args), **kwargs)

    operator.__name__ = name
    return operator


for _name in dir(Tensor):
    if _name.startswith("__") and callable(getattr(Tensor, _name)) and _name not in _OWN:
        setattr(ExecutorParameter, _name, _passed_on(_name))
