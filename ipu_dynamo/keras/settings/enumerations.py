"""Name the choices that a model's options take, as members or by name in any case."""

from enum import Enum
from typing import Any, Self


class NamedChoice(Enum):
    """An enumeration whose members can be written by name, in any case."""

    @classmethod
    def parse(cls, value: Any, option: str) -> Self:
        """The member that `value` is or names.

        Raises:
            ValueError: neither; it lists the members.
        """
        if isinstance(value, cls):
            return value
        for member in cls:
            # members of an enumeration of the same name elsewhere are not ours, however they print
            if isinstance(value, str) and value.lower() == member.name.lower():
                return member
        names = ", ".join(member.name for member in cls)
        raise ValueError(
            f"{option} is {value!r}, and has to be a {cls.__name__} or the name of one: {names}"
        )


class GradientAccumulationReductionMethod(NamedChoice):
    """How the gradients of a replica's micro-batches become one.

    SUM adds them, MEAN scales each by one over their number first, RUNNING_MEAN keeps the mean of
    those that came.
    """

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2


class ReplicatedMetricReductionMethod(NamedChoice):
    """How the metrics of replicas become one.

    NONE takes those of the last replica, LIST all in order, SUM and MEAN their sum and mean.
    """

    NONE = 0
    LIST = 1
    SUM = 2
    MEAN = 3


class PipelineSchedule(NamedChoice):
    """In which order the stages of a pipeline work.

    Grouped and Interleaved are one order here; Sequential takes one micro-batch after the other.
    """

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class RecomputationMode(NamedChoice):
    """Which forward values are computed again in the backward pass.

    Auto leaves the choice to the compiler; RecomputeThenBackpropagate takes those within a stage,
    RecomputeAndBackpropagateInterleaved all.
    """

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2
