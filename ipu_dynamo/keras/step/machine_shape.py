"""Compute the IPUs, replicas and micro-batches that a model's call takes.

A model that does not fit is refused here, before any step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import innermost_strategy
from ipu_dynamo.keras.private.stateless_names import has_callable_rate, inner_optimizers
from ipu_dynamo.keras.settings.enumerations import PipelineSchedule
from ipu_dynamo.keras.stages.stage_plan import StagePlan, stage_plan
from ipu_dynamo.keras.step.step_variables import Kind

_METHODS: dict[Kind, str] = {"fit": "fit", "evaluate": "evaluate", "predict": "predict"}


@dataclass(frozen=True, slots=True)
class CallShape:
    """The batches, updates and replicas of one execution.

    Args:
        steps: batches of each replica.
        accumulation: those of a replica that make one update; 1 where there are no updates.
        replicas: copies of the model.
        pipelined: the model has stages.
    """

    steps: int
    accumulation: int
    replicas: int
    pipelined: bool


def stage_ipus(model: Any) -> tuple[int, ...] | None:
    """The IPU of every stage within a replica; None: the model is not pipelined.

    Raises:
        ValueError: the device mapping has another number of stages.
    """
    count = _number_of_stages(model)
    mapping = state_of(model).settings.device_mapping
    if count is None:
        return None
    if mapping is None:
        return tuple(range(count))
    if len(mapping) != count:
        raise ValueError(
            f"device_mapping of {model.name} has {len(mapping)} entries, and the model {count} "
            "pipeline stages: give one IPU for each stage"
        )
    return mapping


def stages_as_run(ipus: Sequence[int]) -> int:
    """How many stages a pipeline has: neighbours on one IPU are one, and it begins on IPU 0."""
    changes = sum(a != b for a, b in zip((0, *ipus), ipus, strict=False))
    return 1 + changes


def replica_count(model: Any) -> int:
    """How many replicas of a model the strategy's IPUs make.

    Raises:
        ValueError: there are too few IPUs, or no multiple of those of a replica.
    """
    ipus, strategy = stage_ipus(model), innermost_strategy()
    available = 1 if strategy is None else strategy.num_ipus
    needed = 1
    while ipus is not None and needed < max(ipus) + 1:
        needed *= 2
    if needed > available:
        raise ValueError(
            f"{model.name} needs a multiple of {needed} IPUs, and the strategy has {available}: "
            f"IPUStrategy(num_ipus={needed})"
        )
    if available % needed:
        least = -(-available // needed) * needed
        raise ValueError(
            f"the strategy's {available} IPUs are no multiple of the {needed} that a replica of "
            f"{model.name} needs: IPUStrategy(num_ipus={least}) is the next number that works"
        )
    return available // needed


def is_sequential_schedule(model: Any) -> bool:
    """Whether the stages of a model take one micro-batch after the other."""
    keywords = state_of(model).settings.pipelining_keywords
    return keywords.get("pipeline_schedule") is PipelineSchedule.Sequential


def accumulation_of(model: Any, kind: Kind) -> int:
    """How many batches of a replica make one update.

    Raises:
        ValueError: a pipelined model's was never set.
    """
    settings, ipus = state_of(model).settings, stage_ipus(model)
    if kind != "fit":
        return 1
    if ipus is None:
        return settings.accumulation_steps or 1
    if settings.pipelining_accumulation_steps is not None:
        return settings.pipelining_accumulation_steps
    if is_sequential_schedule(model):
        return 1
    raise ValueError(
        f"fit of the pipelined model {model.name} needs the number of micro-batches of an update: "
        "set_pipelining_options(gradient_accumulation_steps_per_replica=...), at least "
        f"{_least(ipus, kind)}"
    )


def micro_batches_needed(model: Any, kind: Kind) -> int:
    """The least number of batches of a replica that one execution can have."""
    ipus = stage_ipus(model)
    if kind == "fit":
        return accumulation_of(model, kind)
    if ipus is None or is_sequential_schedule(model):
        return 1
    return _least(ipus, kind)


def call_shape(model: Any, kind: Kind, steps: int) -> CallShape:
    """The shape of an execution of so many steps.

    Args:
        steps: batches of each replica: `steps_per_execution`, or fewer where there are fewer.

    Raises:
        ValueError: machine, pipeline or optimiser cannot.
        RuntimeError: the steps are no multiple of the batches of an update.
    """
    replicas, ipus = replica_count(model), stage_ipus(model)
    accumulation = accumulation_of(model, kind)
    if kind == "fit":
        _check_optimizer(model, several=accumulation > 1 or ipus is not None)
    if steps % accumulation:
        what = "pipelined model" if ipus is not None else "model"
        raise RuntimeError(
            f"steps_per_execution of the {what} {model.name} is {steps} for each replica, and no "
            f"multiple of its {accumulation} gradient accumulation steps per replica"
        )
    plan = stage_plan(model, training=kind == "fit")
    if ipus is not None and plan is not None:
        check_variables(model, plan, ipus)
    if ipus is not None and not is_sequential_schedule(model):
        given = accumulation if kind == "fit" else steps
        least = _least(ipus, kind)
        if given < least:
            option = (
                "set_pipelining_options(gradient_accumulation_steps_per_replica="
                if kind == "fit"
                else "compile(steps_per_execution="
            )
            raise ValueError(
                f"{_METHODS[kind]} of {model.name}: a pipeline of {stages_as_run(ipus)} stages "
                f"needs at least {least} micro-batches, and has {given}: {option}{least})"
            )
    return CallShape(steps, accumulation, replicas, ipus is not None)


def _least(ipus: Sequence[int], kind: Kind) -> int:
    stages = stages_as_run(ipus)
    return 2 * stages - 1 if kind == "fit" else stages


def _check_optimizer(model: Any, *, several: bool) -> None:
    for optimizer in inner_optimizers(model.optimizer):
        if has_callable_rate(optimizer):
            raise ValueError(
                f"learning_rate of {optimizer.name} is a Python function, whose value would be "
                "frozen in the program: give a float, or a keras.optimizers.schedules."
                "LearningRateSchedule"
            )
        if not several:
            continue
        if hasattr(type(optimizer), "minimize"):
            raise ValueError(
                f"the class {type(optimizer).__name__} of the optimizer must not override "
                "minimize: Keras calls update_step, and nothing would call it"
            )
        if steps := getattr(optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                f"gradient_accumulation_steps={steps} of {optimizer.name} cannot be used together "
                "with gradient accumulation of the model, or a pipeline: leave it out, and use "
                "gradient_accumulation_steps_per_replica of the model's options"
            )


def check_variables(model: Any, plan: StagePlan, ipus: Sequence[int]) -> None:
    """Refuse a variable that stages on several IPUs use.

    Raises:
        ValueError: there is one; it names it, and the stages.
    """
    uses: dict[int, tuple[Any, set[int]]] = {}
    for operation, stage in _calls(plan):
        for variable in getattr(operation, "variables", ()):
            uses.setdefault(id(variable), (variable, set()))[1].add(stage)
    for variable, stages in uses.values():
        places = sorted({ipus[stage] for stage in stages})
        if len(places) > 1:
            raise ValueError(
                f"variable {variable.path} of {model.name} can only be used by pipeline stages on "
                f"the same IPU, and stages {sorted(stages)}, on IPUs {places}, use it: assign them "
                "to one IPU by set_pipelining_options(device_mapping=...)"
            )


def _calls(plan: StagePlan) -> Iterator[tuple[Any, int]]:
    for invocation in plan.invocations:
        if invocation.nested is None:
            yield invocation.operation, invocation.stage
        else:
            yield from _calls(invocation.nested)


def _number_of_stages(model: Any) -> int | None:
    plan = stage_plan(model)
    return None if plan is None else plan.num_stages
