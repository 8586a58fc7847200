"""Let an executor stand for the model that it runs: its members, its parameters, its text."""

from functools import partial
from typing import Any

import torch
from torch import nn

from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch.enums import CommGroupType
from poptorch.errors import createPoptorchError
from poptorch.executor.executor_module import ExecutorModule
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.executor.replica_grouping import ExecutorParameter, Grouping, read_grouping
from poptorch.options import Options
from poptorch.printing import module_repr


class ModelMembers:
    """The part of an executor that has the members of the user's model.

    Attributes:
        per_replica_params: the arguments of `replicaGrouping`, by the parameter's dotted name.
    """

    per_replica_params: dict[str, Grouping]
    _core: CompiledModel | None
    _made_from: Any
    _options: Options
    _traced: Any
    _training: bool
    _update: OptimizerInUse | None

    @property
    def model(self) -> Any:
        """The wrapped module."""
        return self._made_from if self._training else self._traced

    @property
    def options(self) -> Options:
        """The executor's own options, frozen."""
        return self._options

    @property
    def _user_model(self) -> Any:
        """As libraries for PopTorch call it."""
        return self.model

    @property
    def _model(self) -> Any:
        """The model that is traced, under the name that libraries for PopTorch use."""
        return self._traced

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, under the name that libraries for PopTorch use."""
        return None if self._update is None else self._update.optimizer

    def __repr__(self) -> str:
        model = self.model
        return module_repr(model) if isinstance(model, nn.Module) else repr(model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_made_from" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        value = getattr(self.model, name)
        if isinstance(value, nn.Parameter):
            return ExecutorParameter(value, partial(self._group_replicas, name))
        return self._present(value)

    def _present(self, value: Any) -> Any:
        """A module or parameter inside the model as users get it; anything else as it is."""
        if isinstance(value, nn.Module):
            return ExecutorModule(value, self._present)
        if isinstance(value, nn.Parameter):
            names = (name for name, x in self._traced.named_parameters() if x is value)
            if name := next(names, ""):
                return ExecutorParameter(value, partial(self._group_replicas, name))
        return value

    def _group_replicas(self, name: str, *grouping: Any) -> None:
        if self._core is not None:
            raise createPoptorchError(
                f"replicaGrouping of {name}: the model is compiled already; call it before, or "
                "after destroy()",
                id="call",
            )
        if CommGroupType(grouping[0]) is CommGroupType.All:
            return  # all replicas share it, as they do anyway
        replicas = self._options.replication_factor
        self.per_replica_params[name] = read_grouping(name, *grouping, replicas=replicas)
