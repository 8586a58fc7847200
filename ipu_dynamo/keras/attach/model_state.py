"""Keep what the extension knows of one model, beside its attributes that Keras tracks."""

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

    def change(self, **settings: Any) -> None:
        """Replace some settings, and drop what was compiled for the others."""
        self.settings = replace(self.settings, **settings)
        self.programs.clear()


def state_of(model: Any) -> ModelState:
    """The state of an extended model; it begins with the defaults."""
    state = vars(model).get(STATE)
    if state is None:
        state = vars(model)[STATE] = ModelState()
    assert isinstance(state, ModelState)
    return state
