"""Say of names that this version lacks what they wait for."""

_MACHINE_MODEL = "the machine model"

EXECUTOR_MEMBERS = {
    "cycleCount": _MACHINE_MODEL,
}


def executor_member(name: str) -> AttributeError | None:
    """The error for a member of PopTorch's executor that is not here, None for any other name."""
    waits_for = EXECUTOR_MEMBERS.get(name)
    if waits_for is None:
        return None
    return AttributeError(
        f"poptorch.PoplarExecutor.{name} is not part of this version of ipu_dynamo: it waits for "
        f"{waits_for}. docs/coming_from_poptorch.md lists what is missing"
    )
