"""Let models mark convolutions that an IPU plans together, with partial sums of their own.

`ipu::begin_convolutions` and `ipu::end_convolutions` are the marks. They exist until the pass
`TagConvolutionGroups` reads them.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import torch
from torch.fx.node import has_side_effect

from ipu_dynamo.errors import OptionError
from ipu_dynamo.ops.marks.available_memory import checked_share

Plan = Literal["parallel", "serial"]
Precision = Literal["float", "half"]

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("begin_convolutions(str plan, str[] partials, float[] shares, int count) -> ()")
_library.define("end_convolutions() -> ()")


def _begin(plan: str, partials: Sequence[str], shares: Sequence[float], count: int) -> None:
    """Mark the start of a group; a marker computes nothing."""


def _end() -> None:
    """Mark the end of a group; a marker computes nothing."""


_library.impl("begin_convolutions", _begin, "CompositeExplicitAutograd")
_library.impl("end_convolutions", _end, "CompositeExplicitAutograd")
begin_convolutions = torch.ops.ipu.begin_convolutions.default
end_convolutions = torch.ops.ipu.end_convolutions.default
has_side_effect(begin_convolutions)
has_side_effect(end_convolutions)


class ConvolutionGroup:
    """A context: the convolutions inside, which do not depend on each other, are planned together.

    They stand side by side in the program, which names the group. Without partials of its own, a
    group changes no value. It does nothing outside a program and through `torch.compile`.
    `partials` and `memory_proportion` have one value for all, or one for each in the order of the
    calls; where they are empty, the options decide.

    Args:
        plan: whether the convolutions share the tiles of the IPU (`parallel`), or have all tiles,
            one after the other (`serial`).
        partials: precision of the partial sums of half convolutions, and of their gradients.
        count: how many convolutions there are; 0: any number. Several values of another argument
            say it too.
        memory_proportion: the share of an IPU's memory, from 0 to 1, for temporary values of
            convolutions and their gradients. Only the model of memory and cycles reads it.

    Raises:
        OptionError: a plan or a precision that does not exist, a share that is not a number from
            0 to 1, or two different counts.

    Source: PopTorch user guide, "poptorch.MultiConv".
    """

    def __init__(
        self,
        plan: Plan = "parallel",
        partials: Precision | Sequence[Precision] = (),
        count: int = 0,
        memory_proportion: float | Sequence[float] = (),
    ) -> None:
        several = [partials] if isinstance(partials, str) else list(partials)
        shares = memory_proportion
        shares = [shares] if isinstance(shares, int | float) else list(shares)
        if plan not in ("parallel", "serial"):
            raise OptionError(f"plan is {plan!r}; choose one of parallel, serial")
        if wrong := [one for one in several if one not in ("float", "half")]:
            raise OptionError(f"partials are {wrong[0]!r}; choose one of float, half")
        counts = {"count": count} if count else {}
        for name, each in (("partials", several), ("memory_proportion", shares)):
            if len(each) > 1:
                counts[name] = len(each)
        if count < 0 or len(set(counts.values())) > 1:
            found = ", ".join(f"{name} for {number}" for name, number in counts.items())
            raise OptionError(f"a group has settings for other numbers of convolutions: {found}")
        self.plan, self.partials = plan, several
        self.shares = [checked_share(share) for share in shares]
        self.count = next(iter(counts.values()), 0)

    def __enter__(self) -> "ConvolutionGroup":
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            torch.ops.ipu.begin_convolutions(self.plan, self.partials, self.shares, self.count)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            torch.ops.ipu.end_convolutions()
