"""Compile functions for another process: the job of `PendingCode`."""

from collections.abc import Mapping
from typing import Any

import torch

from ipu_dynamo.ops import operators as operators  # that functions may call
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.text.program_text import read_record
from ipu_dynamo.runtime.engines.compiled_stages import machine_codes
from ipu_dynamo.runtime.engines.pending_code import FIRST
from ipu_dynamo.runtime.engines.replay.native_library import native_library
from ipu_dynamo.runtime.engines.stage_key import stage_key


def compile_functions(message: Mapping[str, Any]) -> tuple[bool, dict[str, str]]:
    """Compile functions, and keep their code in the folder of compiled stages.

    Args:
        message: see `PendingCode`.

    Returns:
        Whether this process would make other code than the one that asks; then nothing is compiled.
        And the compiler's words, by the name of each function that cannot be compiled.
    """
    torch.set_num_threads(message["threads"])
    torch.set_float32_matmul_precision(message["precision"])
    torch.use_deterministic_algorithms(message["deterministic"])
    recipes = []
    for key, (text, settings) in message["functions"].items():
        function = read_record(text, Function, FIRST, lambda function: None)
        if stage_key(function, dict(settings)) != key:
            return True, {}
        recipes.append(FunctionRecipe(function, function, "inductor", settings=settings, key=key))
    with machine_codes() as codes:
        for recipe in recipes:
            codes.code_of(recipe)
    if message["replays"] and not codes.problems:
        native_library()
    return False, codes.problems
