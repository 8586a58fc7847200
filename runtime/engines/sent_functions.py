"""Send functions to another process, which makes the same code of them as this one would.

The message has the text of each function and the settings of PyTorch. The other process takes the
settings. It refuses if anything else differs that decides the code, for instance a pass that the
user gave to Inductor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ipu_dynamo.ops import operators as operators  # that functions may call
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.text.program_text import read_record, record_text
from ipu_dynamo.runtime.engines.private.compile_settings import CompileSettings
from ipu_dynamo.runtime.engines.stage_key import stage_key

_FIRST = "function"  # the line before the text of one


class OtherCode(Exception):
    """This process would make other code of a function than the one that sent it."""


@dataclass(frozen=True, slots=True)
class SentFunctions:
    """Functions for another process.

    Args:
        texts: text and settings of each, by the key of its code.
        process: the settings for all of them.
    """

    texts: dict[str, tuple[str, tuple[tuple[str, bool | int], ...]]]
    process: CompileSettings

    @classmethod
    def of(cls, recipes: Iterable[FunctionRecipe]) -> Self:
        """Describe functions that can be sent."""
        texts = {
            recipe.key: (record_text(recipe.lowered, _FIRST), recipe.settings)
            for recipe in recipes
            if recipe.key is not None
        }
        return cls(texts, CompileSettings.in_force())

    def received(self) -> list[FunctionRecipe]:
        """The recipes in the other process, which takes the settings for good.

        Raises:
            OtherCode
        """
        self.process.apply()
        recipes = []
        for key, (text, settings) in self.texts.items():
            function = read_record(text, Function, _FIRST, lambda function: None)
            if stage_key(function, dict(settings)) != key:
                raise OtherCode(f"@{function.name} would become other code here")
            recipes.append(
                FunctionRecipe(function, function, "inductor", settings=settings, key=key)
            )
        return recipes


def can_be_sent(recipe: FunctionRecipe) -> bool:
    """Whether another process has the operators and the device of a function."""
    nodes = recipe.lowered.graph.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in nodes]
    on_cpu = all(isinstance(value, Tensor) and value.device.type == "cpu" for value in values)
    return recipe.key is not None and on_cpu  # a function with other operators has no key
