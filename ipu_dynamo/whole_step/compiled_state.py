"""Hold a program and its executable, once a model is compiled."""

from ipu_dynamo.errors import IpuError
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.whole_step.compile_model import Compiled


class CompiledState:
    """The common state of a CompiledModel's parts: a program and its executable, or neither."""

    options: Options
    _compiled: Compiled | None
    _executable: Executable | None

    @property
    def program(self) -> Program:
        """The program, once compiled. Of updates that are traced, those of the last step, or of the
        steps after the first one."""
        compiled, executable = self._ready()
        return executable.retraced or compiled.program

    @property
    def is_compiled(self) -> bool:
        """Whether there is a program yet."""
        return self._executable is not None

    @property
    def variants(self) -> tuple[Program, ...]:
        """`program` with the other updates that are known, each traced for other numbers."""
        compiled, executable = self._ready()
        every = (compiled.program, *executable.other_updates)
        return tuple(program for program in every if program is not self.program)

    @property
    def executable(self) -> Executable:
        """The executable of the program, once compiled: it has the schedule and the timeline."""
        return self._ready()[1]

    def _ready(self) -> tuple[Compiled, Executable]:
        if self._compiled is None or self._executable is None:
            raise not_compiled()
        return self._compiled, self._executable


def not_compiled() -> IpuError:
    """The error of a question that only a program answers."""
    return IpuError("the model is not compiled yet: call it, or its `compile`, first")
