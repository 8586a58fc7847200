"""Run a pipelined model call by call, each in the block of its stage.

Keras' own run of a graph, but in the order of stages, and with what a stage has to leave behind:
its layers' losses as scalars, and the variables that it has assigned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from keras import tree

from ipu_dynamo.blocks import begin
from ipu_dynamo.keras.private.keras_private import Functional, Sequential
from ipu_dynamo.keras.private.stateless_names import (
    current_scope,
    fill_in,
    gives_training,
    mask_of,
    standard_inputs,
    summed_loss,
    symbolic_inputs_of,
    symbolic_outputs_of,
    takes_context,
    takes_mask,
)
from ipu_dynamo.keras.stages.stage_plan import Invocation, StagePlan


def block_name(stage: int) -> str:
    """The name of a stage's block in the program."""
    return f"stage{stage}"


class StageWalk:
    """One run of a pipelined model, while it is traced.

    Args:
        plan: of the model's calls.
        behind_each: runs behind every call, in the block of its stage.

    Attributes:
        stage: of the call that is running.
        losses: of layers so far, as they count in the model's, each computed in its stage.
    """

    def __init__(self, plan: StagePlan, behind_each: Callable[[], None]) -> None:
        self._plan, self._behind_each = plan, behind_each
        self.stage = 0
        self.losses: list[Any] = []
        self._counted = 0  # of the scope's losses
        self._regularised: set[int] = set()

    def enter(self, stage: int) -> None:
        """Begin the block of a stage; it lasts until another one begins."""
        self.stage = stage
        begin(block_name(stage))

    @contextmanager
    def instead_of_call(self) -> Iterator[None]:
        """Let the model's `call` be this walk: everything around it stays Keras' own."""
        self.enter(0)
        with _call_replaced(self._plan.model, partial(self._run, self._plan)):
            yield
        self.enter(self._plan.num_stages - 1)
        self._leave(self._plan.model)

    def _run(
        self,
        plan: StagePlan,
        inputs: Any,
        training: Any = None,
        mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What `call` of a model does, its own or of a nested one."""
        model = plan.model
        context = {"training": training, **kwargs}
        if plan.inputs is None:
            return self._chain(plan, inputs, context, mask)
        if isinstance(model, Functional | Sequential):
            functional = model if isinstance(model, Functional) else model._functional
            values = standard_inputs(functional, inputs, mask)
            known = {
                id(symbol): value
                for symbol, value in zip(symbolic_inputs_of(functional), values, strict=True)
            }
            self._calls(plan, known, context, replaces=True)
            outputs = _results(symbolic_outputs_of(functional), known)
            single = isinstance(outputs, list | tuple) and len(outputs) == 1
            return outputs[0] if single else outputs
        symbols, values = tree.flatten(plan.inputs), tree.flatten(inputs)
        known = {id(symbol): value for symbol, value in zip(symbols, values, strict=True)}
        self._calls(plan, known, context, replaces=False)
        return _results(plan.outputs, known)

    def _calls(
        self, plan: StagePlan, known: dict[int, Any], context: dict[str, Any], *, replaces: bool
    ) -> None:
        """Make all calls of a graph.

        Args:
            known: values of symbolic tensors; gets those of the results.
            context: arguments that calls hand on to their inner ones.
            replaces: they replace what a node has of them, as in Functional models.
        """
        for invocation in plan.invocations:
            args, kwargs = fill_in(invocation.node, known)
            for name, value in context.items():
                if value is None or not takes_context(invocation.operation, name):
                    continue
                if replaces or kwargs.get(name) is None:
                    kwargs[name] = value
            outputs = self._call(invocation, args, kwargs)
            pairs = zip(invocation.node.outputs, tree.flatten(outputs), strict=True)
            known.update((id(symbol), value) for symbol, value in pairs)

    def _chain(self, plan: StagePlan, inputs: Any, context: dict[str, Any], mask: Any) -> Any:
        """A Sequential of which Keras makes no graph: each layer takes the result before it."""
        value = inputs
        for invocation in plan.invocations:
            layer = invocation.operation
            kwargs = {n: v for n, v in context.items() if v is not None and takes_context(layer, n)}
            if takes_mask(layer):
                kwargs["mask"] = mask
            value = self._call(invocation, (value,), kwargs)
            mask = tree.map_structure(mask_of, value)
        return value

    def _call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operation, nested = invocation.operation, invocation.nested
        if nested is None:
            self.enter(invocation.stage)
            outputs = operation(*args, **kwargs)
        else:
            if not gives_training(operation):
                kwargs.pop("training", None)
            self.enter(_first_stage(nested))
            with _call_replaced(operation, partial(self._run, nested)):
                outputs = operation(*args, **kwargs)
            self.enter(invocation.stage)
        self._leave(operation)
        return outputs

    def _leave(self, operation: Any) -> None:
        """Compute what the stage that was running has to, behind a call."""
        scope, model = current_scope(), self._plan.model
        new, self._counted = scope.losses[self._counted :], len(scope.losses)
        self.losses += [summed_loss(model, loss) for loss in new]
        for variable in getattr(operation, "trainable_weights", ()):
            if id(variable) not in self._regularised:
                self._regularised.add(id(variable))
                if variable.regularizer is not None:
                    loss = variable.regularizer(scope.get_current_value(variable))
                    self.losses.append(summed_loss(model, loss))
        self._behind_each()


def _first_stage(plan: StagePlan) -> int:
    return min(
        invocation.stage if invocation.nested is None else _first_stage(invocation.nested)
        for invocation in plan.invocations
    )


def _results(symbols: Any, known: dict[int, Any]) -> Any:
    values = [known[id(symbol)] for symbol in tree.flatten(symbols)]
    return tree.pack_sequence_as(symbols, values)


@contextmanager
def _call_replaced(model: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Give a model another `call`, on the instance, past what Keras tracks."""
    own = vars(model)
    before = own.get("call")
    own["call"] = call
    try:
        yield
    finally:
        if before is None:
            del own["call"]
        else:
            own["call"] = before
