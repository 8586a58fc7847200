"""Run a program that was loaded from a file: a compiled model without a module."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ipu_dynamo.capture.trace import Arguments
from ipu_dynamo.errors import InputError, IpuError
from ipu_dynamo.options import Options
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.whole_step.calls.call_signature import ExpectedArguments
from ipu_dynamo.whole_step.calls.unchanged_model import UnchangedModel
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.free_rows import FreeRows
from ipu_dynamo.whole_step.optimizer.optimizer_sync import OptimizerLink
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group


class LoadedModel(CompiledModel):
    """The result of `ipu_dynamo.load`: call it as the model that was saved.

    Weights are those of `state_dict`; the numbers of the optimiser are `hyperparameters`.

    Args:
        compiled: as it would be of a model that was compiled here.
        executable: as it would be of a model that was compiled here.
        options: as they would be of a model that was compiled here.
        arguments: of a call; values of tensors are not looked at.
        groups: of the optimiser.
        own_weights: the executable was made with it.
        engine: the executable was made with it.
        figures: the executable was made with them.
        tensors: those that have a name in the model, and whether they are part of its state.

    Attributes:
        rows: runs a call with any number of rows, if the model was saved with free rows.
    """

    def __init__(
        self,
        compiled: Compiled,
        executable: Executable,
        options: Options,
        arguments: Arguments,
        groups: Sequence[Group],
        *,
        own_weights: bool,
        engine: Engine,
        figures: Figures | None,
        tensors: Mapping[str, tuple[Tensor, bool]],
    ) -> None:
        super().__init__(_no_model, options, optimizer=None, own_weights=own_weights)
        self.training = compiled.program.kind == "training"
        self._groups, self._tensors = tuple(groups), dict(tensors)
        self._figures = figures
        self.rows: FreeRows | None = None
        self._unchanged = UnchangedModel(_no_model)
        self._take(compiled, executable, engine, ExpectedArguments(arguments))

    @property
    def _name(self) -> str:
        return "a saved model"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call, as a `CompiledModel` does; with free `rows`, as many as there are rows.

        Args:
            args: positional arguments, as for a `CompiledModel`.
            kwargs: keyword arguments, as for a `CompiledModel`.
        """
        return (self.rows or super().__call__)(*args, **kwargs)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The optimiser's groups, with the numbers that are in force."""
        return self._groups

    def _next_hyperparameters(self) -> Hyperparameters:
        return [group.values for group in self._groups]

    @property
    def hyperparameters(self) -> tuple[dict[str, float], ...]:
        """The numbers of each group of parameters that are in force, by name."""
        return tuple(
            dict(zip(group.rule.hyperparameters, group.values, strict=True))
            for group in self._groups
        )

    def set_hyperparameters(self, group: int | None = None, **numbers: float) -> None:
        """Use other numbers from the next call on: `set_hyperparameters(lr=0.01)`.

        Args:
            group: of parameters; None: all groups.
            numbers: new values by name.

        Raises:
            InputError: the group or number does not exist, or the update has no place for it.
        """
        if group is not None and not 0 <= group < len(self._groups):
            raise InputError(f"there is no group {group}, of {len(self._groups)}")
        indices = range(len(self._groups)) if group is None else (group,)
        new = list(self._groups)
        for index in indices:
            known = self.hyperparameters[index]
            for name, number in numbers.items():
                _check_number(new[index], known, name, number)
            values = {**known, **{name: float(number) for name, number in numbers.items()}}
            new[index] = replace(new[index], values=tuple(values.values()))
        self._groups = tuple(new)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by their names in the model; these share memory with
        the program, as those of a module's `state_dict` do with the module."""
        self.executable.check_update()
        return {name: tensor for name, (tensor, persistent) in self._tensors.items() if persistent}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy values into parameters and buffers.

        Args:
            state: values by the names of `state_dict`.

        Raises:
            InputError: names or shapes are others than those of `state_dict`; nothing is changed.
        """
        own = {name: tensor for name, (tensor, kept) in self._tensors.items() if kept}
        if odd := sorted(own.keys() ^ state.keys()):
            raise InputError(f"the state lacks, or should not have: {', '.join(odd[:5])}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise InputError(
                    f"{name} has shape {list(state[name].shape)}, and {list(tensor.shape)} here"
                )
        names = own.keys() & {variable.name for variable in self.program.variables}
        used = {own[name].data_ptr() for name in names}
        with torch.no_grad():
            for name, tensor in own.items():
                if tensor.data_ptr() not in used:  # no part of the program reads it
                    tensor.copy_(state[name])
        self.executable.write({name: state[name] for name in names})

    def named_tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Every name of the model's tensors, the tensor, and whether it is part of its state."""
        for name, (tensor, persistent) in self._tensors.items():
            yield name, tensor, persistent

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """A loaded program is compiled.

        Args:
            args: have no effect.
            kwargs: have no effect.
        """
        raise IpuError("a loaded program is compiled: it has no Python that could be traced again")

    def _training(self) -> OptimizerLink:
        raise IpuError(
            "a loaded program has no torch optimizer\n"
            "  try:  hyperparameters and set_hyperparameters"
        )


def _no_model(*args: Any, **kwargs: Any) -> NoReturn:
    raise IpuError("a loaded program has no module")


def _check_number(group: Group, known: Mapping[str, float], name: str, number: object) -> None:
    if name not in known:
        raise InputError(f"{group.rule} has no number {name}; it has {', '.join(known)}")
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InputError(f"{name} is {number!r}, which is no number")
    if name == "momentum" and number and getattr(group.rule, "momentum", True) is False:
        raise InputError(
            f"the update {group.rule} was compiled without momentum",
            hint="compile the model with one other than 0",
        )
