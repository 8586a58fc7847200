"""Compute an optimiser step of one parameter in place: one function for each rule.

A function changes the weight and its states, and may overwrite the gradient. It is called with

- a `Value` of a graph for each tensor, and for each hyperparameter, which then is a float64 tensor
  of no dimension on the host. It is cast where it meets a variable, and promotes no value;
- tensors, and hyperparameters as floats;
- a `TensorList` for each of these: one call for many parameters.

All three have the methods of tensors that stand here. `h` has the hyperparameters by name. Those
that are zero and need no operator are left out. Flags, states and equations are those of
`ipu_dynamo.program.ir.update_rules`; states of no dimension are counted by the caller.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch

from ipu_dynamo.ops.updates.update_values import Value

Function = Callable[..., None]
Named = Mapping[str, Any]  # tensors, or numbers, by name
Flags = frozenset[str]

HYPERPARAMETERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
    "lamb": ("lr", "beta1", "beta2", "eps", "weight_decay", "max_weight_norm"),
}
# Zeros that need no operator. PyTorch's optimisers branch on the first two; with the others nothing
# changes: g * (1 - 0) and x + 0 are g and x, also where these are infinite. No other may be:
# w - 0 * g is not w where g is infinite, nor is 0 * m + g then g.
LEFT_OUT = frozenset({"weight_decay", "momentum", "dampening", "eps"})
SCALAR_STATES = frozenset({"step", "momentum_started"})  # of no dimension
_WIDTH = 4096  # a sum of so many elements is never split


def sgd(w: Any, g: Any, states: Named, h: Named, flags: Flags, first: Any = None) -> None:
    """A step of SGD. Without a momentum its buffer keeps its value, as in torch.

    Args:
        first: whether the buffer has no value yet; None: as `momentum_started` says.
    """
    lr, momentum, dampening = h["lr"], h.get("momentum"), h.get("dampening")
    if "maximize" in flags:
        g.neg_()
    if "weight_decay" in h:
        g.add_(w, alpha=h["weight_decay"])
    dampens = "dampen_first_step" in flags
    if "momentum" in flags and (momentum is not None or dampens):
        buffer, share = states["momentum_buffer"], 1.0 if dampening is None else 1.0 - dampening
        if first is True:
            buffer.copy_(g)
        elif momentum is None:
            buffer.copy_(g)
            buffer.mul_(share)
        else:
            buffer.mul_(momentum)
            buffer.add_(g, alpha=share)
        if first is None and not dampens:
            started = states["momentum_started"]
            buffer.copy_(g.where(started.eq(0.0), buffer))
            started.fill_(1.0)
        if "nesterov" not in flags:
            g = buffer
        elif momentum is not None:
            g.add_(buffer, alpha=momentum)
    elif "momentum" not in flags and "stateless_dampening" in flags and dampening is not None:
        lr = lr * (1.0 - dampening)
    w.sub_(g, alpha=lr)


def adam(w: Any, g: Any, states: Named, h: Named, flags: Flags) -> None:
    """A step of Adam or AdamW. Bias corrections are float64, as in torch's fused kernel."""
    lr = h["lr"]
    if "maximize" in flags:
        g.neg_()
    if "weight_decay" in h:
        if "decoupled_weight_decay" in flags:
            w.mul_(1.0 - lr * h["weight_decay"])
        else:
            g.add_(w, alpha=h["weight_decay"])
    count = states["step"].double()
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    mean.mul_(h["beta1"])
    mean.add_(g, alpha=1.0 - h["beta1"])
    square.mul_(h["beta2"])
    square.addcmul_(g, g, value=1.0 - h["beta2"])
    if "amsgrad" in flags:
        largest = states["max_exp_avg_sq"]
        largest.clamp_(min=square)
        square = largest
    # Numbers of no dimension with strides are laid out in memory by Inductor. Else a compiled loop
    # over elements would compute them in every turn.
    divisor = (1.0 - h["beta2"] ** count).sqrt().as_strided((), ())
    size = (lr / (1.0 - h["beta1"] ** count)).as_strided((), ())
    root = square.sqrt()
    root.div_(divisor)
    if "eps" in h:
        root.add_(h["eps"])
    w.sub_(mean * size / root)


def rmsprop(w: Any, g: Any, states: Named, h: Named, flags: Flags) -> None:
    """A step of RMSprop: the operators of `torch.optim.RMSprop`, in its order."""
    lr, square = h["lr"], states["square_avg"]
    if "maximize" in flags:
        g.neg_()
    if "weight_decay" in h:
        g.add_(w, alpha=h["weight_decay"])
    square.mul_(h["alpha"])
    square.addcmul_(g, g, value=1.0 - h["alpha"])
    root = square.clone()
    if "centered" in flags:
        mean = states["grad_avg"]
        mean.lerp_(g, 1.0 - h["alpha"])
        root.addcmul_(mean, mean, value=-1.0)
    tensorflow = "tensorflow" in flags  # eps under the root, and the rate in the momentum
    if not tensorflow:
        root.sqrt_()
    if "eps" in h:
        root.add_(h["eps"])
    if tensorflow:
        root.sqrt_()
    if "momentum" in flags and "momentum" in h:
        buffer = states["momentum_buffer"]
        buffer.mul_(h["momentum"])
        buffer.addcdiv_(g, root, value=lr if tensorflow else 1.0)
        w.sub_(buffer, alpha=1.0 if tensorflow else lr)
    else:
        w.addcdiv_(g, root, value=-lr)


def lamb(w: Any, g: Any, states: Named, h: Named, flags: Flags) -> None:
    """A step of LAMB."""
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    mean.lerp_(g, 1.0 - h["beta1"])
    square.mul_(h["beta2"])
    square.addcmul_(g, g, value=1.0 - h["beta2"])
    if "uncorrected" not in flags:
        count = states["step"].double()  # which makes of a number, but not of an array, a double
        mean = (mean / (1.0 - h["beta1"] ** count)).to(w.dtype)
        square = (square / (1.0 - h["beta2"] ** count)).to(w.dtype)
    root = square.sqrt()
    change = mean / (root + h["eps"] if "eps" in h else root)
    change.add_(w, alpha=h.get("weight_decay", 0.0))  # 0.0 times an infinite weight is NaN
    # how far to go: as the weight's norm is to that of its change; 1 where one is zero
    dtype = torch.promote_types(w.dtype, torch.float32)
    of_weight, of_change = norm(w, dtype).clamp(max=h["max_weight_norm"]), norm(change, dtype)
    zero = of_weight.eq(0.0).logical_or(of_change.eq(0.0))
    trust = (of_weight / of_change).masked_fill(zero, 1.0)
    w.sub_(change * (h["lr"] * trust))


def norm(tensor: Any, dtype: torch.dtype, p: float = 2.0) -> Any:
    """The p-norm of `tensor`, summed in an order that does not depend on the number of threads.

    Torch splits one long sum between threads, but many short ones only from row to row.
    """
    if isinstance(tensor, Value):
        return tensor.norm(dtype)
    flat = tensor.reshape(-1)
    while flat.numel() > _WIDTH:
        whole = flat.numel() // _WIDTH * _WIDTH
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _WIDTH), p, dim=1, dtype=dtype)
        flat = torch.cat([rows, flat[whole:].to(dtype)])
    if p == inf and not flat.numel():
        return torch.zeros((), dtype=dtype, device=tensor.device)
    return torch.linalg.vector_norm(flat, p, dtype=dtype)


FUNCTIONS: Mapping[str, Function] = {"sgd": sgd, "adam": adam, "rmsprop": rmsprop, "lamb": lamb}
