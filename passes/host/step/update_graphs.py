"""Write an optimiser's equations as operators of a graph, for a compiler to fuse with the rest.

Source: `ipu_dynamo.program.ir.update_rules`, whose names and equations these are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.program.ir.update_rules import SGD, Adam, Rule

aten = torch.ops.aten
Hyperparameters = Mapping[str, fx.Node]  # by name; of `LEFT_OUT` those that are not zero
Written = tuple[fx.Node, dict[str, fx.Node]]  # new parameter, new states by name


@dataclass(frozen=True, slots=True)
class Writer:
    """Appends operators to a graph, each with its fake value.

    `add`, `multiply`, `minus` and `divide` return the dtype of `a`. PyTorch promotes a tensor of no
    dimension that meets a float64 hyperparameter; `b` is cast then.
    """

    graph: fx.Graph

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values, **named)
        return node

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, a, self._fitting(a, b))

    def multiply(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.mul.Tensor, a, self._fitting(a, b))

    def minus(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.sub.Tensor, a, self._fitting(a, b))

    def divide(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.div.Tensor, a, self._fitting(a, b))

    def _fitting(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """`b`, cast if it would promote `a`."""
        value = a.meta["val"]
        if torch.result_type(value, b.meta["val"]) == value.dtype:
            return b
        return self.call(aten.to.dtype, b, value.dtype)

    def once(self, scalar: fx.Node) -> fx.Node:
        """`scalar` in memory: a compiled loop over elements would compute it in every turn.

        Inductor lays out in memory what strides are given for.
        """
        return self.call(aten.as_strided.default, scalar, [], [])

    def from_one(self, a: fx.Node) -> fx.Node:
        """1 - a."""
        return self.call(aten.rsub.Scalar, a, 1.0)


def sgd(
    rule: SGD,
    writer: Writer,
    w: fx.Node,
    g: fx.Node,
    states: Mapping[str, fx.Node],
    hyperparameters: Hyperparameters,
) -> Written:
    """A step of SGD; without a momentum its buffer keeps its value, as in torch."""
    g = _decayed(writer, _signed(writer, g, rule.maximize), w, hyperparameters)
    lr, new = hyperparameters["lr"], {}
    momentum, dampening = hyperparameters.get("momentum"), hyperparameters.get("dampening")
    if rule.momentum and (momentum is not None or rule.dampen_first_step):
        undamped, buffer = g, states["momentum_buffer"]
        if dampening is not None:
            g = writer.multiply(g, writer.from_one(dampening))
        if momentum is not None:
            g = writer.add(writer.multiply(buffer, momentum), g)
        if not rule.dampen_first_step:
            started = states["momentum_started"]
            first = writer.call(aten.eq.Scalar, started, 0.0)
            g = writer.call(aten.where.self, first, undamped, g)
            new["momentum_started"] = writer.call(aten.ones_like.default, started)
        new["momentum_buffer"] = g
        if rule.nesterov and momentum is not None:
            g = writer.add(undamped, writer.multiply(g, momentum))
        elif rule.nesterov:
            g = undamped
    elif rule.stateless_dampening and dampening is not None:
        lr = writer.multiply(lr, writer.from_one(dampening))
    return writer.minus(w, writer.multiply(g, lr)), new


def adam(
    rule: Adam,
    writer: Writer,
    w: fx.Node,
    g: fx.Node,
    states: Mapping[str, fx.Node],
    hyperparameters: Hyperparameters,
) -> Written:
    """A step of Adam or AdamW; bias corrections are float64, as in torch's fused operator."""
    lr, eps = hyperparameters["lr"], hyperparameters.get("eps")
    g = _signed(writer, g, rule.maximize)
    if not rule.decoupled_weight_decay:
        g = _decayed(writer, g, w, hyperparameters)
    elif "weight_decay" in hyperparameters:
        w = writer.multiply(
            w, writer.from_one(writer.multiply(lr, hyperparameters["weight_decay"]))
        )
    step = writer.call(aten.add.Scalar, states["step"], 1.0)
    new = {"step": step}
    corrections: list[fx.Node] = []
    for name, beta, squared in (("exp_avg", "beta1", False), ("exp_avg_sq", "beta2", True)):
        value = writer.multiply(g, g) if squared else g
        factor = hyperparameters[beta]
        value = writer.multiply(value, writer.from_one(factor))
        new[name] = writer.add(writer.multiply(states[name], factor), value)
        wide = writer.call(aten.to.dtype, step, torch.float64)
        power = writer.call(aten.pow.Tensor_Tensor, factor, wide)
        corrections.append(writer.from_one(power))
    largest = new["exp_avg_sq"]
    if rule.amsgrad:
        largest = writer.call(aten.maximum.default, states["max_exp_avg_sq"], largest)
        new["max_exp_avg_sq"] = largest
    root = writer.call(aten.sqrt.default, largest)
    first, second = corrections
    divisor = writer.once(writer.call(aten.sqrt.default, second))
    root = writer.divide(root, divisor)
    if eps is not None:
        root = writer.add(root, eps)
    size = writer.once(writer.divide(lr, first))
    change = writer.divide(writer.multiply(new["exp_avg"], size), root)
    return writer.minus(w, change), new


def written(
    rule: Rule,
    writer: Writer,
    w: fx.Node,
    g: fx.Node,
    states: Mapping[str, fx.Node],
    hyperparameters: Hyperparameters,
) -> Written:
    """A step of `rule`, which is one of `RULES`."""
    match rule:
        case SGD():
            return sgd(rule, writer, w, g, states, hyperparameters)
        case Adam():
            return adam(rule, writer, w, g, states, hyperparameters)
    raise NotImplementedError(f"no graph for the rule {rule}")


RULES: tuple[type[Rule], ...] = (SGD, Adam)


def _signed(writer: Writer, g: fx.Node, maximize: bool) -> fx.Node:
    return writer.call(aten.neg.default, g) if maximize else g


def _decayed(writer: Writer, g: fx.Node, w: fx.Node, hyperparameters: Hyperparameters) -> fx.Node:
    decay = hyperparameters.get("weight_decay")
    return g if decay is None else writer.add(g, writer.multiply(w, decay))
