"""Train and run a model in plain PyTorch, on the micro-batches that a program would see.

With D device iterations, A accumulation steps, G input groups, R replicas and B rows in a
micro-batch, a call's tensors have the rows `[D, A, G, B]`. Returned tensors have `[D, A, R, B]`.
Source: PopTorch user guide, "Device iterations", "Gradient accumulation", "Output modes".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.swap import swapped
from ipu_dynamo.errors import InputError
from ipu_dynamo.options import Options
from ipu_dynamo.program.replica_tree import additions
from ipu_dynamo.testing.private.testing_names import pytree

Loss = int | Callable[[Any], Tensor] | None


class Reference:
    """A plain PyTorch model, called like a compiled one: the reference for a program.

    Invariant: parameters are shared by all replicas; of those that `options.replica_groups` names
    each group has its slice. Each replica has buffers of its own; those of replica 0 are the
    model's. Of replicas that read the same rows, the first one's in-place changes
    reach the caller.

    Args:
        model: is trained in place.
        options: engine, strategy and `narrow` do not matter here.
        optimizer: of the model's parameters; None for inference.
        loss: the value to differentiate: the index of a returned tensor, or a function that picks
            it from the model's result. None: the only differentiable tensor of one element.

    Attributes:
        once: indices of tensors that are returned once, like values of a program that depend on no
            input.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss = None,
    ) -> None:
        self.model, self.options, self.optimizer, self.loss = model, options, optimizer, loss
        self.once: frozenset[int] = frozenset()
        others = range(1, options.replicas)
        self._buffers = [[b.detach().clone() for b in model.buffers()] for _ in others]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call; tensors that the model changes in place are changed in place.

        Args:
            args: positional arguments of a call, with the rows of all its micro-batches.
            kwargs: keyword arguments of a call, with as many rows.
        """
        accumulation = self.options.gradient_accumulation if self.optimizer else 1
        micro_batches = _split((args, kwargs), self._splits(accumulation))
        group_of = [self._group(replica) for replica in range(self.options.replicas)]
        returned = []
        for iteration in range(self.options.device_iterations):
            sums: list[dict[nn.Parameter, Tensor]] = [{} for _ in group_of]
            for step in range(accumulation):
                first = (iteration * accumulation + step) * self.options.input_groups
                arguments = [micro_batches[first + group] for group in group_of]
                for replica, group in enumerate(group_of):
                    if group_of.index(group) != replica:  # the caller's go to the first reader
                        arguments[replica] = pytree.tree_map_only(
                            Tensor, torch.clone, arguments[replica]
                        )
                for replica, (its_args, its_kwargs) in enumerate(arguments):
                    with self._replica(replica):
                        returned.append(self._micro_batch(replica, its_args, its_kwargs))
                    self._take_gradients(sums[replica])
            if self.optimizer is not None:
                self._reduce(sums)
                self._update(accumulation)
        return self._join(returned, accumulation)

    def _splits(self, accumulation: int) -> int:
        return self.options.device_iterations * accumulation * self.options.input_groups

    def _group(self, replica: int) -> int:
        """The input group that `replica` reads."""
        options = self.options
        if options.input_groups_orthogonal:
            return replica % options.input_groups
        return replica // options.input_group_size

    @contextmanager
    def _seen_by(self, replica: int) -> Iterator[None]:
        """Put the slices of `replica` into the model; gradients reach the whole tensors."""
        if not self.options.replica_groups:
            yield
            return
        seen = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        for name, groups in self.options.replica_groups.items():
            path, _, leaf = name.rpartition(".")
            tensor = getattr(self.model.get_submodule(path), leaf)
            seen[id(tensor)] = tensor[groups.of(self.options.replicas)[replica]]
        with swapped(self.model, seen):
            yield

    @contextmanager
    def _replica(self, replica: int) -> Iterator[None]:
        """Put the buffers of `replica` into the model."""
        if replica == 0:
            yield
            return
        with torch.no_grad():
            first = [buffer.detach().clone() for buffer in self.model.buffers()]
            _copy(self._buffers[replica - 1], list(self.model.buffers()))
            yield
            _copy(list(self.model.buffers()), self._buffers[replica - 1])
            _copy(first, list(self.model.buffers()))

    def _micro_batch(self, replica: int, args: Any, kwargs: Any) -> Any:
        training = self.optimizer is not None
        with torch.set_grad_enabled(training), self._seen_by(replica):
            returned = self.model(*args, **kwargs)
            kept = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), returned)
            if training:
                self._loss_of(returned).sum().backward()
        return kept

    def _take_gradients(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Add a micro-batch's gradients to those of its replica."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                known = sums.get(parameter)
                sums[parameter] = parameter.grad if known is None else known + parameter.grad
                parameter.grad = None

    def _reduce(self, sums: Sequence[Mapping[nn.Parameter, Tensor]]) -> None:
        """Sum over replicas, after micro-batches: where gradients cancel, order is all that one
        sees of their sum."""
        for parameter in sums[0]:
            of = [one[parameter] for one in sums]
            for total, term in additions(len(of)):
                of[total] = of[total] + of[term]
            parameter.grad = of[0]

    def _loss_of(self, returned: Any) -> Tensor:
        if callable(self.loss):
            return self.loss(returned)
        tensors = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        if self.loss is not None:
            return tensors[self.loss]
        scalars = [t for t in tensors if t.numel() == 1 and t.requires_grad]
        if len(scalars) != 1:
            raise InputError(
                f"the model returns {len(scalars)} differentiable tensors of one element; plain "
                f"PyTorch needs to know which of its {len(tensors)} tensors is the loss",
                hint="pass `loss`: its index, or a function that picks it",
            )
        return scalars[0]

    def _update(self, accumulation: int) -> None:
        assert self.optimizer is not None
        if self.options.reduction == "mean":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= accumulation * self.options.replicas
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _join(self, returned: Sequence[Any], accumulation: int) -> Any:
        """Put returned micro-batches, in the order [D, A, R], together by the output mode."""
        flat = [pytree.tree_flatten(one) for one in returned]
        joined: list[Any] = []
        tensors = 0
        for column in zip(*(leaves for leaves, _ in flat), strict=True):
            if not isinstance(column[0], Tensor):
                joined.append(column[0])
                continue
            if tensors in self.once:
                assert all(torch.equal(column[0], other) for other in column), "not constant"
                joined.append(column[0])
            else:
                joined.append(self._joined(column, accumulation))
            tensors += 1
        return pytree.tree_unflatten(joined, flat[0][1])

    def _joined(self, leaves: Sequence[Tensor], accumulation: int) -> Tensor:
        replicas, per_iteration = self.options.replicas, accumulation * self.options.replicas
        match self.options.returns(self.optimizer is not None):
            case "final":
                kept = list(leaves[-replicas:])
            case "sum":
                kept = [_total(leaves[replica::replicas]) for replica in range(replicas)]
            case "every":
                period = self.options.return_period
                kept = [
                    leaf
                    for index, leaf in enumerate(leaves)
                    if (index // per_iteration + 1) % period == 0
                ]
            case _:
                kept = list(leaves)
        if len(kept) == 1:
            return kept[0]
        return torch.stack(kept) if kept[0].dim() == 0 else torch.cat(kept)


def _split(tree: Any, splits: int) -> list[Any]:
    """The micro-batches of a call's arguments: views of their tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    columns = []
    for leaf in leaves:
        rows = len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else splits
        if rows % splits:
            raise InputError(
                f"a tensor of {rows} rows does not divide into {splits} micro-batches",
                hint="rows must be a multiple of device iterations x gradient accumulation x "
                "input groups",
            )
        size = rows // splits
        whole = not isinstance(leaf, Tensor) or leaf.dim() == 0
        columns.append([leaf if whole else leaf[i * size : (i + 1) * size] for i in range(splits)])
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(splits)]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _total(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def named_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    parameters = {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
    return parameters | {f"buffer {name}": b.detach() for name, b in model.named_buffers()}
