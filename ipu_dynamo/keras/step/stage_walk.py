"""Run a pipelined model call by call, each in the block of its stage.

It is Keras' own run of a graph, but in the order of stages. Each stage also computes its layers'
losses as scalars, and writes the variables that it has assigned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from keras import tree

from ipu_dynamo.blocks import begin
from ipu_dynamo.keras.private.keras_graphs import inner_functional
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
        behind_each: runs after every call, in the block of its stage.

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
        """Run `call` of the model, or of a nested one."""
        context = {"training": training, **kwargs}
        if plan.inputs is None:
            return self._chain(plan, inputs, context, mask)
        graph = self._graph(plan, inputs, context, mask)
        for stage in range(plan.num_stages):
            self._advance(graph, stage)
        return graph.outputs()

    def _graph(
        self, plan: StagePlan, inputs: Any, context: dict[str, Any], mask: Any
    ) -> "_RunningGraph":
        """The run of a graph, with the values of its inputs."""
        model = plan.model
        if not isinstance(model, Functional | Sequential):
            values = tree.flatten(inputs)
            return _RunningGraph(plan, context, tree.flatten(plan.inputs), values, plan.outputs)
        functional = model if isinstance(model, Functional) else inner_functional(model)
        return _RunningGraph(
            plan,
            context,
            symbolic_inputs_of(functional),
            standard_inputs(functional, inputs, mask),
            symbolic_outputs_of(functional),
            replaces=True,
        )

    def _advance(self, graph: "_RunningGraph", stage: int) -> None:
        """Make the calls of a stage, also those inside of models that span several stages."""
        for place, invocation in enumerate(graph.plan.invocations):
            if place in graph.done:
                continue
            nested = invocation.nested
            if nested is None or nested.inputs is None or len(_stages(nested)) == 1:
                if invocation.stage == stage:
                    args, kwargs = graph.arguments(invocation)
                    graph.finish(place, self._call(invocation, args, kwargs))
                continue
            if place not in graph.inner:
                if min(_stages(nested)) > stage:
                    continue
                self.enter(stage)
                args, kwargs = graph.arguments(invocation)
                context = graph.context | {n: kwargs[n] for n in graph.context if n in kwargs}
                inputs = args[0] if args else kwargs["inputs"]
                graph.inner[place] = self._graph(nested, inputs, context, kwargs.get("mask"))
            inner = graph.inner[place]
            self._advance(inner, stage)
            if len(inner.done) == len(nested.invocations):
                graph.finish(place, inner.outputs())
                self._leave(invocation.operation)

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
            self.enter(min(_stages(nested)))
            with _call_replaced(operation, partial(self._run, nested)):
                outputs = operation(*args, **kwargs)
            self.enter(invocation.stage)
        self._leave(operation)
        return outputs

    def _leave(self, operation: Any) -> None:
        """After a call, compute its losses in the stage that was running; run `behind_each`."""
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


class _RunningGraph:
    """A graph of calls that runs.

    Args:
        context: arguments that calls hand on to their inner ones.
        symbols, values: of the inputs.
        results: nested symbolic outputs.
        replaces: the context replaces a node's own arguments of these names, as in Functional
            models.

    Attributes:
        done: places of invocations that were made.
        inner: by place, the runs of models that span several stages.
    """

    def __init__(
        self,
        plan: StagePlan,
        context: dict[str, Any],
        symbols: Sequence[Any],
        values: Sequence[Any],
        results: Any,
        *,
        replaces: bool = False,
    ) -> None:
        self.plan, self.context = plan, context
        self._results, self._replaces = results, replaces
        pairs = zip(symbols, values, strict=True)
        self._known = {id(symbol): value for symbol, value in pairs}
        self.done: set[int] = set()
        self.inner: dict[int, _RunningGraph] = {}

    def arguments(self, invocation: Invocation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call.

        Raises:
            ValueError: a model inside begins before all of its inputs are computed.
        """
        operation = invocation.operation
        if any(id(tensor) not in self._known for tensor in invocation.node.input_tensors):
            raise ValueError(
                f"{operation.name} has layers on a pipeline stage before one that computes an "
                "input of it: assign its first layers to that stage"
            )
        args, kwargs = fill_in(invocation.node, self._known)
        for name, value in self.context.items():
            if value is None or not takes_context(operation, name):
                continue
            if self._replaces or kwargs.get(name) is None:
                kwargs[name] = value
        return args, kwargs

    def finish(self, place: int, outputs: Any) -> None:
        """Note the results of a call."""
        symbols = self.plan.invocations[place].node.outputs
        pairs = zip(symbols, tree.flatten(outputs), strict=True)
        self._known.update((id(symbol), value) for symbol, value in pairs)
        self.done.add(place)

    def outputs(self) -> Any:
        """The results, once all calls were made; of a Functional model a single one by itself."""
        values = [self._known[id(symbol)] for symbol in tree.flatten(self._results)]
        outputs = tree.pack_sequence_as(self._results, values)
        single = self._replaces and isinstance(outputs, list | tuple) and len(outputs) == 1
        return outputs[0] if single else outputs


def _stages(plan: StagePlan) -> set[int]:
    """The stages of all calls of a plan."""
    found: set[int] = set()
    for invocation in plan.invocations:
        nested = invocation.nested
        found |= {invocation.stage} if nested is None else _stages(nested)
    return found


@contextmanager
def _call_replaced(model: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Give a model another `call`, on the instance, past what Keras tracks."""
    own = vars(model)
    before = own.get("call")
    own["call"] = call
    try:
        yield
    finally:
        if own.get("call") is call:  # remove only this replacement
            if before is None:
                del own["call"]
            else:
                own["call"] = before
