"""Read Dynamo's records of a graph and of skipped functions. Checked on PyTorch 2.13.0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree

__all__ = [
    "RestartAnalysis",
    "ShortenTraceback",
    "compile_count",
    "compiled_part",
    "errors_are_swallowed",
    "is_read_number",
    "marked_dynamic",
    "recompile_limit",
    "reset_with_dynamo",
    "skipped_frames",
    "source_name",
    "static",
    "unbacked_symbols",
]


def source_name(node: fx.Node) -> str:
    """Where Dynamo found the placeholder `node`, as a Python expression over `L` and `G`."""
    source = getattr(node, "_dynamo_source", None)
    return str(source.name) if source is not None else node.name


def set_source(node: fx.Node, source: object) -> None:
    """Say where a placeholder was found: `source` has a `name`, which `source_name` reads."""
    node._dynamo_source = source


def marked_dynamic(value: object) -> list[int]:
    """Dimensions of a tensor that the user marked with `torch._dynamo.mark_dynamic`."""
    return sorted(getattr(value, "_dynamo_dynamic_indices", ()))


def static(value: Any) -> Any:
    """`value` with numbers in place of symbols that were specialised; None for other symbols."""
    if isinstance(value, tuple | list):
        parts = [static(part) for part in value]
        unknown = any(
            new is None and old is not None for new, old in zip(parts, value, strict=True)
        )
        return None if unknown else type(value)(parts)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None if free_unbacked_symbols(value) else _number(value)
    if not isinstance(value, FakeTensor) or not value._has_symbolic_sizes_strides:
        return value
    if any(map(free_unbacked_symbols, (*value.shape, *value.stride()))):
        return None
    with value.fake_mode:
        return torch.empty_strided(
            [int(size) for size in value.shape],
            [int(stride) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def unbacked_symbols(value: Any) -> set[str]:
    """The symbols in a fake value, or in a tuple of them, that stand for values of tensors."""
    symbols: set[str] = set()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols |= set(map(str, free_unbacked_symbols(leaf)))
    return symbols


def is_read_number(value: object) -> bool:
    """Whether a value is a number that the values of tensors decide."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, kinds) and bool(unbacked_symbols(value))


def compiled_part(model: object) -> str | None:
    """The path of a part that `torch.compile` has wrapped; "": the whole model, None: no part."""
    if isinstance(model, nn.Module):
        parts = model.named_modules()
        return next((path for path, part in parts if isinstance(part, OptimizedModule)), None)
    return "" if hasattr(model, "_torchdynamo_orig_callable") else None


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Have `torch._dynamo.reset()` call `backend.reset`, also after an earlier reset."""
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)


@contextmanager
def skipped_frames() -> Iterator[list[str]]:
    """Collect Dynamo's reasons for breaks, and for parts of a model that it gave no backend."""
    reasons = torch._dynamo.utils.counters["unimplemented"]
    before = dict(reasons)
    new: list[str] = []
    yield new
    new += [reason for reason, count in reasons.items() if count > before.get(reason, 0)]


def errors_are_swallowed() -> bool:
    """Whether Dynamo would run the model in plain PyTorch after any error of ours."""
    return bool(torch._dynamo.config.suppress_errors)


def compile_count(gm: fx.GraphModule) -> tuple[int, int]:
    """The number of the frame of `gm`, and of the captures of this frame before."""
    identity = gm.meta.get("dynamo_compile_id")
    return (-1, 0) if identity is None else (identity.frame_id, identity.frame_compile_id)


def recompile_limit() -> int:
    """How many graphs Dynamo compiles for one frame before it gives up."""
    return int(torch._dynamo.config.recompile_limit)


def _number(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> float:
    if isinstance(symbol, torch.SymInt):
        return int(symbol)
    return float(symbol) if isinstance(symbol, torch.SymFloat) else bool(symbol)
