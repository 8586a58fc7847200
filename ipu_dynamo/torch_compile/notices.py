"""Warn users of `torch.compile` of graph breaks, new shapes and lost errors.

Of several ranks, only rank 0 prints them.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, fx

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.dynamo import describe_inputs, last_block
from ipu_dynamo.capture.private.dynamo import compile_count, errors_are_swallowed, recompile_limit
from ipu_dynamo.capture.private.failed_frames import FailedFrame
from ipu_dynamo.rank_number import this_rank

log = logging.getLogger(__name__)
Shapes = dict[str, tuple[int, ...]]
_shapes: dict[object, Shapes] = {}  # of the inputs of a frame and module, when first compiled
_said: set[object] = set()
_RECURRENT = "RNN, GRU, or LSTM"  # in Dynamo's reason
_REMEDY = "torch._dynamo.config.allow_rnn = True lets it capture recurrent layers"
_UNTOLD = "PyTorch cannot trace what the line calls; TORCH_LOGS=graph_breaks says why"


def forget() -> None:
    """Start again, after `torch._dynamo.reset()`."""
    _shapes.clear()
    _said.clear()


def break_reason(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Where and why PyTorch ended the graph before the function's end; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    line = f"{Path(frame.filename).name}:{frame.lineno}" if frame else "an unknown line"
    why = str(reason.reason).partition("\n")[0]
    return line, _UNTOLD if why == "step_unsupported" else why


def tell_of_break(gm: fx.GraphModule, markers: Sequence[fx.Node]) -> None:
    """Warn, once per line, that the rest is another program, and where an open block ends."""
    reason = break_reason(gm)
    if reason is None or reason in _said or this_rank():
        return
    _said.add(reason)
    line, why = reason
    block = last_block(markers)
    ends = (
        f"The block that begins at {block} ends there: what follows is another program, and it "
        f"starts on IPU 0. "
        if block
        else ""
    )
    captured = ""
    if _RECURRENT in why:
        captured = f"{_REMEDY}. "
        _said.add((_RECURRENT, line))
    if "DDPOptimizer" in why:  # nothing of the user's is there
        noted_warnings.warn(
            "DistributedDataParallel cuts the graph at its buckets, so that gradients are sent "
            f"while others are computed: each part is a program. {ends}"
            "torch._dynamo.config.optimize_ddp = False keeps the graph whole.",
        )
        return
    noted_warnings.warn(
        f"PyTorch breaks the graph at {line} ({why}). What is there runs in plain PyTorch. {ends}"
        f"{captured}Compile with fullgraph=True to see the reason in full.",
    )


def tell_of_recurrent_layer(failure: FailedFrame) -> None:
    """Warn, once per line, that PyTorch does not capture a recurrent layer.

    `inspect` shows other functions that it gives up. Many of them compute nothing.
    """
    what = _RECURRENT, failure.where
    if _RECURRENT not in failure.reason or what in _said or this_rank():
        return
    _said.add(what)
    noted_warnings.warn(
        f"PyTorch does not capture the recurrent layer at {failure.where}: it runs in plain "
        f"PyTorch, and ipu_dynamo.inspect shows the parts in no program. {_REMEDY}, if it is set "
        "before the first call."
    )


def tell_of_new_shape(gm: fx.GraphModule, examples: Sequence[object]) -> None:
    """Say once per function that a new shape was compiled, and how many more will be."""
    frame, before = compile_count(gm)
    shapes: Shapes = {}
    own: Shapes = {}  # of the module: another one may have the same forward
    for role, example in zip(describe_inputs(gm, examples), examples, strict=True):
        if isinstance(example, Tensor):
            kind = shapes if role.kind == "input" else own
            kind[role.name] = tuple(int(size) for size in example.shape)
    first = _shapes.setdefault((frame, frozenset(own.items())), shapes)
    changed = [name for name in shapes if first.get(name, shapes[name]) != shapes[name]]
    if not before or not changed or frame in _said or this_rank():
        return
    _said.add(frame)
    name = changed[0]
    log.warning(
        "compiled again for shape %s of %s, after %s: programs have static shapes. PyTorch "
        "compiles a function %d times, then runs it in plain PyTorch: pad batches to few shapes, "
        "drop the last one (drop_last=True), or raise torch._dynamo.config.recompile_limit",
        list(shapes[name]),
        name,
        list(first[name]),
        recompile_limit(),
    )


def tell_of_swallowed_errors() -> None:
    """Warn that PyTorch is set to hide errors."""
    if errors_are_swallowed() and "suppress_errors" not in _said and not this_rank():
        _said.add("suppress_errors")
        noted_warnings.warn(
            "torch._dynamo.config.suppress_errors is set: where ipu_dynamo raises an error, "
            "PyTorch hides it and runs the model itself",
        )
