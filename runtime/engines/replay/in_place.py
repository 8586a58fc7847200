"""Find the states that a recorded step may write in place: memory then stays in the cache.

Each element of such a state is read for the last time by the kernel that writes it, at the same
index, before it writes; and no kernel that could fail comes with it or later.
"""

import re
from collections.abc import Sequence

from torch import Tensor

from ipu_dynamo.runtime.engines.replay.recorded import KernelCall, Recorded

_SIGNATURE = re.compile(r"\bkernel\(([^)]*)\)")
# What every kernel has around its loops; it raises only after an operator that is in _FAILS.
_FRAME = re.compile(r".*inductor_cpu_(?:integer_div_error|throw_if).*")
# A check, memory of its own, a division of integers.
_FAILS = re.compile(r"CHECK|throw|assert|alloc|unique|new |std::vector|div|mod| % ")
_INDEX = re.compile(r"(?:\[| \+ )static_cast<int64_t>\(")


def states_in_place(recorded: Recorded, arguments: Sequence[Tensor], states: int) -> frozenset[int]:
    """Numbers of the states that can be written where they are read.

    Args:
        arguments: of the recorded run, states first, as are its results.
    """
    last_failure = max(
        (number for number, call in enumerate(recorded.calls) if _may_fail(call)), default=-1
    )
    found = set()
    for state in range(states):
        old, new = _key(arguments[state]), _key(recorded.results[state])
        reads = [n for n, call in enumerate(recorded.calls) if old in map(_key, call.tensors)]
        writes = [n for n, call in enumerate(recorded.calls) if new in map(_key, call.tensors)]
        if not writes or writes[0] <= last_failure:
            continue
        if (
            not reads
            or reads[-1] < writes[0]
            or (reads[-1] == writes[0] and _element_by_element(recorded.calls[writes[0]], old, new))
        ):
            found.add(state)
    return frozenset(found)


def _key(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor.untyped_storage().data_ptr()


def _may_fail(call: object) -> bool:
    """Whether a call can raise an error; matmuls do not."""
    if not isinstance(call, KernelCall):
        return False
    return call.source is None or _FAILS.search(_FRAME.sub("", call.source)) is not None


def _element_by_element(call: object, old: int, new: int) -> bool:
    """Whether a kernel reads each element of `old` before it writes that of `new`, and not later.

    Loops in its source are one after the other, and a value is stored in one of them: so it is
    enough that all indices are the same text, and that no read stands behind the last write.
    """
    if not isinstance(call, KernelCall) or call.source is None:
        return False
    signature = _SIGNATURE.search(call.source)
    if signature is None:
        return False
    names = [part.split()[-1] for part in signature[1].split(",")]
    body = call.source[signature.end() :]
    keys = [_key(tensor) for tensor in call.tensors]
    pointers = [name for name, key in zip(names, keys, strict=True) if key == old]
    targets = [name for name, key in zip(names, keys, strict=True) if key == new]
    if len(pointers) != 1 or len(targets) != 1:
        return False
    starts = [tensor.data_ptr() for tensor, key in zip(call.tensors, keys, strict=True)
              if key in (old, new)]  # fmt: skip
    if starts != [key for key in keys if key in (old, new)]:
        return False  # a part of one of them
    reads, writes = _accesses(body, pointers[0]), _accesses(body, targets[0])
    if not reads or not writes or max(reads) > max(writes):
        return False
    return len({*reads.values(), *writes.values()}) == 1


def _accesses(body: str, name: str) -> dict[int, str]:
    """The index of each access to a pointer, by its place; none where one has another form."""
    found = {}
    for match in re.finditer(rf"\b{name}\b", body):
        index = _INDEX.match(body, match.end())
        if index is None:
            return {}
        depth, end = 1, index.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(body[end], 0)
            end += 1
        found[match.start()] = body[index.end() : end - 1]
    return found
