"""Say on which IPUs stages run, and when."""

from dataclasses import dataclass
from typing import Literal, get_args

from ipu_dynamo.errors import OptionError
from ipu_dynamo.options.checks import (
    check_choice,
    check_choices,
    check_count,
    check_ipu_id,
    described,
)
from ipu_dynamo.options.schedule_order import is_order, read_order, write_order

StrategyKind = Literal["pipelined", "sharded", "serial_phased", "parallel_phased"]
Liveness = Literal[
    "always_live",
    "off_chip_after_fwd",
    "off_chip_after_fwd_no_overlap",
    "off_chip_after_each_phase",
]
Schedule = Literal["grouped", "zero_bubble", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]
BY_SLOTS: tuple[Schedule, ...] = ("grouped", "zero_bubble")  # of PopTorch's pipelines
BY_NAME = tuple(name for name in get_args(Schedule) if name not in BY_SLOTS)
Costs = tuple[tuple[float, float], ...]  # seconds of each operator, forward and backward
PARALLEL_LIVENESS: tuple[Liveness, ...] = ("always_live", "off_chip_after_fwd")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One explicit stage.

    Args:
        blocks: the ids of its blocks.
        ipu: the number of its IPU. None: the one that its blocks name, or the stage's number.
    """

    blocks: tuple[str, ...]
    ipu: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, tuple) or not all(isinstance(b, str) for b in self.blocks):
            raise OptionError(
                f"StageSpec takes a tuple of names of blocks, such as ('encoder',), not "
                f"{described(self.blocks)}"
            )
        check_ipu_id(self.ipu)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How blocks become stages, and stages run.

    Args:
        kind: `pipelined`: stages work on different micro-batches at once, and their order must
            follow the data; `sharded`: one after the other, any order; `serial_phased` and
            `parallel_phased`: in `phases`, which alternate between two groups of IPUs if parallel.
        auto_stage: stage of a block when `stages` is empty: its IPU's number (`same_as_ipu`), or
            the next number at its first appearance (`auto_increment`).
        stages: explicit stages in order; of a strategy without phases.
        weights_on_one_ipu: refuse a parameter or buffer that is read on two IPUs of a pipeline,
            as PopTorch does. Otherwise its owner IPU sends copies and sums the gradients.
        phases: the stages of every phase, in order; of a phased strategy.
        liveness: the activations that leave the chip between phases. `always_live`: none.
            `off_chip_after_fwd`: at the end of the forward pass, those that the backward pass
            reads. `off_chip_after_fwd_no_overlap`: the same, with phases of their own for the
            transfers. `off_chip_after_each_phase`: all, after each phase. The last two are for
            serial phases.
        separate_backward_phase: the backward pass begins in a phase of its own, also where
            activations are always live.
        schedule: of a training pipeline's passes. `grouped` is PopTorch's: all gradients of a
            stage in one call. `zero_bubble` has those of weights, for which no other IPU waits, in
            a call of their own, so that others start sooner. `gpipe`, `1f1b`, `interleaved`,
            `zb_h1` and `zb_v` are those of the literature: docs/pipelines.md. Any other text is an
            order of its own: a line `worker 1: 1F0 1B0` for each IPU. The results are the same.
        ipus: cut a model without blocks into so many stages, one for each IPU, that take equally
            long; pipelined or sharded. The time of each operator is measured once on this machine
            and kept with compiled code; if it cannot be kept, it is estimated.
        costs: the time of each operator, forward and backward, instead of measuring it: with
            `CompiledModel.costs` of an earlier run the cut is the same on any machine.
        sharded_if_short: inference with fewer device iterations than its pipeline has stages runs
            sharded, with the same results and one warning; otherwise it is an error. Of
            `compile_inference`.
        keep_stages: a pipeline has exactly the given `stages`: neighbours on one IPU are not
            joined. All operators of a block run in its stage, also views and constants, which
            otherwise run in the stage that reads them. Each stage has to have an operator.

    Raises:
        OptionError: phases and kind do not fit each other, or liveness or schedule
            do not fit the kind.

    Source: PopTorch user guide, "Parallel execution strategies".
    """

    kind: StrategyKind = "sharded"
    auto_stage: Literal["same_as_ipu", "auto_increment"] = "auto_increment"
    stages: tuple[StageSpec, ...] = ()
    weights_on_one_ipu: bool = False
    phases: tuple[tuple[StageSpec, ...], ...] = ()
    liveness: Liveness = "always_live"
    separate_backward_phase: bool = False
    schedule: str = "grouped"
    ipus: int | None = None
    costs: Costs = ()
    sharded_if_short: bool = False
    keep_stages: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "strategy")
        if isinstance(self.schedule, str) and is_order(self.schedule):
            read_order(self.schedule)
        else:
            check_choice("schedule", self.schedule, get_args(Schedule), "strategy")
        for name, stages in (("stages", self.stages), *(("phases", p) for p in self.phases)):
            if not isinstance(stages, tuple) or not all(isinstance(s, StageSpec) for s in stages):
                raise OptionError(
                    f"strategy {name} has {stages!r}; each of its stages is a StageSpec, and they "
                    "are in a tuple: (StageSpec(('encoder',)),)"
                )
        if self.phased != bool(self.phases) or (self.phased and self.stages):
            raise OptionError(
                f"a strategy of kind {self.kind} has {len(self.phases)} phases and "
                f"{len(self.stages)} stages; give a phased one its stages in `phases`, any other "
                "one no phases"
            )
        if not self.phased and (self.liveness != "always_live" or self.separate_backward_phase):
            raise OptionError(
                f"liveness and separate_backward_phase are for phases, not for kind {self.kind}"
            )
        if self.kind == "parallel_phased" and self.liveness not in PARALLEL_LIVENESS:
            raise OptionError(
                f"liveness {self.liveness} is for serial phases; parallel ones have "
                f"{' or '.join(PARALLEL_LIVENESS)}"
            )
        if self.ipus is not None:
            check_count("strategy ipus", self.ipus, or_none=True)
            if self.stages or self.phased:
                raise OptionError(
                    "strategy ipus cuts the model by itself; leave out stages and phases"
                )
            if self.schedule in ("interleaved", "zb_v"):
                example = "0, 1, 0, 1" if self.schedule == "interleaved" else "0, 1, 1, 0"
                raise OptionError(
                    f"schedule {self.schedule} needs several stages on each IPU, and strategy ipus "
                    f"cuts the model into one for each; give the model blocks on IPUs {example}"
                )
        elif self.costs:
            raise OptionError("strategy costs say where to cut for `ipus`, which is left out")
        if not isinstance(self.sharded_if_short, bool):
            raise OptionError(
                f"strategy sharded_if_short is {self.sharded_if_short!r}; it is True or False"
            )
        if self.sharded_if_short and self.kind != "pipelined":
            raise OptionError(f"sharded_if_short is for the strategy pipelined, not {self.kind}")
        if not isinstance(self.keep_stages, bool):
            raise OptionError(f"strategy keep_stages is {self.keep_stages!r}; it is True or False")
        if self.keep_stages and (self.kind != "pipelined" or not self.stages):
            raise OptionError(
                f"keep_stages is for the strategy pipelined with explicit stages, not for kind "
                f"{self.kind} with {len(self.stages)} stages"
            )
        if self.schedule != "grouped" and self.kind != "pipelined":
            raise OptionError(
                f"schedule {self.schedule} is for the strategy pipelined, not {self.kind}"
            )

    @property
    def order_name(self) -> str:
        """The name or text of an order that is not by PopTorch's slots; "" if it is."""
        if is_order(self.schedule):
            return write_order(read_order(self.schedule))
        return "" if self.schedule in BY_SLOTS else self.schedule

    @property
    def keeps_apart(self) -> bool:
        """Whether neighbours on one IPU stay two stages."""
        return self.keep_stages or self.schedule == "zb_v" or is_order(self.schedule)

    @property
    def splits_weights(self) -> bool:
        """Whether weight gradients are calls of their own, where this is possible."""
        if is_order(self.schedule):
            tasks = (task for of in read_order(self.schedule).values() for task in of)
            return any(task.letter == "W" for task in tasks)
        return self.schedule in ("zero_bubble", "zb_h1", "zb_v")

    @property
    def several_at_once(self) -> bool:
        """Whether stages of several IPUs run at the same time."""
        return self.kind in ("pipelined", "parallel_phased")

    @property
    def phased(self) -> bool:
        """Whether stages run in phases."""
        return self.kind in ("serial_phased", "parallel_phased")
