"""Keep the extension's state of one model, apart from attributes that Keras tracks."""

from dataclasses import dataclass, field, replace
from typing import Any

from ipu_dynamo.keras.settings.model_settings import Settings

STATE = "_ipu_dynamo_state"  # in the instance's __dict__, past Keras' and PyTorch's tracking


@dataclass(slots=True)
class ModelState:
    """Settings, stages and compiled programs of one model.

    Invariant: `programs` holds nothing that was compiled for other settings or another assignment.
    """

    settings: Settings = field(default_factory=Settings)
    assignment: list[Any] | None = None
    programs: dict[Any, Any] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)  # options that were warned of
    cloned: bool = False  # `clone_model` made it, so that it begins with the default options
    from_blocks: bool = False  # `PipelineStage` blocks made the assignment
    invalid: str | None = None  # what happened to the model after its assignment was set
    planned: Any = None  # the stages of the last execution
    trace: Any = None  # of a Model subclass: its last trace (`stages/trace_model.py`)
    traces: dict[Any, Any] = field(default_factory=dict)  # by shapes and dtypes of the inputs
    input_specs: Any = None  # of a Model subclass: nested symbolic tensors, from build()
    meets_stages: bool | None = None  # of a Model subclass: whether `call` enters a PipelineStage

    def change(self, **settings: Any) -> None:
        """Replace some settings, and drop programs that were compiled for the old ones."""
        self.settings = replace(self.settings, **settings)
        self.programs.clear()


def state_of(model: Any) -> ModelState:
    """The state of an extended model; it begins with the defaults."""
    state = vars(model).get(STATE)
    if state is None:
        state = vars(model)[STATE] = ModelState()
    assert isinstance(state, ModelState)
    return state
