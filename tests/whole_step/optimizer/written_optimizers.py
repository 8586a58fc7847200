"""Define optimisers as users write them, whose steps are traced."""

import math
import random

import torch
from torch.optim import Optimizer

OUTSIDE = torch.full((), 0.1)
calls = 0


class Base(Optimizer):
    """What they share: a learning rate, and parameters that have a gradient."""

    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, {"lr": lr, **more})

    def each(self):
        for group in self.param_groups:
            yield from ((group, p) for p in group["params"] if p.grad is not None)


class Lion(Base):
    """Writes through `.data`, rebinds its state, counts in Python."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            if not state:
                state["m"], state["step"] = torch.zeros_like(p), 0
            state["step"] += 1
            p.data.mul_(1 - group["lr"] * 0.1)
            rate = group["lr"] * math.sqrt(1 - 0.99 ** state["step"])
            p.data = p.data - (state["m"] * 0.9 + p.grad.data * 0.1).sign_() * rate
            state["m"] = state["m"] * 0.99 + p.grad * 0.01


class Lookahead(Base):
    """Counts on itself, and does something else at every k-th step."""

    def __init__(self, params, k=3):
        super().__init__(params, k=k)
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group, p in self.each():
            state = self.state[p]
            if "slow" not in state:
                state["slow"] = p.clone()
            torch._foreach_add_([p], [p.grad], alpha=-group["lr"])
            if self.t % group["k"] == 0:
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])


class CountsInItsGroup(Base):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"] / math.sqrt(group["step"]))


class OneNameForThree(Base):
    """Has a number under one name in itself, in its group, and in each state from the first step
    on, which divides by it."""

    def __init__(self, params):
        super().__init__(params, every=3)
        self.every = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            if not state:
                state["every"], state["step"] = group["every"] * 2, 0
            state["step"] += 1
            if state["step"] % state["every"] == 0:
                p.mul_(self.every)
            p.add_(p.grad, alpha=-group["lr"] / group["every"])


class TensorsAsRates(Base):
    """Has a tensor as an attribute, and makes tensors of numbers."""

    def __init__(self, params):
        super().__init__(params)
        self.decay = torch.full((), 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            rate = torch.as_tensor(group["lr"]) * self.decay
            p.sub_(p.grad * rate)


class Centralized(Base):
    """Reduces over dimensions, so that it is not elementwise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            grad = p.grad
            if grad.dim() > 1:
                grad = grad - grad.mean(dim=1, keepdim=True)
            state = self.state[p]
            if not state:
                state["rows"] = torch.zeros(p.shape[0])
            state["rows"].mul_(0.9).add_(grad.reshape(p.shape[0], -1).norm(dim=1), alpha=0.1)
            scale = state["rows"].reshape(-1, *[1] * (p.dim() - 1)) + 1e-3
            p.addcdiv_(grad, scale, value=-group["lr"])


class SkipsByDtype(Base):
    """Keeps strings, flags and None in its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            if state.get("kind") is None:
                state["kind"], state["started"], state["nothing"] = "matrix"[: p.dim()], False, None
            factor = 1.0 if state["started"] else 0.5
            state["started"] = True
            p.add_(p.grad, alpha=-group["lr"] * factor)


class ScheduledByNumbers(Base):
    """Decides by its numbers: a warm-up of `warm` steps, and `min` and `max` of numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            if state["step"] <= group["warm"]:
                rate = group["lr"] * state["step"] / group["warm"]
            else:
                rate = max(group["lr"] * math.exp(-0.1 * state["step"]), 0.01)
            p.add_(p.grad, alpha=-min(rate, 0.5))


class StepsInLists(Base):
    """Steps with lists of tensors unless told otherwise, and then takes matrices only."""

    def __init__(self, params):
        super().__init__(params, foreach=None)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            if group["foreach"] is False and any(p.dim() != 2 for p in own):
                raise ValueError("a parameter is no matrix")
            for p in own:
                self.state[p].setdefault("mean", torch.zeros_like(p))
            means = [self.state[p]["mean"] for p in own]
            torch._foreach_lerp_(means, [p.grad for p in own], weight=0.1)
            sizes = torch._foreach_abs(means)
            torch._foreach_sqrt_(sizes)
            torch._foreach_maximum_(sizes, 1e-3)
            torch._foreach_addcdiv_(own, means, sizes, value=-group["lr"])


class OfSizes(Base):
    """Has whole numbers as sizes: of a state, of a view, and of a slice."""

    def __init__(self, params, rank=2, keep=2):
        super().__init__(params, rank=rank)
        self.keep = keep

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state, rank = self.state[p], group["rank"]
            if not state:
                state["parts"] = torch.zeros((rank, p.numel() // rank))
                state["step"] = 0
            state["step"] += 1
            parts = p.grad.reshape(rank, -1)
            state["parts"].lerp_(parts, 0.5)
            largest = state["parts"].flatten().abs().topk(self.keep).values
            update = state["parts"].view_as(p) / largest[: self.keep - 1].sum()
            p.sub_(update, alpha=group["lr"] / state["step"])


# --- What cannot be traced ------------------------------------------------------------------------


class DecidesByGradients(Base):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            if p.grad.norm() > 1:
                p.add_(p.grad, alpha=-group["lr"])


class CountsOutside(Base):
    @torch.no_grad()
    def step(self, closure=None):
        global calls
        calls += 1
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"] / calls)


class ChangesAStateLater(Base):
    """Every third step changes a state of no parameter; the first trace only reads it."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["steps"], self.norm = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["steps"] += 1
        if self.param_groups[0]["steps"] % 3 == 0:
            self.norm.copy_(sum(p.grad.norm() for _, p in self.each()))
        for group, p in self.each():
            p.sub_(p.grad * (group["lr"] * (1 + self.norm)))


class DrawsInPython(Base):
    @torch.no_grad()
    def step(self, closure=None):
        random.random()
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"])


class ReadsOutside(Base):
    @torch.no_grad()
    def step(self, closure=None):
        for _, p in self.each():
            p.sub_(p.grad * OUTSIDE)


class SelectsByMask(Base):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            positive = p.grad[p.grad > 0]
            p.sub_(group["lr"] * positive.sum())


class Wrapper(Base):
    """Its groups are those of the optimiser that it wraps."""

    def __init__(self, params):
        self.wrapped = torch.optim.Adamax(params)
        super().__init__([torch.zeros(1)])

    @property
    def param_groups(self):
        return self.wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"])


class NeverInitialised(Base):
    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state, self.defaults = {}, {}


class Coupled(Base):
    @torch.no_grad()
    def step(self, closure=None):
        total = sum(p.grad.square().sum() for _, p in self.each())
        for group, p in self.each():
            p.sub_(p.grad / total * group["lr"])


class EstimatesItsRate(Base):
    """Keeps, in its group, a number that hangs on the gradients of all parameters."""

    def __init__(self, params):
        super().__init__(params, d=torch.full((), 1e-2))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        top, norm = torch.zeros(()), torch.zeros(())
        for _, p in self.each():
            state = self.state[p]
            if not state:
                state["s"], state["first"] = torch.zeros_like(p), p.clone()
            top += (p.grad * (state["first"] - p)).sum()
            state["s"].mul_(0.9).add_(p.grad * group["d"])
            norm += state["s"].abs().sum()
        group["d"] = torch.maximum(group["d"], top / norm.clamp(min=1e-3))
        for group, p in self.each():
            p.sub_(self.state[p]["s"] * group["d"] / (norm + 1) * group["lr"])


class KeepsLists(Base):
    """Keeps tensors in lists of its own, and a table that belongs to no parameter."""

    def __init__(self, params):
        super().__init__(params)
        self.means = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        self.norms = torch.zeros(4)

    @torch.no_grad()
    def step(self, closure=None):
        pairs = list(zip(self.means, self.each(), strict=True))
        sizes = torch.stack([p.grad.norm() for _, (_, p) in pairs])
        self.norms.copy_(torch.cat([self.norms[1:], sizes.max().reshape(1)]))
        for mean, (group, p) in pairs:
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean / (1 + self.norms.mean()) * group["lr"])


class ScalesByItsOwnSize(Base):
    """Keeps, for each parameter, a number that hangs on its gradients; all begin with zero."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            if not state:
                state["size"] = torch.zeros(())
            state["size"].lerp_(p.grad.square().mean(), 0.1)
            p.sub_(p.grad / (state["size"].sqrt() + 1e-3) * group["lr"])
