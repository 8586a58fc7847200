"""Lower a function: in this process, or in another one whose result this process loads."""

import torch
from torch import Tensor

from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.private.compile_settings import settings_of
from ipu_dynamo.runtime.engines.private.inductor import Lowered, load_artifact, lower_artifact
from ipu_dynamo.runtime.engines.private.inductor_compile_time import shortened_compiling
from ipu_dynamo.runtime.engines.private.promised_kernels import kernels_promised
from ipu_dynamo.runtime.engines.sent_functions import SentFunctions

JOB = f"{__name__}:lower_sent"  # for a `JobProcess`


def lower(recipe: FunctionRecipe) -> Lowered:
    """Let Inductor generate the code of a function.

    Raises:
        InductorError
    """
    function = recipe.lowered
    examples = [
        torch.zeros(()).new_empty(0) if value is None else _example(value)
        for value in (n.meta["val"] for n in function.graph.graph.find_nodes(op="placeholder"))
    ]
    settings, results = dict(recipe.settings), len(function.outputs)
    return lower_artifact(function.graph, examples, settings, results)


def lower_sent(message: SentFunctions) -> bytes | None:
    """Lower the one function of a message for `load_lowered`; None: PyTorch cannot save it."""
    (recipe,) = message.received()
    return lower(recipe).saved


def load_lowered(saved: bytes, recipe: FunctionRecipe) -> Lowered:
    """The code that another process has made of a function; its kernels are promised here."""
    with settings_of(recipe.settings), shortened_compiling(), kernels_promised() as kernels:
        code = load_artifact(saved, {}, len(recipe.lowered.outputs))
    return Lowered(code, kernels, saved)


def _example(value: Tensor) -> Tensor:
    """A real tensor with the layout of a fake one."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).zero_()
