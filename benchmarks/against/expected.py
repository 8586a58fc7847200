"""List the differences from the old checkout that are there on purpose."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["graphs", "bits"]


@dataclass(frozen=True, slots=True)
class Expected:
    """A difference that is no fault.

    Args:
        pattern: the names of configurations, as a shell pattern: `*/dropout/*`.
        kinds: what may differ.
        reason: why, for the reader of the table.
    """

    pattern: str
    kinds: frozenset[Kind]
    reason: str

    def covers(self, name: str, kind: Kind) -> bool:
        """Whether this difference of a configuration is the one that is meant."""
        return kind in self.kinds and fnmatchcase(name, self.pattern)


_BITS: frozenset[Kind] = frozenset({"bits"})
_KEYS = "random keys are made from the step, not from the call and the iteration within it"

_GRAPHS: frozenset[Kind] = frozenset({"graphs"})
_EARLY = "the call for gradients of weights begins with those that the backward pass has made"
_JOINT = (
    "detach is removed from the joint graph, before it is cut in two, and no value is kept under "
    "two names; with the eager engine, too, backward repeats cheap operators"
)
_BOTH: frozenset[Kind] = frozenset({"graphs", "bits"})
_SUMS = "gradients of half weights are summed in float32 over micro-batches and replicas"
_WORDS = "both words of a random key are taken before bits are mixed, not one behind the other"
_REPEATED = "repeated steps have matmuls of their own; equal with `--without ReplaySteps`, too"
_RECURRENT = "a recurrent layer is one operator for each layer and direction, not unrolled"

EXPECTED: tuple[Expected, ...] = (
    Expected("torch_compile/*", _GRAPHS, _JOINT),
    Expected("training/dropout/*", _BITS, _KEYS),
    Expected("training/dropout/*", _GRAPHS, _WORDS),
    Expected("poptorch/dropout/*", _BITS, _KEYS),
    Expected("poptorch/dropout/*", _GRAPHS, _WORDS),
    Expected("training/mlp/sequential/1/inductor", _BITS, _REPEATED),
    Expected("*/lstm/*", _BOTH, _RECURRENT),
    *(
        Expected(f"training/{model}/{configuration}/*", _BOTH, _SUMS)
        for model in ("half", "loss_scaling")
        for configuration in ("*/4", "replicas/1", "sharded_state/1")
    ),
    Expected("poptorch/half/*/4/*", _BOTH, _SUMS),
    *(
        Expected(f"training/{model}/zero_bubble/*", _GRAPHS, _EARLY)
        for model in ("cnn", "transformer", "three_blocks")
    ),
)
