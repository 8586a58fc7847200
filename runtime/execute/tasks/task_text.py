"""Write in words what a stage pass does with its registers."""

from collections.abc import Mapping, Sequence
from typing import assert_never

from ipu_dynamo.program import (
    Accumulate,
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    ClipFactor,
    ClipValues,
    Copy,
    GradientNorm,
    JointUpdate,
    Load,
    Plain,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
    UpdateFactors,
    UpdatePart,
    WriteBuffer,
)
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.stage_passes import is_fetch


def task_text(
    instruction: Plain,
    registers: Sequence[int],
    results: Sequence[int | None],
    free: Sequence[int],
    recipes: Mapping[str, Recipe],
) -> str:
    """`r13, r14 = call! step1(r1, r11, !r3); free r11`: `!` is before what a call writes.

    Args:
        registers: of a call its arguments; of anything else, what it reads and writes.
        results: registers of what a call returns.
        free: registers that are empty afterwards.
    """
    match instruction:
        case Call(function=name):
            text = _call(recipes[name], registers, results)
        case Receive(stream=stream):
            text = f"r{registers[0]} = receive {stream}"
        case Send(stream=stream):
            text = f"send {stream} = r{registers[0]}"
        case Copy(src=src, dst=dst):
            source, target = registers
            same = f"r{target} is the copy of ipu{src} on ipu{dst}"
            text = same if source == target else f"r{target} = r{source} of ipu{src} on ipu{dst}"
        case Load() if is_fetch(instruction):
            text = f"r{registers[1]} = fetch r{registers[0]}"
        case Load():
            text = f"r{registers[1]} = load r{registers[0]}"
        case Store():
            text = f"r{registers[1]} = store r{registers[0]}"
        case AllGather():
            text = f"gather r{registers[0]}"
        case Accumulate() | WriteBuffer() | ReduceScatter() | AllReduce() | Update():
            raise ValueError(f"no task does this: {instruction}")
        case AdjustLossScale() | GradientNorm() | ClipFactor() | ClipValues() | UpdateFactors():
            raise ValueError(f"no task does this: {instruction}")
        case UpdatePart() | JointUpdate():
            raise ValueError(f"no task does this: {instruction}")
        case _:
            assert_never(instruction)
    return f"{text}; free {' '.join(f'r{register}' for register in free)}" if free else text


def _call(recipe: Recipe, arguments: Sequence[int], results: Sequence[int | None]) -> str:
    given = (f"{'!' if i in recipe.written else ''}r{r}" for i, r in enumerate(arguments))
    made = ", ".join("none" if register is None else f"r{register}" for register in results)
    call = "call!" if recipe.written else "call"
    return f"{f'{made} = ' if made else ''}{call} {recipe.function.name}({', '.join(given)})"
