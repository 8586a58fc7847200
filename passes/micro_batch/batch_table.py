"""Hold the closed table of operators that work on a micro-batch, and how each does.

A row gives dimensions labels. If one is cut into blocks, so is every other with the same label, in
operands and results; a result without that label is a partial sum. So `mm` is `ij jk -> ik`: cut
along i it makes blocks of rows, along k of columns, along j partial sums. In a pattern `.` is a
dimension that cannot be cut, `~` are any number of those, `*` any number that can; `-` is a tensor
without dimensions, `E` one that every micro-batch has for itself; `/` takes the mean, not the sum.

Source   PyTorch's documentation of each operator; the idea is that of sharding propagation.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.print_tensor import print_tensor_op
from ipu_dynamo.ops.private.graphs import schema_of
from ipu_dynamo.ops.recurrent.gru import gru, gru_backward
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.ops.recurrent.rnn import rnn, rnn_backward
from ipu_dynamo.passes.micro_batch.placements import Kind, Label, Labels, Placements, Row, Shard

_SHOWN = (aten.view.default, aten.unsqueeze.default, aten._to_copy.default)
NONE, MEAN, SUM = 0, 1, 2  # the argument `reduction` of losses


class OperatorCall:
    """A call of an operator, with its arguments by name."""

    def __init__(self, node: fx.Node, n: int, at: Mapping[fx.Node, Placements]) -> None:
        self.node, self.n, self.at, self.sources = node, n, at, node.all_input_nodes
        schema = schema_of(node.target).arguments  # type: ignore[arg-type]
        self.args: dict[str, Any] = {a.name: a.default_value for a in schema}
        self.args |= dict(zip(self.args, node.args, strict=False)) | dict(node.kwargs)
        self.tensors = [self.args[a.name] for a in schema if "Tensor" in str(a.type)]
        value = node.meta["val"]
        results = value if isinstance(value, tuple | list) else (value,)
        self.shapes = [shape_of(result) for result in results]

    def axes(self, name: str = "dim") -> set[int]:
        """The dimensions of the first operand that an argument names; all, if it is absent."""
        rank, axes = len(shape_of(self.sources[0])), self.args.get(name)
        listed = [axes] if isinstance(axes, int) else axes or range(rank)
        return {axis % rank for axis in listed} if rank else set()


Rule = Callable[[OperatorCall], Row | None]


def shape_of(value: object) -> tuple[int, ...]:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _bind(pattern: str, rank: int) -> Labels:
    """A label for each dimension; of a pattern that is too long the end counts."""
    head, many, tail = re.fullmatch(r"([^*~]*)([*~]?)(.*)", pattern).groups()  # type: ignore[union-attr]
    missing = rank - len(head) - len(tail) if many else 0
    between: list[Label] = [i if many == "*" else None for i in range(missing)]
    labels = [*head, *between, *tail]
    return tuple(None if x == "." else x for x in labels[max(len(labels) - rank, 0) :])


def _spread(node: fx.Node, labels: Labels) -> Labels:
    """Return labels of an operand that broadcasts: a dimension of size 1 is the same for all."""
    sizes = zip(labels, shape_of(node), strict=True)
    return tuple(None if size == 1 else label for label, size in sizes)


def pattern(text: str, sizes: str = "", count: str = "") -> Rule:
    """The rule of a pattern with an item for each tensor among the arguments."""
    operands, results = (side.split() for side in text.split(" -> "))

    def rule(op: OperatorCall) -> Row | None:
        read: list[tuple[fx.Node, Labels | Kind]] = []
        for item, node in zip(operands, op.tensors, strict=False):
            if isinstance(node, fx.Node):
                shape = shape_of(node)
                each = item == "E"
                labels = () if each else _bind(item.strip("-"), len(shape))
                if not each and len(labels) != len(shape):
                    return None
                read.append((node, Kind.PER_MICRO_BATCH if each else _spread(node, labels)))
        placed = tuple(
            Kind.PER_MICRO_BATCH if item == "E" else _bind(item.strip("-/"), len(shape))
            for item, shape in zip(results, op.shapes, strict=True)
        )
        mean = frozenset(i for i, item in enumerate(results) if item.endswith("/"))
        return Row(tuple(read), placed, sizes, count, mean)

    return rule


def elementwise(op: OperatorCall) -> Row:
    """Arguments broadcast to the shape of the results: dimensions are counted from their end."""
    read = [(x, _spread(x, tuple(range(-len(shape_of(x)), 0)))) for x in op.sources]
    return Row(tuple(read), tuple(tuple(range(-len(shape), 0)) for shape in op.shapes))


def moved(order: Callable[[OperatorCall, range], Sequence[Label]], sizes: str = "") -> Rule:
    """Dimensions are permuted, added or removed: `order` has the new places of the operands'."""

    def rule(op: OperatorCall) -> Row | None:
        dims = range(len(shape_of(op.sources[0])))
        result = tuple(order(op, dims))
        labels = tuple(dim if dim in result else None for dim in dims)
        if any(len(shape_of(x)) != len(dims) for x in op.sources):
            return None
        return Row(tuple((x, labels) for x in op.sources), (result,) * len(op.shapes), sizes)

    return rule


def except_axes(axes: Callable[[OperatorCall], Collection[int]], sizes: str = "") -> Rule:
    """Elements meet along some axes; along each other one every row is for itself."""

    def order(op: OperatorCall, dims: range) -> list[Label]:
        mixed = axes(op)
        return [None if dim in mixed else dim for dim in dims]

    return moved(order, sizes)


def _squeeze(op: OperatorCall, dims: range) -> list[Label]:
    shape, axes = shape_of(op.sources[0]), op.axes()
    alone = [dim in axes and shape[dim] == op.n for dim in dims]  # a micro-batch of one row
    return [None if alone[d] else d for d in dims if not (d in axes and shape[d] == 1)]


def _transpose(op: OperatorCall, dims: range) -> list[Label]:
    (a,), (b,) = op.axes("dim0"), op.axes("dim1")
    order: list[Label] = list(dims)
    order[a], order[b] = b, a
    return order


def _insert(op: OperatorCall, dims: range) -> list[Label]:
    at = op.args["dim"] % (len(dims) + 1)
    return [*dims[:at], None, *dims[at:]]


def _expand(op: OperatorCall, dims: range) -> list[Label]:
    shape = shape_of(op.sources[0])
    kept: list[Label] = [None if shape[dim] == 1 else dim for dim in dims]
    return [None] * (len(op.shapes[0]) - len(dims)) + kept


def _repeat(op: OperatorCall, dims: range) -> list[Label]:
    times = op.args["repeats"]
    new = len(times) - len(dims)
    return [*[None] * new, *(dim if times[new + dim] == 1 else None for dim in dims)]


def _diagonal(op: OperatorCall, dims: range) -> list[Label]:
    mixed = op.axes("dim1") | op.axes("dim2")
    return [*(dim for dim in dims if dim not in mixed), None]


def _onto_diagonal(op: OperatorCall, dims: range) -> list[Label]:
    rank = len(op.shapes[0])
    mixed, rows = {op.args["dim1"] % rank, op.args["dim2"] % rank}, iter(dims)
    return [None if dim in mixed else next(rows) for dim in range(rank)]


def _windows(op: OperatorCall, dims: range) -> list[Label]:
    mixed = op.axes("dimension")
    return [*(None if dim in mixed else dim for dim in dims), None]


def _from_windows(op: OperatorCall, dims: range) -> list[Label]:
    mixed = op.args["dim"] % (len(dims) - 1)
    return [None if dim == mixed else dim for dim in dims[:-1]]


def _padded(op: OperatorCall) -> set[int]:
    pad, rank = op.args["pad"], len(op.shapes[0])
    return {rank - 1 - i // 2 for i, size in enumerate(pad) if size}


def _sliced(op: OperatorCall) -> set[int]:
    whole = op.shapes[0] == shape_of(op.sources[0])
    return set() if whole else op.axes()


def indexed(op: OperatorCall) -> Row | None:
    """Rule for rows that a list picks, writes or adds to.

    An index of a part of the batch picks that part. Its sum on zeros is partial. Its changes of
    another tensor meet in that tensor.
    """
    (source, index, *_), axes, rank = op.tensors, op.axes(), len(op.shapes[0])
    if not axes or not isinstance(index, fx.Node) or len(shape_of(index)) != 1:
        return None
    picks = op.node.target is aten.index_select.default
    adds = op.node.target is aten.index_add.default and _is_zero(source)
    rows: Label = "rows" if picks or adds else None
    kept = tuple(None if dim in axes else dim for dim in range(rank))
    listed = tuple(rows if dim in axes else dim for dim in range(rank))
    labels = [kept, (rows,), listed if len(op.tensors) == 3 and shape_of(op.tensors[2]) else ()]
    return Row(tuple(zip(op.tensors, labels, strict=False)), (listed if picks else kept,))


def looked_up(op: OperatorCall) -> Row | None:
    """Elements that indices name, `x[i, :, j]`, or write, `x[i, :, j] = values`.

    Dimensions without an index stay separate. Dimensions of the indices do, too, if elements are
    read, or added to zeros; that sum is partial. If the index has the numbers of the rows, as in
    `x[torch.arange(len(x)), j]`, each row is separate; a micro-batch counts its rows from 0.
    """
    source, indices = op.args["self"], op.args["indices"]
    values: Any = op.args.get("values")
    named = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in named.values()):
        return None
    shape, many = shape_of(source), max(len(shape_of(index)) for index in named.values())
    together: list[Label] = [f"index {dim}" for dim in range(many)]  # of indices, that broadcast
    start = min(named) if max(named) - min(named) < len(named) else 0
    kept = [dim for dim in range(len(shape)) if dim not in named]
    found = [*(d for d in kept if d < start), *together, *(d for d in kept if d >= start)]
    whole: list[Label] = [dim if dim in kept else None for dim in range(len(shape))]
    read = {
        index: _spread(index, tuple(together[many - len(shape_of(index)) :]))
        for index in named.values()
    }
    given = tuple(found[len(found) - len(shape_of(values)) :]) if values is not None else ()
    own = None
    for dim, index in named.items():
        place = _number_of_row(index, shape[dim])
        if place is None or [*named.values()].count(index) > 1:
            continue
        own_rows = [*whole]
        own_rows[dim] = together[place]
        pairs = (source, own_rows), (values, given)
        if any(_is_cut(op.at.get(x), y, together[place]) for x, y in pairs):
            own, whole = index, own_rows
    first = () if own is None else ((own, read.pop(own)),)
    operands: list[tuple[fx.Node, Labels]] = [(source, tuple(whole)), *read.items()]
    if values is None:
        return Row(tuple(operands), (tuple(found),), first=first)
    operands.append((values, _spread(values, given)))
    if own is None and not (op.args["accumulate"] and _is_zero(source)):
        operands = [(x, tuple(y if y in kept else None for y in ys)) for x, ys in operands]
    return Row(tuple(operands), (tuple(whole),), first=first)


def _is_cut(placed: Placements | None, labels: Sequence[Label], along: Label) -> bool:
    """Whether a value is cut in blocks of rows along a label."""
    return isinstance(placed, Shard) and placed.outer == 1 and labels[placed.dim] == along


def _number_of_row(node: fx.Node, rows: int) -> int | None:
    """The dim, counted from the end, along which `node` counts the rows; None: it does not."""
    shape = shape_of(node)
    while node.target in _SHOWN:
        if [size for size in shape_of(node) if size != 1] != [rows]:
            return None
        if node.meta["val"].dtype not in (torch.int64, torch.int32):
            return None  # which holds fewer numbers
        node = node.all_input_nodes[0]
    counts = {
        aten.arange.default: (rows,),
        aten.arange.start: (0, rows),
        aten.arange.start_step: (0, rows, 1),
    }
    counted = node.target in counts and node.args in (counts[node.target], (0, rows))
    return shape.index(rows) - len(shape) if counted else None


def overwritten(op: OperatorCall) -> Row:
    """Rule for a tensor in which another one replaces a slice, or one place along a dimension."""
    target, part = (shape_of(x) for x in op.tensors)
    axes = set() if part == target else op.axes()
    kept = tuple(None if dim in axes else dim for dim in range(len(target)))
    placed = kept if len(part) == len(target) else tuple(dim for dim in kept if dim is not None)
    return Row(((op.tensors[0], kept), (op.tensors[1], placed)), (kept,))


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and bool(node.args[1] == 0)


def reduction(*, adds: bool = False, mean: bool = False) -> Rule:
    """Over other dimensions each row has its own; sums and means over rows are partial."""

    def rule(op: OperatorCall) -> Row:
        (source,), axes = op.sources, op.axes()
        dims: Labels = tuple(range(len(shape_of(source))))
        left = tuple(None if dim in axes else dim for dim in dims)
        keep = len(op.shapes[0]) == len(dims)
        result = left if keep else tuple(dim for dim in dims if dim not in axes)
        labels = dims if adds else left
        results = (result,) * len(op.shapes)
        return Row(((source, labels),), results, mean=frozenset({0} if mean else ()))

    return rule


def view(op: OperatorCall) -> Row | None:
    """A view keeps the order of elements: rows follow after the same number of repetitions."""
    (source,), sizes, placed = op.sources, op.shapes[0], op.at[op.sources[0]]
    if not isinstance(placed, Shard) or 0 in sizes:
        return None
    repetitions = math.prod(shape_of(source)[: placed.dim]) * placed.outer
    places = []
    for dim, size in enumerate(sizes):
        outer, rest = divmod(repetitions, math.prod(sizes[:dim]))
        if rest == 0 < outer and size % outer == 0 and size // outer % op.n == 0:
            places.append(Shard(dim, outer))
    if not places:
        return None
    block = min(places, key=lambda shard: shard.outer)
    labels = tuple("v" if dim == placed.dim else None for dim in range(len(shape_of(source))))
    result = tuple("v" if dim == block.dim else None for dim in range(len(sizes)))
    return Row(((source, labels),), (result,), sizes="size", outer=block.outer)


def layer_norm(op: OperatorCall) -> Row | None:
    own = "." * len(op.args["normalized_shape"])
    if op.node.target is aten.native_layer_norm.default:
        return pattern(f"*{own} {own} {own} -> *{own} *{own} *{own}")(op)
    return pattern(f"*{own} *{own} *{own} *{own} {own} {own} -> *{own} {own} {own}")(op)


def batch_norm(op: OperatorCall) -> Row | None:
    """Training takes each micro-batch's own statistics; running ones are averaged."""
    if _among_channels(op):
        return pattern(f"nc~ c c c c -> nc~ {'c c' if op.args['training'] else 'E E'} c c")(op)
    if not op.args["training"]:
        return None
    if math.prod(op.shapes[0]) == op.n * op.shapes[0][1]:
        raise CompileError(
            "batch norm in training needs more than one value per channel in each micro-batch",
            node=op.node,
            hint="take fewer micro_batches, or a larger batch",
        )
    return pattern("n.~ . . . . -> n.~ E E ./ ./")(op)


def batch_norm_in_eval(op: OperatorCall) -> Row | None:
    if _among_channels(op):
        return pattern("nc~ c c c c -> nc~ E E")(op)
    return pattern("n.~ . . . . -> n.~ E E")(op)


def batch_norm_of_batch(op: OperatorCall) -> Row | None:
    """By statistics of the batch in eval mode, too, so that only channels are apart."""
    return pattern("nc~ c c -> nc~ c c")(op) if _among_channels(op) else None


def batch_norm_backward(op: OperatorCall) -> Row | None:
    if not _among_channels(op):
        return pattern("n.~ n.~ . . . E E -> n.~ . .")(op)
    own = "c c" if op.args["train"] else "E E"
    return pattern(f"nc~ nc~ c c c {own} -> nc~ c c")(op)


def _among_channels(op: OperatorCall) -> bool:
    """Whether the rows are cut in dim 1, where each place has its own statistics.

    Instance norm is a batch norm whose channels are those of all rows.
    """
    placed = op.at[op.args["input"]]
    return isinstance(placed, Shard) and placed.dim == 1


def embedding_backward(op: OperatorCall) -> Row | None:
    return None if op.args["scale_grad_by_freq"] else pattern("*. * -> ..")(op)


def nll(op: OperatorCall) -> Row | None:
    """A mean divides by the weight of all targets, so `PrepareBatch` takes sums instead."""
    if op.args["reduction"] == MEAN:
        return None
    return pattern(f"n.~ n~ . -> {'n~' if op.args['reduction'] == NONE else '-'} -")(op)


def nll_backward(op: OperatorCall) -> Row | None:
    return pattern(f"{'n~' if op.args['reduction'] == NONE else '-'} n.~ n~ . - -> n.~")(op)


def loss(op: OperatorCall) -> Row:
    """Element by element, then a sum or a mean, which has no dimensions."""
    mean = op.args["reduction"] == MEAN
    return replace(elementwise(op), mean=frozenset({0} if mean else ()))


def loss_backward(op: OperatorCall) -> Row:
    """The gradient of a mean divides by the number of elements, here of a micro-batch."""
    return replace(elementwise(op), too_large=op.args["reduction"] == MEAN)


def paired(text: str) -> Rule:
    """The rule of a pattern whose operands have as many dimensions as the first."""

    def rule(op: OperatorCall) -> Row | None:
        ranks = {len(shape_of(x)) for x in op.tensors[:2]}
        return pattern(text)(op) if len(ranks) == 1 else None

    return rule


def of_rank(rank: int, text: str, sizes: str = "") -> Rule:
    """The rule of a pattern for a batch; without one, channels are where rows would be."""
    return lambda op: pattern(text, sizes)(op) if len(shape_of(op.sources[0])) == rank else None


def trilinear(op: OperatorCall) -> Row:
    """Three tensors that get more dimensions, their product, and the sum over some of them."""
    read, summed = [], op.args["sumdim"]
    rank = len(shape_of(op.args["i1"])) + len(op.args["expand1"])
    for name, more in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        own = tuple(dim for dim in range(rank) if dim not in op.args[more])
        read.append((op.args[name], _spread(op.args[name], own)))
    return Row(tuple(read), (tuple(dim for dim in range(rank) if dim not in summed),))


_ELEMENTWISE = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc
    erfinv exp exp2 expm1 floor frac i0 isinf isnan isneginf isposinf lgamma log log10 log1p log2
    logical_not mish nan_to_num neg rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit
    silu sin sinc sinh softplus special_entr special_erfcx special_log_ndtr special_ndtri sqrt tan
    tanh trunc alias clone detach copy fill.Scalar _to_copy lift_fresh_copy zeros_like ones_like
    full_like empty_like rand_like randn_like bernoulli bernoulli.p native_dropout celu elu gelu
    hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward logit polygamma
    round.decimals softshrink threshold add.Tensor add.Scalar atan2 bitwise_and.Tensor
    bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
    clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor copysign.Tensor
    div.Tensor div.Scalar div.Tensor_mode eq.Tensor eq.Scalar floor_divide fmax fmin fmod.Tensor
    fmod.Scalar ge.Tensor ge.Scalar gt.Tensor gt.Scalar heaviside hypot le.Tensor le.Scalar
    logaddexp logaddexp2 logical_and logical_or logical_xor lt.Tensor lt.Scalar maximum minimum
    mul.Tensor mul.Scalar ne.Tensor ne.Scalar pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar
    remainder.Tensor remainder.Scalar rsub.Scalar sub.Tensor sub.Scalar xlogy.Tensor special_xlog1py
    addcdiv addcmul lerp.Scalar lerp.Tensor masked_fill.Scalar masked_fill.Tensor where.self
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward native_dropout_backward sigmoid_backward
    silu_backward mish_backward softplus_backward softshrink_backward hardshrink_backward
    tanh_backward threshold_backward zero fill.Tensor rsub.Tensor _prelu_kernel
    _prelu_kernel_backward ldexp.Tensor nextafter igamma igammac special_i0e special_i1 special_i1e
    special_zeta complex polar _conj
"""

_TABLE: list[tuple[Rule, str]] = [
    (elementwise, _ELEMENTWISE),
    (view, "view _unsafe_view"),
    (moved(lambda op, dims: [*reversed(dims)]), "t"),
    (moved(_transpose), "transpose.int"),
    (moved(lambda op, dims: [dims[d] for d in op.args["dims"]]), "permute"),
    (moved(_insert), "unsqueeze stack"),
    (moved(_insert, sizes="input_sizes"), "select_backward"),
    (moved(_squeeze), "squeeze squeeze.dim squeeze.dims"),
    (moved(_expand, sizes="size"), "expand"),
    (moved(_repeat), "repeat"),
    (moved(_diagonal), "diagonal"),
    (moved(_onto_diagonal, sizes="input_sizes"), "diagonal_backward"),
    (moved(_onto_diagonal), "diag_embed"),
    (moved(_windows), "unfold"),
    (moved(_from_windows, sizes="input_sizes"), "unfold_backward"),
    (moved(lambda op, dims: [*dims, None]), "view_as_real"),
    (moved(lambda op, dims: [*dims[:-1]]), "view_as_complex"),
    (moved(lambda op, dims: [d for d in dims if d not in op.axes()]), "select.int unbind.int"),
    (except_axes(_sliced), "slice.Tensor"),
    (except_axes(OperatorCall.axes, sizes="input_sizes"), "slice_backward"),
    (except_axes(lambda op: op.axes("dims")), "flip roll"),
    (except_axes(_padded), "constant_pad_nd"),
    (except_axes(lambda op: {len(op.shapes[0]) - 1, len(op.shapes[0]) - 2}), "tril triu"),
    (
        except_axes(OperatorCall.axes),
        """cat split.Tensor split_with_sizes cumsum cumprod logcumsumexp sort sort.stable
        topk glu glu_backward gather scatter.src scatter.value scatter_add
        _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data
        unsafe_split.Tensor cummax cummin linalg_cross _fft_c2c _fft_r2c _fft_c2r""",
    ),
    (indexed, "index_select index_add index_copy index_fill.int_Scalar index_fill.int_Tensor"),
    (looked_up, "index.Tensor _unsafe_index.Tensor index_put _unsafe_index_put"),
    (overwritten, "slice_scatter select_scatter"),
    (reduction(adds=True), "sum sum.dim_IntList nansum count_nonzero.dim_IntList"),
    (reduction(adds=True, mean=True), "mean mean.dim"),
    (
        reduction(),
        """amax amin any.dim any.dims all.dim all.dims argmax argmin prod.dim_int var.correction
        std.correction logsumexp max.dim min.dim linalg_vector_norm median.dim nanmedian.dim
        mode kthvalue aminmax var_mean.correction std_mean.correction norm.ScalarOpt_dim""",
    ),
    (pattern("ij jk -> ik"), "mm"),
    (pattern("bij bjk -> bik"), "bmm"),
    (pattern("ik i. .k -> ik"), "addmm"),  # along j the bias would be added n times
    (pattern("bik bi. b.k -> bik"), "baddbmm"),
    (pattern("ik .i. ..k -> ik"), "addbmm"),
    (pattern("i i -> -"), "dot vdot"),
    (trilinear, "_trilinear"),
    (paired("*i. *j. -> *ij"), "_cdist_forward"),
    (pattern("*ij *i. *j. *ij -> *i."), "_cdist_backward"),
    (pattern("*.. -> *.. *"), "linalg_inv_ex linalg_cholesky_ex"),
    (pattern("*.. -> *.. *.."), "linalg_qr"),
    (pattern("*.. -> *. *.."), "_linalg_eigh"),
    (pattern("*.. -> *.. *. *.."), "_linalg_svd"),
    (paired("*.. *.. -> *.."), "linalg_solve_triangular"),
    (pattern("* . -> *"), "bucketize.Tensor"),
    (pattern(".. * -> *."), "embedding"),
    (embedding_backward, "embedding_dense_backward"),
    (layer_norm, "native_layer_norm native_layer_norm_backward"),
    (pattern("n.~ . . -> n.~ n. n.", count="N"), "native_group_norm"),
    (pattern("n.~ n.~ n. n. . -> n.~ . .", count="N"), "native_group_norm_backward"),
    (batch_norm, "_native_batch_norm_legit_functional"),
    (batch_norm_in_eval, "_native_batch_norm_legit_no_training"),
    (batch_norm_of_batch, "_native_batch_norm_legit.no_stats"),
    (batch_norm_backward, "native_batch_norm_backward"),
    (pattern("n.~ ~ ~ -> n.~"), "convolution"),
    (pattern("n.~ n.~ ~ -> n.~ ~ ~"), "convolution_backward"),
    (
        pattern("n~ -> n~"),
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_bilinear2d",
    ),
    (
        pattern("n~ n~ -> n~"),
        "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward",
    ),
    (
        pattern("n~ -> n~", sizes="input_size"),
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "upsample_bilinear2d_backward",
    ),
    (pattern("n~ -> n~"), "_adaptive_avg_pool3d _upsample_bilinear2d_aa"),
    (pattern("n~ n~ -> n~"), "_adaptive_avg_pool3d_backward grid_sampler_2d grid_sampler_3d"),
    (pattern("n~ n~ n~ -> n~ n~"), "grid_sampler_2d_backward grid_sampler_3d_backward"),
    (pattern("n~ n~ n~ -> n~"), "adaptive_max_pool2d_backward adaptive_max_pool3d_backward"),
    (pattern("n~ -> n~", sizes="input_size"), "_upsample_bilinear2d_aa_backward"),
    (pattern("*. -> *."), "reflection_pad1d replication_pad1d"),
    (pattern("*.. -> *.."), "reflection_pad2d replication_pad2d"),
    (pattern("*... -> *..."), "reflection_pad3d replication_pad3d"),
    (pattern("*. *. -> *."), "reflection_pad1d_backward replication_pad1d_backward"),
    (pattern("*.. *.. -> *.."), "reflection_pad2d_backward replication_pad2d_backward"),
    (pattern("*... *... -> *..."), "reflection_pad3d_backward replication_pad3d_backward"),
    (of_rank(4, "n~ -> n~"), "im2col"),
    (of_rank(3, "n~ -> n~"), "col2im"),
    (pattern("n.~ -> n.~"), "channel_shuffle"),
    (
        pattern("n~ -> n~ n~"),
        """max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
        adaptive_max_pool3d""",
    ),
    (
        pattern("n~ n~ n~ -> n~"),
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    ),
    (
        pattern("bh.. bh.. bh.. bh.. -> bh.. bh."),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    (
        pattern("bh.. bh.. bh.. bh.. bh.. bh. bh.. -> bh.. bh.. bh.."),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    (nll, "nll_loss_forward nll_loss2d_forward"),
    (nll_backward, "nll_loss_backward nll_loss2d_backward"),
    (
        loss,
        """mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
        binary_cross_entropy_with_logits""",
    ),
    (
        loss_backward,
        """mse_loss_backward smooth_l1_loss_backward huber_loss_backward
        binary_cross_entropy_backward soft_margin_loss_backward""",
    ),
]
_LINEAR = """
    alias clone detach neg add.Tensor sub.Tensor view _unsafe_view t transpose.int permute unsqueeze
    squeeze squeeze.dim squeeze.dims expand select.int slice.Tensor
"""


def _overloads(names: str) -> list[Any]:
    pairs = (name.partition(".") for name in names.split())
    return [getattr(getattr(aten, packet), name or "default") for packet, _, name in pairs]


_RECURRENT: dict[object, Rule] = {
    lstm: pattern(".n. n. n. .. .. . . .. n -> .n. n. n. .n. .n."),
    lstm_backward: pattern(".n. n. n. .n. n. n. .. .. .. n .n. .n. .n. -> .n. n. n. .. .. . .."),
    gru: pattern(".n. n. .. .. . . n -> .n. n. .n."),
    gru_backward: pattern(".n. n. .n. n. .. .. n .n. .n. -> .n. n. .. .. . ."),
    rnn: pattern(".n. n. .. .. . . n -> .n. n."),
    rnn_backward: pattern(".n. n. .n. n. .. .. n .n. -> .n. n. .. .. ."),
}
RULES: dict[object, Rule] = {
    **{op: rule for rule, names in _TABLE for op in _overloads(names)},
    **_RECURRENT,
    print_tensor_op: elementwise,
}
LINEAR: frozenset[object] = frozenset(_overloads(_LINEAR))
# These run before the micro-batches if they read only integers and masks made of inputs, such as a
# lookup of a padding mask for each row. Else they run after them, unless the table splits them.
REPLICATED: frozenset[object] = frozenset(_overloads("index.Tensor index_put median prod"))


def is_linear(node: fx.Node) -> bool:
    """Whether a sum of results is the result on sums, given that all of its tensors are such sums.

    `x + 1` is not: it would add n times.
    """
    target: Any = node.target
    if target is aten._to_copy.default:  # to a type that has every value of the other
        old, new = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
        return bool(old.is_floating_point and torch.promote_types(old, new) == new)
    if target not in LINEAR:
        return False
    args = dict(zip((a.name for a in schema_of(target).arguments), node.args, strict=False))
    return isinstance(args.get("other", node), fx.Node)
