"""Hold the options of tracing; none has an effect any more."""

from typing import ClassVar

from poptorch._logging import logger
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter


class _JitOptions(OptionsDict):
    """`Options.Jit`."""

    _PREFIX: ClassVar[str] = "Jit."

    @setter(Effect.RECORDED)
    def traceModel(self, trace_model: bool) -> None:
        """Refuse the old tracer: the model is always dispatched once.

        Args:
            trace_model: False has no effect.
        """
        logger.warning("Jit.traceModel is deprecated: remove the call")
        if trace_model:
            raise ValueError("traceModel(True) is not available: models are traced by dispatch")
