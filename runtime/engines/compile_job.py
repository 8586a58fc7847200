"""Compile functions for another process: the job of `PendingCode`."""

from ipu_dynamo.runtime.engines.compiled_stages import machine_codes
from ipu_dynamo.runtime.engines.replay.native_library import native_library
from ipu_dynamo.runtime.engines.sent_functions import OtherCode, SentFunctions


def compile_functions(message: tuple[SentFunctions, bool]) -> tuple[bool, dict[str, str]]:
    """Compile functions, and keep their code in the folder of compiled stages.

    Args:
        message: see `PendingCode`.

    Returns:
        Whether this process would make other code than the one that asks; then nothing is compiled.
        And the compiler's words, by the name of each function that cannot be compiled.
    """
    sent, replays = message
    try:
        recipes = sent.received()
    except OtherCode:
        return True, {}
    with machine_codes() as codes:
        for recipe in recipes:
            codes.code_of(recipe)
    if replays and not codes.problems:
        native_library()
    return False, codes.problems
