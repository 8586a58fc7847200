"""Make one module of a model's step, as Keras' JAX trainer has it: stateless, on the variables' own
tensors.

Assignments of the step are written to buffers in place; only the update changes weights.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from keras import StatelessScope, tree
from keras.utils import pack_x_y_sample_weight
from torch import Tensor, nn

from ipu_dynamo.capture.private.tracing import quote_source_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.private.stateless_names import (
    described_functions,
    gives_training,
    is_overridden,
    is_variable,
    loss_of,
    mapping_of,
    override_losses,
    track_loss,
    without_gradient,
)
from ipu_dynamo.keras.stages.stage_plan import StagePlan
from ipu_dynamo.keras.step.assigned_weights import (
    Receivers,
    check_assignment,
    received,
    zeros_like,
)
from ipu_dynamo.keras.step.machine_shape import CallShape
from ipu_dynamo.keras.step.stage_walk import StageWalk
from ipu_dynamo.keras.step.step_scope import StepScope, outside_variables
from ipu_dynamo.keras.step.step_variables import Kind, StepVariable
from ipu_dynamo.keras.step.tracing import Constants, keras_traced

Scaled = Callable[[Tensor], Tensor]


def _present(leaf: Any) -> Any:
    """The value that a variable has now, which a metric may give as its result."""
    return leaf.value.clone() if is_variable(leaf) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class StepModule(nn.Module):
    """The step of a model on one batch, for the core to trace.

    It holds the tensors of variables, trainable ones as parameters, all others as buffers, under
    names as `dense.kernel`. Keras' model is no submodule of it, so nothing is held twice.

    Args:
        model: of Keras; built, and compiled unless only predictions are made.
        kind: decides the results: `fit` gives a loss to minimise and logs, `evaluate` logs,
            `predict` outputs.
        variables: with the tensors that this module has for them.
        reduced: the loss that is differentiated, from the scaled one: what divides by the number of
            micro-batches.
        generators: the seed generators of draws that name none, by stage; 0 without stages.
        plan: of the calls, if the model is pipelined.
        receivers: of trained variables that the step assigns.
        shape: of an execution, which may rule such assignments out.

    Attributes:
        without_generator: the stage of a draw without a seed, for which there is no generator;
            None: the last trace met none.
        without_receiver: a variable of Keras that is assigned and has none; None: as above.
        without_tensor: a variable of Keras that is read or assigned, and is not one of the step's;
            None: as above.
        written: identities of the variables that the last trace assigned.
        constants: tensors and arrays that it read.
    """

    def __init__(
        self,
        model: Any,
        kind: Kind,
        variables: Sequence[tuple[StepVariable, Tensor]],
        *,
        reduced: Scaled | None = None,
        generators: Mapping[int, Any] | None = None,
        plan: StagePlan | None = None,
        receivers: Receivers | None = None,
        shape: CallShape | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.without_generator: int | None = None
        self.without_receiver: Any = None
        self.without_tensor: Any = None
        self.written: set[int] = set()
        self.constants = Constants()
        self._receivers, self._shape = dict(receivers or {}), shape
        self._received: dict[StepVariable, Tensor] = {}
        self._variables = tuple(variable for variable, _ in variables)
        self._reduced, self._generators, self._plan = reduced, dict(generators or {}), plan
        self._walk: StageWalk | None = None
        self._keras = (model,)  # a tuple, past what PyTorch takes for a submodule
        for variable, tensor in variables:
            self._hold(variable, tensor)
        for variable, name in self._receivers.items():
            self._owner(name).register_parameter(name.split(".")[-1], zeros_like(variable.tensor))
        for function in described_functions(model):
            quote_source_of(function)

    def _hold(self, variable: StepVariable, tensor: Tensor) -> None:
        name = variable.name.split(".")[-1]
        owner = self._owner(variable.name)
        if not variable.is_parameter:
            owner.register_buffer(name, tensor.detach())
            return
        trains = variable.role in ("trained", "scale")
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad != trains:
            tensor = nn.Parameter(tensor.detach(), requires_grad=trains)
        owner.register_parameter(name, tensor)

    def _owner(self, name: str) -> nn.Module:
        """The module that holds the tensor of a name, made if it does not exist."""
        owner: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(f"{part}", nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner

    def held(self, variable: StepVariable) -> Tensor:
        """The tensor of a variable; a stand-in while the module is traced."""
        return self._called(variable.name)

    def _called(self, name: str) -> Tensor:
        owner, last = self._owner(name), name.split(".")[-1]
        tensor = owner._parameters.get(last)
        return owner._buffers[last] if tensor is None else tensor  # type: ignore[return-value]

    def forward(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """The logs of one batch, or its outputs; of fit the loss to minimise, and the logs."""
        present = {v: self.held(v) for v in self._variables}
        mapping = {id(v.variable): tensor for v, tensor in present.items()}
        weights = frozenset(id(v.variable) for v in present if v.is_parameter)
        self._received = {}
        self.written = set()
        self.constants = Constants()
        with keras_traced(self._own_generator, self.constants), outside_variables(self._outside):
            scope = StepScope(mapping, weights, self._assign_weight, self._outside)
            write = partial(self._write, scope, present)
            self._walk = None if self._plan is None else self._new_walk(self._plan, write)
            with scope:
                results = tree.map_structure(_present, self._step(x, y, sample_weight))
            write()
        if not self._received:
            return results
        loss, logs = results
        return loss + sum(self._received.values()), logs

    def _new_walk(self, plan: StagePlan, write: Callable[[], None]) -> StageWalk:
        return StageWalk(plan, write)

    def _step(self, x: Any, y: Any, sample_weight: Any) -> Any:
        (model,) = self._keras
        if self.kind == "predict":
            if is_overridden(model, "predict_step"):
                return model.predict_step(pack_x_y_sample_weight(x, y, sample_weight))
            return self._outputs(x, training=False)
        if self.kind == "evaluate" and is_overridden(model, "test_step"):
            return model.test_step(pack_x_y_sample_weight(x, y, sample_weight))
        training = self.kind == "fit"
        y_pred = self._outputs(x, training=training)
        override_losses(model, model.losses if self._walk is None else self._walk.losses)
        try:
            loss = loss_of(model, x, y, y_pred, sample_weight, training)
        finally:
            override_losses(model, ())
        rows = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
        track_loss(model, loss.detach(), rows)
        seen = tree.map_structure(without_gradient, y_pred)
        # metrics write masks into sample weights, and the gradient needs those of the loss
        weights = tree.map_structure(_copied, sample_weight)
        logs = model.compute_metrics(x, y, seen, weights)
        if not training:
            return logs
        scaled = model.optimizer.scale_loss(loss)
        # returned, and not marked: metrics may compute losses of PyTorch, which count as marked
        return (scaled if self._reduced is None else self._reduced(scaled)), logs

    def _outputs(self, x: Any, *, training: bool) -> Any:
        (model,) = self._keras
        with nullcontext() if self._walk is None else self._walk.instead_of_call():
            return model(x, training=training) if gives_training(model) else model(x)

    def _write(self, scope: StatelessScope, present: dict[StepVariable, Tensor]) -> None:
        """Write the step's assignments since the last write in place, except to weights.

        Args:
            present: the values of variables, which become those of the scope.
        """
        mapping = mapping_of(scope)
        with torch.no_grad():
            for variable, value in present.items():
                new = mapping[id(variable.variable)]
                if new is not value and not variable.is_parameter:
                    self.held(variable).copy_(new.detach())
                    self.written.add(id(variable.variable))
                    present[variable] = new
        for variable, name in self._receivers.items():
            new = mapping[id(variable.variable)]
            if new is not present[variable]:
                self._received[variable] = received(self._called(name), new)
                present[variable] = new

    def _outside(self, variable: Any) -> None:
        """Ask for the tensor of a variable outside of the step, such as one that a loss reads."""
        if all(v.variable is not variable for v in self._variables):
            self.without_tensor = variable
            raise CompileError(
                f"the step uses {variable.path}, which is no variable of the model",
                hint="make it an attribute of a layer, so that Keras finds it",
            )

    def _assign_weight(self, variable: Any) -> Tensor:
        """The parameter of a variable that the step assigns."""
        (weight,) = (v for v in self._variables if v.variable is variable)
        check_assignment(weight, self.kind, self._shape)
        if weight not in self._receivers:
            self.without_receiver = variable
            raise CompileError(
                f"the model assigns {variable.path}, a trainable variable",
                hint="make it with add_weight(trainable=False)",
            )
        return self.held(weight)

    def _own_generator(self) -> Any:
        stage = 0 if self._walk is None else self._walk.stage
        if stage not in self._generators:
            self.without_generator = stage
            raise CompileError(
                "a random function of keras.random is called without a seed",
                hint="give it a keras.random.SeedGenerator",
            )
        return self._generators[stage]
