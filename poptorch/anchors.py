"""Bring inner tensors of a program back to the host: so far the loss scale of the last step."""

import torch
from torch import Tensor

from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch.enums import OutputMode
from poptorch.errors import createPoptorchError, require
from poptorch.options import Options

FINAL_LOSS_SCALE = "finalLossScale"


def check_anchors(options: Options, core: CompiledModel) -> None:
    """Refuse anchors of the loss scale that a compiled model cannot bring back.

    Raises:
        poptorch.Error: the scale is not automatic, or more than the last one is wanted.
    """
    for short, (name, _, mode, _) in options.anchored_tensors.items():
        if name != FINAL_LOSS_SCALE:
            continue
        if core.last_loss_scale is None:
            raise createPoptorchError(
                f"anchorTensor {short}: there is no tensor {name} without automatic loss scaling: "
                "set Training.setAutomaticLossScaling(True)"
            )
        wanted = options.output_mode if mode is None else mode
        if wanted != OutputMode.Final:
            raise createPoptorchError(
                f"anchorTensor {short}: of {name} this version brings the last value only: use "
                "poptorch.OutputMode.Final"
            )


def anchored(options: Options, core: CompiledModel, short: str) -> Tensor:
    """The value that an anchor had in the last call.

    Raises:
        AssertionError: there is no such anchor.
        poptorch.Error: this version cannot bring it back.
    """
    if short not in options.anchored_tensors:
        known = ", ".join(options.anchored_tensors) or "none"
        require(False, f"No tensor with name {short} found. Anchors: {known}")
    name = options.anchored_tensors[short][0]
    if name != FINAL_LOSS_SCALE:
        raise createPoptorchError(
            f"getAnchoredTensor {short}: this version can bring back {FINAL_LOSS_SCALE} only, not "
            f"{name}"
        )
    return torch.tensor(core.last_loss_scale)
