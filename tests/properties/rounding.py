"""Tell errors from rounding where a drawn model magnifies rounding, as one that diverges does."""

import copy

import torch
from torch import Tensor

from ipu_dynamo.testing import assert_close
from ipu_dynamo.testing.reference import Reference
from ipu_dynamo.testing.torch_private import pytree

_MOVES = 4  # times what a rounding error in weights and inputs changes, a result may be off


def nudged(structure, seed=0):
    """A copy whose floating-point tensors are off by a rounding error, up or down at random."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        step = torch.finfo(tensor.dtype).eps
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return tensor + tensor * signs.to(tensor.dtype) * step

    return pytree.tree_map_only(Tensor, moved, structure)


def nudge(model):
    """Move the parameters of a model by a rounding error; return it."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(nudged(parameter.detach(), seed))
    return model


def plain_outcome(model, data, options, optimizer, *, loss, moved=False):
    """All that training in plain PyTorch leaves behind, as `running.outcome` says it of a program.

    Args:
        moved: begin with weights and inputs that are off by a rounding error.
    """
    model = nudge(copy.deepcopy(model)) if moved else copy.deepcopy(model)
    data = nudged(data) if moved else copy.deepcopy(data)
    made = optimizer(model)
    reference = Reference(model, options, made, loss)
    returned = [reference(*arguments) for arguments in data]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    states = [dict(state) for state in made.state.values()]
    return {"returned": returned, "given": data, "tensors": tensors, "states": states}


def assert_close_or_rounding(found, expected, moved):
    """Assert that `found` is close to `expected`, or not farther from it than rounding explains.

    Args:
        moved: what `expected` becomes when weights and inputs are off by a rounding error.
    """
    for path, wanted in pytree.tree_leaves_with_path(expected):
        ours, other = (_leaf(structure, path) for structure in (found, moved))
        slack = 0.0
        if isinstance(wanted, Tensor) and wanted.is_floating_point() and wanted.numel():
            change = (other.double() - wanted.double()).abs().max().item()
            slack = _MOVES * change if change == change else 0.0
        where = f"value {pytree.keystr(path)}"
        assert_close(ours, wanted, where, atol=1e-6 + slack, same_dtype=False)


def _leaf(structure, path):
    for key in path:
        structure = key.get(structure)
    return structure
