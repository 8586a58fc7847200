"""Give the function of a rule: a graph of one operator, as traced updates have graphs of many."""

import operator
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import fx

from ipu_dynamo.ops.updates.update_functions import HYPERPARAMETERS
from ipu_dynamo.ops.updates.update_operators import OPERATORS, STATES
from ipu_dynamo.program.ir.function import Function, make_function
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import Update
from ipu_dynamo.program.ir.update_rules import Rule

NUMBER = TensorType(torch.float64, ())  # of a hyperparameter


@lru_cache(maxsize=1024)
def rule_function(
    rule: Rule,
    weight: TensorType,
    gradient: TensorType,
    states: tuple[TensorType, ...],
    zeros: frozenset[str] = frozenset(),
) -> Function:
    """The step of one parameter: takes it, its gradient, its states and hyperparameters, which are
    float64 numbers; gives the next weight and states.

    Args:
        rule: one that has an operator.
        states: in the order of `rule.state_names()`.
        zeros: hyperparameters that are zero, and left out.
    """
    graph = fx.Graph()

    def take(name: str, type_: TensorType) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(type_.shape, dtype=type_.dtype, device="meta")
        return node

    variables = take("weight", weight), take("gradient", gradient)
    names = [spec.name for spec in rule.state_names()]
    own = {name: take(name, type_) for name, type_ in zip(names, states, strict=True)}
    numbers = {name: take(name, NUMBER) for name in rule.hyperparameters if name not in zeros}
    rest = [own.get(name) for name in STATES[rule.kind]]
    rest += [numbers.get(name) for name in HYPERPARAMETERS[rule.kind]]
    step = OPERATORS[rule.kind]
    new = graph.call_function(step, (*variables, *rest), {"flags": sorted(rule.flags)})
    values = [None if node is None else node.meta["val"] for node in (*variables, *rest)]
    new.meta["val"] = step(*values, flags=sorted(rule.flags))
    results = {}
    for place, name in enumerate(("weight", *(n for n in STATES[rule.kind] if n in own))):
        node = graph.call_function(operator.getitem, (new, place))
        node.meta["val"] = new.meta["val"][place]
        results[name] = node
    graph.output(tuple(results[name] for name in ("weight", *names)))
    return make_function(rule.kind, fx.GraphModule(torch.nn.Module(), graph))


def function_at(
    update: Update,
    functions: Mapping[str, Function],
    weight: TensorType,
    gradient: TensorType,
    zeros: frozenset[str] = frozenset(),
) -> Function:
    """The function that updates one parameter of an update: that of its rule, or a traced one.

    Args:
        functions: traced ones, by name.
        weight, gradient: types.
        zeros: hyperparameters that a rule's function leaves out.

    Raises:
        ValueError: the program has no function of this name.
    """
    if update.function is None:
        states = update.rule.state_types(weight)
        return rule_function(update.rule, weight, gradient, states, zeros)
    if update.function not in functions:
        raise ValueError(f"no function of an update is called {update.function}")
    return functions[update.function]
