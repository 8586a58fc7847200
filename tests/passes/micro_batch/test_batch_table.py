"""Check every row of the table of micro-batches against eager PyTorch, by brute force.

`IPU_DYNAMO_TABLE_DRAWS=200 pytest tests/passes/micro_batch` draws more.
"""

import os
from collections import Counter

import pytest
import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.micro_batch.batch_table import LINEAR, REPLICATED, RULES, pattern
from ipu_dynamo.passes.micro_batch.placements import Kind, Placement, Shard, Split
from tests.passes.micro_batch.split_run import drawn_placements, is_split, run_split, traced
from tests.passes.micro_batch.table_calls import CALLS, Draw, pointwise

DRAWS = int(os.environ.get("IPU_DYNAMO_TABLE_DRAWS", "1"))
CALLS_EACH, PLACEMENTS_EACH = 20, 8  # tried for each draw: many placements do not fit a row
ANY_VALUE = ("empty_like", "rand_like", "randn_like")
TRACED_AS = {torch.ops.aten.detach.default: torch.ops.aten.alias.default}  # PyTorch 2.14 drops it
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
AFFINE = {
    torch.ops.aten.add.Scalar, torch.ops.aten.sub.Scalar, torch.ops.aten.rsub.Scalar,
    torch.ops.aten.clamp.default, torch.ops.aten.where.self, torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.mean.default, torch.ops.aten.addmm.default, torch.ops.aten.cat.default,
}  # fmt: skip
NAMES = {
    op: op.name().removeprefix("aten::")
    for op in RULES  # type: ignore[attr-defined]
}


BY_NAME = {name: op for op, name in NAMES.items()}


class Case:
    """A drawn call of an operator, as a function of its floating-point tensors, and its numbers."""

    def __init__(self, op, seed: int) -> None:
        draw, name = Draw(seed), NAMES[op]
        self.rng, self.op = draw.rng, op
        make = CALLS.get(name)
        self.args, self.kwargs = make(draw) if make else pointwise(draw, name, op._schema)
        leaves, self.spec = torch.utils._pytree.tree_flatten((self.args, self.kwargs))
        self.leaves = leaves
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[i] for i in self.places]
        self.n = self.rng.choice((2, 2, 3))

    def call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = torch.utils._pytree.tree_unflatten(leaves, self.spec)
        results = TRACED_AS.get(self.op, self.op)(*args, **kwargs)
        results = tuple(results) if isinstance(results, tuple | list) else (results,)
        return *results, results[0].clone()  # so that a view is not all there is to split

    def traced(self, function, tensors):
        """The graph of `call` or `joint`, with this operator in it."""
        capture = traced(function, tensors)
        for node in capture.graph.graph.nodes:
            if self.op in TRACED_AS and node.target is TRACED_AS[self.op]:
                node.target = self.op
        return capture

    def joint(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Results and gradients of the floating-point tensors, by gradients of the results."""
        count = len(self.tensors)
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors[:count]]
        results = self.call(*inputs)
        outputs = [r for r in results if r.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad(outputs, wanted, tensors[count:], allow_unused=True)
        return *(r.detach() for r in results), *(g for g in found if g is not None)


def _averaged(call, tensors: list[Tensor], n: int) -> tuple[Tensor, ...]:
    """Batch norm in training as documented: statistics of micro-batches, running ones averaged."""
    parts = [call(part, *tensors[1:]) for part in tensors[0].chunk(n)]
    result, mean, invstd, *running, copy = zip(*parts, strict=True)
    averages = [torch.stack(values).mean(0) for values in running]
    return torch.cat(result), torch.cat(mean), torch.cat(invstd), *averages, torch.cat(copy)


def check(capture, call, tensors, seeds, n, op) -> tuple[Split, list[Placement]] | None:
    """Run whole and split, and compare; None where it is refused."""
    try:
        split, found = run_split(capture, tensors, seeds, n)
    except CompileError:
        return None
    expected = call(*tensors) if op is not BATCH_NORM else _averaged(call, tensors, n)
    name = NAMES[op]
    if any(word in name for word in ANY_VALUE):
        found, expected = map(torch.zeros_like, found), map(torch.zeros_like, expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda m: f"{name} {seeds}: {m}")
    return split, [split.of(node) for node in capture.returned]


def exercise(op, draws: int, seen: Counter) -> None:
    """Draw until an operator was split so often, forward and with its backward."""
    until, forward = op, BY_NAME.get(NAMES[op].removesuffix("_backward"))
    if NAMES[op] not in CALLS and forward is not None and NAMES[forward] in CALLS:
        op = forward
    for seed in range(draws * CALLS_EACH):
        if seen[until] >= draws:
            return
        case = Case(op, seed)
        capture = case.traced(case.call, case.tensors)
        for _ in range(PLACEMENTS_EACH):
            seeds = drawn_placements(case.tensors, case.n, case.rng)
            if op is BATCH_NORM:
                seeds, case.n = [Shard(0), *[Kind.REPLICATE] * 4], 2
            checked = check(capture, case.call, case.tensors, seeds, case.n, op)
            if checked is None or not is_split(checked[0], op):
                continue
            seen[op] += 1
            elementwise = NAMES[op] not in CALLS and DRAWS == 1  # their gradients are other rows
            if op is not BATCH_NORM and not elementwise:  # it has those of its micro-batches
                backward(case, seeds, checked[1], seen)
            break


def backward(case: Case, seeds, placed, seen: Counter) -> None:
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in case.tensors]
    try:
        results = case.call(*inputs)
    except RuntimeError:
        return
    outputs = [(r, at) for r, at in zip(results, placed, strict=True) if r.requires_grad]
    if not outputs:
        return
    tangents = [torch.rand_like(r.detach()) for r, _ in outputs]
    seeds = seeds + [at if isinstance(at, Shard) else Kind.REPLICATE for _, at in outputs]
    tensors = [*case.tensors, *tangents]
    try:
        capture = case.traced(case.joint, tensors)
    except (RuntimeError, NotImplementedError):
        return  # PyTorch has no such gradient
    checked = check(capture, case.joint, tensors, seeds, case.n, case.op)
    if checked is not None:
        seen["joint"] += 1
        targets = {n.target for n in capture.graph.graph.nodes} & set(RULES) - {case.op, BATCH_NORM}
        seen.update(target for target in targets if is_split(checked[0], target))


def test_each_row_gives_the_numbers_of_the_whole_batch():
    """Forward, and backward through the joint graph; a row that was never used is no row."""
    seen: Counter = Counter()
    for op in sorted(RULES, key=lambda op: ("backward" in NAMES[op], NAMES[op])):
        if seen[op] < DRAWS:
            exercise(op, DRAWS, seen)
    assert not [NAMES[op] for op in RULES if seen[op] < DRAWS]
    assert seen["joint"] > 30 * DRAWS


@pytest.mark.slow
def test_a_block_of_rows_that_cannot_be_viewed_is_copied():
    """A view of the whole batch may be none of its block, which lies in memory with gaps."""
    op, seen = torch.ops.aten._unsafe_view.default, Counter()
    exercise(op, 60, seen)
    assert seen[op] == 60


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("addmm", "ik ij jk -> ik"),  # adds the bias in each micro-batch
        ("mm", "ij jk -> ki"),
        ("_softmax", "* -> *"),
        ("cumsum", "* -> *"),
        ("convolution", "n.~ n.~ ~ -> n.~"),
    ],
)
def test_a_wrong_row_is_found(name, wrong, monkeypatch):
    op = getattr(torch.ops.aten, name).default
    monkeypatch.setitem(RULES, op, pattern(wrong))
    with pytest.raises((AssertionError, RuntimeError)):
        exercise(op, 20, Counter())


@pytest.mark.parametrize("op", sorted(LINEAR | AFFINE, key=str), ids=str)
def test_sums_over_the_batch_are_passed_on_only_where_that_is_linear(op):
    """Arguments that are sums over the batch, all of them or some."""
    linear = 0
    for seed in range(6 * DRAWS):
        case = Case(op, seed)
        summed = [x.is_floating_point() and case.rng.random() < 0.8 for x in case.tensors]
        inputs = [
            torch.stack([x, x * 2, x * 3, x * 4]) if add else x
            for x, add in zip(case.tensors, summed, strict=True)
        ]

        def call(*given, case=case, summed=summed):
            return case.call(
                *(x.sum(0) if add else x for x, add in zip(given, summed, strict=True))
            )

        seeds = [Shard(0) if add else Kind.REPLICATE for add in summed]
        checked = check(case.traced(call, inputs), call, inputs, seeds, 2, op)
        if checked is not None:
            linear += is_split(checked[0], op)
    assert bool(linear) == (op in LINEAR)


aten = torch.ops.aten
ALL_ROWS = {
    "max": lambda x, i: aten.max.default(x),
    "min of one dimension": lambda x, i: aten.min.default(x[0]),
    "any": lambda x, i: aten.any.default(x > 0.6),
    "all": lambda x, i: aten.all.default(x > 0.1),
    "a number": lambda x, i: aten.max.default(x.sum()) + x,
    "prod": lambda x, i: aten.prod.default(x),
    "median": lambda x, i: aten.median.default(x),
    "index": lambda x, i: aten.index.Tensor(x, [i]) * 2,
    "index_put": lambda x, i: aten.index_put.default(x, [i], x, True),
    "index_add to rows": lambda x, i: x.index_add(0, i, x),
    "index_add to nothing": lambda x, i: x.new_zeros(8, 6).index_add(0, i, x),
    "index_select of rows": lambda x, i: x.index_select(0, i),
}


@pytest.mark.parametrize("name", ALL_ROWS)
def test_what_takes_all_rows_gives_the_numbers_of_the_whole_batch(name):
    draw = Draw(0)

    def call(x, index):
        return ALL_ROWS[name](x * 1, index), x + 1

    tensors = [draw.float(4, 6), draw.int(4, 4)]
    for seeds in ([Shard(0), Shard(0)], [Shard(0), Kind.REPLICATE], [Shard(1), Kind.REPLICATE]):
        split = check(traced(call, tensors), call, tensors, seeds, 2, aten.sum.default)
        assert split is not None
    assert aten.median.default in REPLICATED - set(RULES)
