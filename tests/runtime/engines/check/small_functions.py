"""Make functions of a few operators, and run them as a compiler might."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.program import Function, make_function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check.checked_stage import CheckedStage
from ipu_dynamo.runtime.engines.check.checks import by_operators
from ipu_dynamo.runtime.engines.check.runs import evaluator
from ipu_dynamo.runtime.engines.stage import Stage

Fault = Callable[[Any], Any]


def function_of(compute: Callable[..., Any], *inputs: Tensor) -> Function:
    """A function of the operators that `compute` calls; it returns a tuple."""
    with torch.no_grad():
        graph = make_fx(compute, tracing_mode="fake")(*map(torch.clone, inputs))
    return make_function("step", graph)


def faulty(function: Function, faults: Mapping[str, Fault]) -> Stage:
    """What runs a function with faults in operators of some names."""

    def hook(node: fx.Node, call: Any, args: Any, kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        return faults[node.name](made) if node.name in faults else made

    return evaluator(function.graph.graph, hook)


def checked(function: Function, run: Stage, **options: Any) -> CheckedStage:
    """The check of something that should compute a function."""
    recipe = FunctionRecipe(function, function, "eager", written=function.written)
    return CheckedStage(recipe, run, by_operators, lambda stage: None, **options)
