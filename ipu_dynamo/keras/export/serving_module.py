"""Make a module of a model's predictions whose parts the exported program can tell apart.

Nodes are named by the modules that they run in: `preprocessing` and `postprocessing` for the host,
`stage0`, `stage1`, ... for the stages of a pipeline.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
from torch import Tensor, nn

from ipu_dynamo.keras.stages.stage_plan import Invocation, StagePlan
from ipu_dynamo.keras.step.stage_walk import StageWalk
from ipu_dynamo.keras.step.step_module import StepModule
from ipu_dynamo.keras.step.step_variables import step_variables

PREPROCESSING, POSTPROCESSING, STAGE = "preprocessing", "postprocessing", "stage"
Step = Callable[..., Any]


class ServingModule(StepModule):
    """A model's predictions between two steps of the host, by names of inputs and outputs.

    Args:
        model: built.
        plan: of a pipelined model.
        outside: variables that predictions read, and the model does not have.
        inputs: nested as the model takes them, of names.
        output_names: of the flat outputs, after the last step; None: their names there.
        preprocessing: takes the flat inputs, and gives those of the model.
        postprocessing: takes the model's flat outputs, and gives those of the program.
    """

    def __init__(
        self,
        model: Any,
        plan: StagePlan | None,
        outside: Sequence[Any],
        inputs: Any,
        output_names: Sequence[str] | None,
        preprocessing: Step | None,
        postprocessing: Step | None,
    ) -> None:
        variables = step_variables(model, "predict", outside=outside)
        super().__init__(model, "predict", [(v, v.tensor) for v in variables], plan=plan)
        self.input_names, self._output_names = inputs, output_names
        self.add_module(PREPROCESSING, _Part())
        self.add_module(POSTPROCESSING, _Part())
        self._steps = (preprocessing, postprocessing)
        for stage in range(0 if plan is None else plan.num_stages):
            self.add_module(f"{STAGE}{stage}", _Part())

        names = keras.tree.flatten(inputs)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

        def forward(*tensors: Tensor, **by_name: Tensor) -> dict[str, Tensor]:
            return self.serve([*tensors, *(by_name[name] for name in names[len(tensors) :])])

        # the exporter takes the names of inputs from the signature
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in names]
        )
        vars(self)["forward"] = forward

    def serve(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs by name, from the flat inputs."""
        before, behind = self._steps
        if before is not None:
            flat = keras.tree.flatten(self._modules[PREPROCESSING](partial(before, *flat)))  # type: ignore[misc]
        outputs = StepModule.forward(self, keras.tree.pack_sequence_as(self.input_names, flat))
        if behind is not None:
            arguments = keras.tree.flatten(outputs)
            outputs = self._modules[POSTPROCESSING](partial(behind, *arguments))  # type: ignore[misc]
        return self._named(outputs)

    def _named(self, outputs: Any) -> dict[str, Tensor]:
        flat = keras.tree.flatten(outputs)
        names = self._output_names
        if names is None:
            if isinstance(outputs, Mapping):
                return {str(name): value for name, value in outputs.items()}
            names = [f"output_{position}" for position in range(len(flat))]
        if len(names) != len(flat):
            raise ValueError(
                f"output_names has {len(names)} names, {', '.join(names)}, and there are "
                f"{len(flat)} outputs: give one name for each"
            )
        return dict(zip(names, flat, strict=True))

    def _new_walk(self, plan: StagePlan, write: Callable[[], None]) -> StageWalk:
        parts = [self._modules[f"{STAGE}{stage}"] for stage in range(plan.num_stages)]
        return _NamedWalk(plan, write, parts)


class _Part(nn.Module):
    """Run something under the name of this module."""

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class _NamedWalk(StageWalk):
    """Run each call in the module of its stage, instead of in a block."""

    def __init__(
        self, plan: StagePlan, behind_each: Callable[[], None], parts: Sequence[Any]
    ) -> None:
        super().__init__(plan, behind_each)
        self._parts = parts

    def enter(self, stage: int) -> None:
        self.stage = stage

    def _call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = partial(super()._call, invocation, args, kwargs)
        return self._parts[invocation.stage](run) if invocation.nested is None else run()
