"""Say in one error, with one reason, why a saved program or a checkpoint is refused."""

import os
from enum import Enum

from ipu_dynamo.errors import IpuError


class Reason(Enum):
    """Why a file is not read, or a program not saved."""

    MISSING = "there is no such file"
    FOREIGN = "it is no file of this package"
    DAMAGED = "it is damaged, or was changed"
    FORM = "it has a form that this version does not read"
    VERSION = "another version wrote it"
    OPERATOR = "it needs an operator that is not here, or not in this form"
    LIMIT = "a part of it is larger or deeper than a reader takes"
    CONTENT = "what its parts say does not fit together"
    DEVICE = "it needs a device that is not here"
    CLIENT = "another part of this package wrote it"
    CANNOT_SAVE = "it cannot be saved"


class SavedProgramError(IpuError):
    """A saved program or a checkpoint is refused; nothing of it was run.

    Args:
        reason: why, for those who act on it.
        path: the file.
        part: the member of the file, or the place in the program, that is at fault.
        problem: one clause with the content found and the content expected.
        hint: an action that the user can take today.
    """

    id = "saved-program"

    def __init__(
        self,
        reason: Reason,
        problem: str,
        *,
        path: str | os.PathLike[str] = "",
        part: str = "",
        hint: str = "",
    ) -> None:
        self.reason, self.problem, self.part, self.hint = reason, problem, part, hint
        self.path = os.fspath(path)
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [f"{self.path or 'the program'}: {self.reason.value}: {self.problem}"]
        if self.part:
            lines.append(f"  part: {self.part}")
        if self.hint:
            lines.append(f"  try:  {self.hint}")
        return "\n".join(lines)
