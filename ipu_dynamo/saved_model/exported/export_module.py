"""Export a module so that its results have names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ipu_dynamo.ops.private.graphs import pytree
from ipu_dynamo.saved_model.exported.flat_names import named_outputs


def export_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """The program of a module for example arguments; its result is a flat dict of tensors.

    Each tensor of the arguments is an input of its own. PyTorch would take one object in two
    places, or a buffer of the module, for one input.

    Args:
        dynamic_shapes: as `torch.export.export` takes them.

    Raises:
        ValueError: a result is no tensor, or has no name of its own.
    """
    args, keywords = pytree.tree_map_only(Tensor, _copy, (args, dict(kwargs or {})))
    return torch.export.export(
        _with_named_results(module),
        args,
        keywords,
        dynamic_shapes=dynamic_shapes,
        strict=False,
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _with_named_results(module: nn.Module) -> nn.Module:
    """A module of the same class with the same parameters, whose results are a flat dict.

    It does not wrap the first module, as names of nodes and parameters would show that. It shares
    the first one's attributes; only `forward` is another, with the same signature.
    """
    forward = module.forward
    same = module.__class__.__new__(module.__class__)
    same.__dict__.update(module.__dict__)

    def named(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return named_outputs(forward(*args, **kwargs))

    named.__wrapped__ = forward  # type: ignore[attr-defined]  # whoever asks sees its arguments
    same.__dict__["forward"] = named
    return same
