"""Extend Keras models by three mixins; their methods call the parts that do the work.

A mixin stands before the user's class, so that `super()` is what plain Keras would call. None has
an `__init__`, since Keras reads the signature of the class's own.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import extensions_active
from ipu_dynamo.keras.calls.programs import inspected
from ipu_dynamo.keras.loop.execution import explained
from ipu_dynamo.keras.loop.methods import ExecutionMethods
from ipu_dynamo.keras.private.keras_private import Model
from ipu_dynamo.keras.settings import change_settings
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod,
    ReplicatedMetricReductionMethod,
)
from ipu_dynamo.keras.stages.assignments import (
    FunctionalLayerPipelineStageAssignment as FunctionalLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    FunctionalNestedModelPipelineStageAssignment as FunctionalNestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    ModelLayerPipelineStageAssignment as ModelLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    NestedModelPipelineStageAssignment as NestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    SequentialLayerPipelineStageAssignment as SequentialLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    SequentialNestedModelPipelineStageAssignment as SequentialNestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.model_assignment import (
    assign_from_blocks,
    current_assignment,
    invalidate_assignment,
    reset_assignment,
    set_assignment,
)
from ipu_dynamo.keras.stages.pipeline_stage import PipelineStage as PipelineStage
from ipu_dynamo.keras.stages.pipeline_stage import outside_of_stages
from ipu_dynamo.keras.stages.stage_summary import print_summary
from ipu_dynamo.keras.stored.restore import (
    build_config_with_state,
    config_with_state,
    restore_build_config,
)


class Extension(ExecutionMethods):
    """The methods that the three extensions share."""

    # Programs of the model

    def __ipu_inspect__(self) -> Inspection:
        """The programs of `fit`, `evaluate` and `predict`, for `ipu_dynamo.inspect`."""
        return inspected(self)

    def __ipu_explain__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inspection:
        """The same; without one the program that `fit(x, y)` or `predict(x)` would have."""
        return explained(self, *args, *kwargs.values())

    # Stages

    def get_pipeline_stage_assignment(self) -> list[Any]:
        """A copy of the assignment that was set; else new elements without stages, in post order.

        Raises:
            RuntimeError: a Model subclass that has not been built.
        """
        return current_assignment(self)

    def set_pipeline_stage_assignment(self, pipeline_stage_assignment: list[Any]) -> None:
        """Make this a pipelined model in `fit`, `evaluate` and `predict`.

        Args:
            pipeline_stage_assignment: the elements of `get_pipeline_stage_assignment`, with stages.
                A Sequential or a Model subclass also takes the stages themselves.

        Raises:
            ValueError: it is no valid assignment of this model; the one before stays.
        """
        set_assignment(self, pipeline_stage_assignment)

    def reset_pipeline_stage_assignment(self) -> None:
        """Make this a model without a pipeline."""
        reset_assignment(self)

    def print_pipeline_stage_assignment_summary(
        self,
        line_length: int | None = None,
        print_fn: Callable[[str], object] | None = None,
    ) -> None:
        """Print which call runs on which stage.

        Args:
            line_length: characters of a line; 60 for a Sequential, 89 for others, if left out.
            print_fn: called with each line; `print` if left out.
        """
        print_summary(self, line_length, print_fn)

    # Options

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: str
        | GradientAccumulationReductionMethod = change_settings.DEFAULT_REDUCTION,
        use_v2_gradient_accumulation_optimizer: bool = False,
        **gradient_accumulation_optimizer_kwargs: Any,
    ) -> None:
        """Set how a model without a pipeline accumulates gradients in `fit`.

        Args:
            gradient_accumulation_steps_per_replica: batches of a replica for each update; None
                leaves the number as it is.
            gradient_accumulation_reduction_method: how their gradients become one; also taken as
                `reduction_method`. Each call sets it.
            use_v2_gradient_accumulation_optimizer: has no effect here; True says so once.
            gradient_accumulation_optimizer_kwargs: see the guide's table; they replace those of an
                earlier call.
        """
        state = state_of(self)
        state.change(
            **change_settings.gradient_accumulation(
                gradient_accumulation_steps_per_replica,
                gradient_accumulation_reduction_method,
                use_v2_gradient_accumulation_optimizer,
                gradient_accumulation_optimizer_kwargs,
                state.notices,
            )
        )

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        device_mapping: list[int] | None = None,
        accumulate_outfeed: bool | None = None,
        gradient_accumulation_reduction_method: str | GradientAccumulationReductionMethod = "sum",
        **pipelining_kwargs: Any,
    ) -> None:
        """Set how a pipelined model runs. Settings that are None stay as they are.

        Args:
            gradient_accumulation_steps_per_replica: micro-batches of a replica for each update.
            device_mapping: the IPU of each stage.
            accumulate_outfeed: send results once for each update, and not for each micro-batch.
            gradient_accumulation_reduction_method: how gradients become one. Each call sets it.
            pipelining_kwargs: see the guide's table; they replace those of an earlier call.
        """
        state = state_of(self)
        state.change(
            **change_settings.pipelining(
                gradient_accumulation_steps_per_replica,
                device_mapping,
                accumulate_outfeed,
                gradient_accumulation_reduction_method,
                pipelining_kwargs,
                state.notices,
            )
        )

    def set_replication_options(
        self,
        replicated_metric_reduction_method: str | ReplicatedMetricReductionMethod = "NONE",
    ) -> None:
        """Set how the metrics of replicas become one.

        Args:
            replicated_metric_reduction_method: "NONE", "LIST", "SUM", "MEAN", or a member of the
                enumeration.
        """
        state_of(self).change(**change_settings.replication(replicated_metric_reduction_method))

    def set_infeed_queue_options(self, **kwargs: Any) -> None:
        """Set how data is read ahead; the keywords replace those of an earlier call.

        Args:
            kwargs: see the guide's table.
        """
        state_of(self).change(**change_settings.infeed(kwargs))

    def set_outfeed_queue_options(self, **kwargs: Any) -> None:
        """Set how results wait for their reader; the keywords replace those of an earlier call.

        Args:
            kwargs: see the guide's table.
        """
        state_of(self).change(**change_settings.outfeed(kwargs))

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Choose whether callbacks come for each step, while the program runs.

        Args:
            asynchronous: False, the default, calls them after the program has run.
        """
        checked = change_settings.flag(asynchronous, "asynchronous")
        state_of(self).change(asynchronous_callbacks=checked)

    # Files

    def get_config(self) -> dict[str, Any]:
        """The model's configuration as Keras has it, with the options of this package."""
        return config_with_state(self, super().get_config())

    def get_build_config(self) -> dict[str, Any] | None:
        """How the model was built, as Keras has it, with the options where they belong here."""
        return build_config_with_state(self, super().get_build_config())

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the model as Keras does, and restore its options in a scope.

        Args:
            config: as `get_build_config` returns it.
        """
        restore_build_config(self, config, super().build_from_config)

    def export_for_ipu_serving(
        self,
        export_dir: str | PathLike[str],
        batch_size: int | None = None,
        output_names: str | Sequence[str] | None = None,
        preprocessing_step: Callable[..., Any] | None = None,
        postprocessing_step: Callable[..., Any] | None = None,
        purge_export_dir: bool = False,
    ) -> Callable[..., dict[str, Any]]:
        """Write predictions as a saved program with its executable; return what runs it.

        A pipelined model keeps its stages, and `steps_per_execution` is how many micro-batches a
        step has.

        Args:
            export_dir: of the saved program, absent or empty.
            batch_size: rows of a micro-batch; left out where the model's inputs say it.
            output_names: of the outputs; those of the model if left out.
            preprocessing_step: a function for torch to trace, which runs on the host: it takes what
                has the form of the model's inputs, and gives these.
            postprocessing_step: the same, of the model's outputs.
            purge_export_dir: replace what is in `export_dir`.

        Raises:
            ValueError: `export_dir` is not empty, or the batch size is not known.
        """
        from ipu_dynamo.keras.export.serving import export_for_serving

        return export_for_serving(
            self,
            export_dir,
            batch_size,
            output_names,
            preprocessing_step,
            postprocessing_step,
            purge_export_dir,
        )

    def __reduce__(self) -> Any:
        """Pickle as a model of the plain class, which is what its module has under its name."""
        function, *rest = super().__reduce__()
        return getattr(plain_class(type(self)), function.__name__), *rest


class FunctionalExtension(Extension):
    """Methods of an extended Functional model."""

    def build(self, input_shape: Any) -> None:
        """Do what Keras does at the end of construction, and read the stages of blocks.

        Args:
            input_shape: as for Keras.
        """
        super().build(input_shape)
        if extensions_active():
            assign_from_blocks(self)


class SequentialExtension(Extension):
    """Methods of an extended Sequential model."""

    def add(self, layer: Any, rebuild: bool = True) -> None:
        """Add a layer; an assignment that was set is no longer valid.

        Args:
            layer: as for Keras.
            rebuild: as for Keras.
        """
        super().add(layer, rebuild)
        self._layers_changed(f"layer {layer.name} was added")

    def pop(self, rebuild: bool = True) -> Any:
        """Remove the last layer; an assignment that was set is no longer valid.

        Args:
            rebuild: as for Keras.
        """
        layer = super().pop(rebuild)
        self._layers_changed(f"layer {layer.name} was removed")
        return layer

    def build(self, input_shape: Any = None) -> None:
        """Build the model, and read the stages of blocks.

        Args:
            input_shape: as for Keras.
        """
        with outside_of_stages():  # Keras calls every layer: that says nothing of its stage
            super().build(input_shape)
        if extensions_active():
            assign_from_blocks(self)

    def _layers_changed(self, change: str) -> None:
        if not state_of(self).from_blocks:
            invalidate_assignment(self, change)
        elif extensions_active():
            assign_from_blocks(self)


class ModelExtension(Extension):
    """Methods of an extended Model subclass."""


def plain_class(extended: type) -> Any:
    """The class of models that an extended class is made of.

    Args:
        extended: an extended class.
    """
    return next(
        base
        for base in extended.__mro__
        if issubclass(base, Model) and not issubclass(base, Extension)
    )
