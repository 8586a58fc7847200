"""Draw arguments for each operator of the table of micro-batches."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[list[Any], dict[str, Any]]
INTEGER = ("bitwise",)
SAME = ("backward", "log_sigmoid", "native_dropout", "bernoulli")  # tensors of one shape
NONE, MEAN, SUM = 0, 1, 2


class Draw:
    """Random sizes and tensors; sizes repeat often, so that a wrong dimension may fit."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self) -> int:
        return self.rng.choice((2, 4, 4, 6))

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return [self.size() for _ in range(self.rng.randint(least, most))]

    def float(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def int(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def bool(self, *shape: int) -> Tensor:
        return self.int(2, *shape).bool()

    def dim(self, tensor: Tensor) -> int:
        return self.rng.randrange(-tensor.dim(), tensor.dim())

    def dims(self, tensor: Tensor) -> list[int]:
        return self.rng.sample(range(tensor.dim()), self.rng.randint(1, tensor.dim()))

    def flag(self) -> bool:
        return self.rng.random() < 0.5

    def tensor(self) -> Tensor:
        return self.float(*self.shape())

    def narrower(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to another."""
        start = self.rng.randint(0, len(shape) - 1)
        return [1 if self.rng.random() < 0.3 else size for size in shape[start:]]


def pointwise(draw: Draw, name: str, schema: Any) -> Arguments:
    """Arguments of an operator whose tensors broadcast, from its schema."""
    shape = draw.shape()
    same = any(word in name for word in SAME)
    tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
    full = 0 if same or name.startswith("copy") else draw.rng.randrange(len(tensors))
    args: list[Any] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            continue
        if argument in tensors:
            whole = same or tensors.index(argument) == full
            size = shape if whole else draw.narrower(shape)
            boolean = argument.name in ("mask", "condition")
            if any(word in name for word in INTEGER):
                args.append(draw.int(8, *size))
            else:
                args.append(draw.bool(*size) if boolean else draw.float(*size))
        elif kind in ("number", "Scalar"):
            args.append(2)
        elif argument.has_default_value():
            break
        else:
            args.append({"int": 1, "bool": True, "float": 0.5, "Optional[bool]": True}[kind])
    if name == "polygamma":
        args = [1, draw.tensor()]
    if name.startswith("bernoulli"):
        args = [torch.ones(shape).double(), 1.0][: len(args)]  # always drawn
    if name == "native_dropout":
        args = [args[0], 0.0, True]
    if name == "log_sigmoid_backward":
        args = [args[0], args[1], args[1].abs().neg().exp()]
    return args, {}


def _narrowing(*shapes: int) -> Callable[["Draw"], Arguments]:
    """Tensors that broadcast, one of which has the whole shape."""

    def make(d: Draw) -> Arguments:
        shape = d.shape()
        return [d.float(*shape), *(d.float(*d.narrower(shape)) for _ in shapes)], {}

    return make


def _view(d: Draw) -> Arguments:
    x = d.tensor()
    sizes = list(x.shape)
    i = d.rng.randrange(len(sizes))
    if len(sizes) > 1 and d.flag():
        i = min(i, len(sizes) - 2)
        sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
    else:
        sizes[i : i + 1] = [2, sizes[i] // 2]
    return [x, sizes], {}


def _with_dim(*more: Any) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.tensor()
        return [x, d.dim(x), *more], {}

    return make


def _reduced(*, many: bool = True, **kwargs: Any) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.tensor()
        return [x, d.dims(x) if many else d.dim(x), d.flag()], kwargs

    return make


def _list(d: Draw) -> Arguments:
    x = d.tensor()
    return [[x, d.float(*x.shape), d.float(*x.shape)], d.dim(x)], {}


def _scatter(*more: Any, source: bool = True) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(*d.shape(2, 3))
        dim = d.dim(x)
        shape = [max(2, s - 2) if d.rng.random() < 0.2 else s for s in x.shape]
        index = d.int(x.shape[dim], *shape)
        return [x, dim, index, *([d.float(*shape)] if source else []), *more], {}

    return make


def _indexed(d: Draw, *, source: bool) -> list[Any]:
    x = d.float(*d.shape(1, 3))
    dim = d.dim(x)
    index = d.int(x.shape[dim], d.size())
    if not source:
        return [x, dim, index]
    shape = [len(index) if i == dim % x.dim() else size for i, size in enumerate(x.shape)]
    return [x, dim, index, d.float(*shape)]


def _index_copy(d: Draw) -> Arguments:
    """Each row once: PyTorch does not say which of several it takes."""
    x = d.float(*d.shape(1, 3))
    dim = d.dim(x)
    index = torch.randperm(x.shape[dim], generator=d.generator)
    return [x, dim, index, d.float(*x.shape)], {}


def _gradient(d: Draw) -> Arguments:
    x = d.tensor()
    out = x.softmax(dim := d.dim(x))
    return [d.float(*x.shape), out, dim, torch.float64], {}


def _product(*, bias: bool, batch: bool) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        b = [d.size()] if batch else []
        i, j, k = d.size(), d.size(), d.size()
        first = [d.float(*d.narrower([*b, i, k]))] if bias else []
        return [*first, d.float(*b, i, j), d.float(*b, j, k)], {}

    return make


def _embedding(d: Draw) -> Arguments:
    return [d.float(5, d.size()), d.int(5, *d.shape(1, 2)), d.rng.choice((-1, 0))], {}


def _embedding_backward(d: Draw) -> Arguments:
    index = d.int(5, *d.shape(1, 2))
    return [d.float(*index.shape, d.size()), index, 5, d.rng.choice((-1, 0)), False], {}


def _layer_norm(d: Draw) -> Arguments:
    x = d.float(*d.shape(2, 3))
    own = list(x.shape[d.rng.randint(1, x.dim() - 1) :])
    return [x, own, d.float(*own), d.float(*own), 1e-5], {}


def _group_norm(d: Draw) -> Arguments:
    x = d.float(d.size(), 4, *d.shape(1, 2))
    space = x[0, 0].numel()
    return [x, d.float(4), d.float(4), x.shape[0], 4, space, d.rng.choice((1, 2)), 1e-5], {}


def _group_norm_backward(d: Draw) -> Arguments:
    (x, weight, _, *sizes, _), _ = _group_norm(d)
    statistics = [d.float(x.shape[0], sizes[-1]) for _ in range(2)]
    return [d.float(*x.shape), x, *statistics, weight, *sizes, [True] * 3], {}


def _batch_norm(d: Draw) -> Arguments:
    x = d.float(4, d.size(), *d.shape(1, 2))
    return [x, *(d.float(x.shape[1]) for _ in range(4))], {}


def _convolution(d: Draw) -> Arguments:
    n = d.rng.choice((1, 2))
    x, kernel = d.float(d.size(), 4, *[6] * n), [3] * n
    transposed = d.flag()
    w = d.float(4, 4, *kernel)
    return [x, w, d.float(4), [1] * n, [0] * n, [1] * n, transposed, [0] * n, 1], {}


def _pool(*more: Any, n: int = 2) -> Callable[[Draw], Arguments]:
    return lambda d: ([d.float(d.size(), 2, *[4] * n), *more], {})


def _attention(d: Draw) -> Arguments:
    batch, heads, length, width = d.size(), d.size(), d.size(), 4
    qkv = [d.float(batch, heads, length, width) for _ in range(3)]
    sizes = [batch, heads, length, length] if d.flag() else [1, 1, length, length]
    mask = d.float(*(1 if d.rng.random() < 0.3 else size for size in sizes))
    mask = mask if d.flag() else d.float(length, length)
    kwargs = {"attn_mask": mask} if d.flag() else {}
    return [*qkv, 0.0, False], kwargs


def _nll(space: int) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(d.size(), 4, *[2] * space)
        target = d.int(4, x.shape[0], *x.shape[2:])
        weight = d.float(4) if d.flag() else None
        return [x, target, weight, d.rng.choice((NONE, MEAN, SUM)), 1], {}

    return make


def _nll_backward(space: int) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        (x, target, weight, over, ignored), _ = _nll(space)(d)
        gradient = d.float(*target.shape) if over == NONE else d.float()
        return [gradient, x, target, weight, over, ignored, d.float()], {}

    return make


def _batch_norm_backward(d: Draw) -> Arguments:
    """In eval mode, where nothing depends on a micro-batch's statistics."""
    (x, weight, _, mean, variance), _ = _batch_norm(d)
    own = [torch.empty(0).double(), torch.empty(0).double()]
    return [d.float(*x.shape), x, weight, mean, variance, *own, False, 1e-5, [True] * 3], {}


def _loss(*, weight: bool = False, more: tuple[Any, ...] = ()) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.tensor()
        weights = [d.float(*x.shape) if d.flag() else None] if weight else []
        return [x, d.float(*x.shape), *weights, d.rng.choice((NONE, MEAN, SUM)), *more], {}

    return make


def _looked_up(d: Draw) -> list[Any]:
    """One or two indices, with a dimension of its own each, among dimensions without."""
    x = d.float(*d.shape(2, 4))
    dims = d.rng.sample(range(x.dim()), d.rng.choice((1, 2)))
    shape = d.shape(1, 2)
    indices = [
        d.int(x.shape[dim], *(shape if dim == dims[0] else d.narrower(shape)))
        if dim in dims
        else None
        for dim in range(x.dim())
    ]
    return [x, indices[: max(dims) + 1]]


def _put(d: Draw) -> Arguments:
    """Elements that are written once, or added to nothing, or to what is there."""
    x, indices = _looked_up(d)
    values = torch.ops.aten.index.Tensor(x, indices)
    values = d.float(*d.narrower([*values.shape]))
    if d.flag():
        return [x, indices, values, True], {}
    return [x, indices, values[(0,) * values.dim()].clone()], {}


def _square(*, definite: bool = False) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(*d.shape(1, 2), 3, 3)
        return [x @ x.mT + torch.eye(3) if definite else x + 3 * torch.eye(3).double()], {}

    return make


def _solved(d: Draw) -> Arguments:
    (x,), _ = _square()(d)
    return [x.triu(), d.float(*x.shape[:-1], 2)], {"upper": True}


def _trilinear(d: Draw) -> Arguments:
    rows, a, b = d.size(), d.size(), d.size()
    tensors = [d.float(rows, a), d.float(d.size(), a, b), d.float(rows, b)]
    return [*tensors, [1, 3], [0], [1, 2], [2, 3]], {}


def _distances(d: Draw) -> Arguments:
    batch, width = [d.size()] if d.flag() else [], d.size()
    return [d.float(*batch, d.size(), width), d.float(*batch, d.size(), width), 2.0, None], {}


def _grid(space: int) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(d.size(), 2, *[4] * space)
        return [x, d.float(x.shape[0], *[3] * space, space), 0, 0, False], {}

    return make


def _edge(space: int) -> Callable[[Draw], Arguments]:
    return lambda d: ([d.float(*d.shape(1, 2), *[4] * space), [1, 2] * space], {})


def _complex(d: Draw, *shape: int) -> Tensor:
    return torch.complex(d.float(*shape), d.float(*shape))


def _one(*make_more: Callable[[Draw, Tensor], Any], least: int = 1) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(*d.shape(least, 3))
        return [x, *(more(d, x) for more in make_more)], {}

    return make


def _glu(d: Draw) -> Arguments:
    x = d.tensor()
    return [x, d.dim(x)], {}


def _squeezable(*, many: bool | None) -> Callable[[Draw], Arguments]:
    def make(d: Draw) -> Arguments:
        x = d.float(*(1 if d.rng.random() < 0.3 else 2 if d.flag() else s for s in [4] * 3))
        return [x, *([] if many is None else [d.dims(x) if many else d.dim(x)])], {}

    return make


def _expand(d: Draw) -> Arguments:
    shape = d.shape()
    x = d.float(*d.narrower(shape))
    return [x, shape], {}


def _slice(d: Draw) -> Arguments:
    x = d.tensor()
    dim = d.dim(x)
    return [x, dim, *d.rng.choice(((0, 1), (1, 2**63 - 1), (0, 2**63 - 1), (-1, 9)))], {}


def _select_backward(d: Draw) -> Arguments:
    shape = d.shape(2, 3)
    dim = d.rng.randrange(len(shape))
    return [d.float(*shape[:dim], *shape[dim + 1 :]), shape, dim, 1], {}


def _slice_backward(d: Draw) -> Arguments:
    shape = d.shape(2, 3)
    dim = d.rng.randrange(len(shape))
    part = [*shape[:dim], 1, *shape[dim + 1 :]]
    return [d.float(*part), shape, dim, 1, 2, 1], {}


def _select_scatter(d: Draw) -> Arguments:
    (part, shape, dim, index), _ = _select_backward(d)
    return [d.float(*shape), part, dim, index], {}


def _slice_scatter(d: Draw) -> Arguments:
    (part, shape, dim, *_), _ = _slice_backward(d)
    x = d.float(*shape)
    return [x, part, dim, 1, 2] if d.flag() else [x, d.float(*shape), dim], {}


def _recurrent(gates: int, states: int = 1, *end: Any) -> Callable[[Draw], Arguments]:
    """One layer; sequences sometimes have lengths, layers sometimes have no biases."""

    def make(d: Draw) -> Arguments:
        steps, batch, inputs, cells = d.size(), d.size(), d.size(), d.size()
        rows = gates * cells
        biased, has_lengths = d.flag(), d.flag()
        projected = gates == 4 and d.flag()
        outputs = 2 if projected else cells
        return [
            d.float(steps, batch, inputs),
            d.float(batch, outputs),
            *(d.float(batch, cells) for _ in range(states - 1)),
            d.float(rows, inputs),
            d.float(rows, outputs),
            *(d.float(rows) if biased else None for _ in range(2)),
            *([d.float(outputs, cells) if projected else None] if gates == 4 else []),
            d.int(steps, batch) + 1 if has_lengths else None,
            *end,
            d.flag(),
            *([True] if gates > 1 else []),
        ], {}

    return make


CALLS: dict[str, Callable[[Draw], Arguments]] = {
    "ipu::lstm": _recurrent(4, 2),
    "ipu::gru": _recurrent(3),
    "ipu::rnn": _recurrent(1, 1, "tanh"),
    "ipu::print_tensor": lambda d: (
        [d.tensor(), "x", False, 1000, 3, 75, 4, "auto", " ", "[", "]"],
        {},
    ),
    "_to_copy": lambda d: ([d.tensor()], {"dtype": torch.float32} if d.flag() else {}),
    "round.decimals": lambda d: ([d.tensor()], {"decimals": 1}),
    "div.Tensor_mode": lambda d: (_narrowing(1)(d)[0], {"rounding_mode": "floor"}),
    "clamp": _one(lambda d, x: 0.3, lambda d, x: 0.6),
    "clamp.Tensor": _narrowing(1, 2),
    "masked_fill.Tensor": _one(lambda d, x: d.bool(*x.shape), lambda d, x: d.float()),
    "view": _view,
    "_unsafe_view": _view,
    "t": lambda d: ([d.float(*d.shape(2, 2))], {}),
    "transpose.int": _one(lambda d, x: d.dim(x), lambda d, x: d.dim(x)),
    "permute": _one(lambda d, x: d.rng.sample(range(x.dim()), x.dim())),
    "unsqueeze": _one(lambda d, x: d.rng.randint(0, x.dim())),
    "stack": _list,
    "cat": _list,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "squeeze": _squeezable(many=None),
    "squeeze.dim": _squeezable(many=False),
    "squeeze.dims": _squeezable(many=True),
    "expand": _expand,
    "select.int": _one(lambda d, x: d.dim(x), lambda d, x: 1, least=2),
    "unbind.int": _one(lambda d, x: d.dim(x), least=2),
    "slice.Tensor": _slice,
    "flip": _one(lambda d, x: d.dims(x), least=2),
    "roll": _one(lambda d, x: [1], lambda d, x: [d.dim(x)], least=2),
    "constant_pad_nd": _one(lambda d, x: [1, d.rng.randint(0, 1)], lambda d, x: 2.0, least=2),
    "tril": lambda d: ([d.float(*d.shape(3, 3))], {}),
    "triu": lambda d: ([d.float(*d.shape(3, 3)), 1], {}),
    "split.Tensor": _one(lambda d, x: 1, lambda d, x: d.dim(x), least=2),
    "split_with_sizes": lambda d: ([d.float(d.size(), 4, d.size()), [1, 3], 1], {}),
    "sort.stable": lambda d: ([x := d.tensor()], {"stable": True, "dim": d.dim(x)}),
    "topk": lambda d: ([x := d.float(*d.shape(2, 3)), 1, d.dim(x)], {}),
    "glu": _glu,
    "glu_backward": lambda d: (
        [d.float(*(s // 2 if i == 0 else s for i, s in enumerate(x.shape))), x, 0]
        if (x := d.float(*d.shape(2, 3))) is not None
        else [],
        {},
    ),
    "gather": lambda d: ((a := _scatter(source=False)(d))[0], a[1]),
    "scatter.src": _scatter(),
    "scatter.value": _scatter(2.0, source=False),
    "scatter_add": _scatter(),
    "index_select": lambda d: (_indexed(d, source=False), {}),
    "index_add": lambda d: (_indexed(d, source=True), {"alpha": 2} if d.flag() else {}),
    "index_copy": _index_copy,
    "index_fill.int_Scalar": lambda d: ([*_indexed(d, source=False), 2.0], {}),
    "index_fill.int_Tensor": lambda d: ([*_indexed(d, source=False), d.float()], {}),
    "_softmax_backward_data": _gradient,
    "_log_softmax_backward_data": _gradient,
    "_softmax": _with_dim(False),
    "_log_softmax": _with_dim(False),
    "sum": _one(),
    "mean": _one(),
    "argmax": _reduced(many=False),
    "argmin": _reduced(many=False),
    "any.dim": _reduced(many=False),
    "all.dim": _reduced(many=False),
    "prod.dim_int": _reduced(many=False),
    "max.dim": _reduced(many=False),
    "min.dim": _reduced(many=False),
    "linalg_vector_norm": _one(lambda d, x: 2, lambda d, x: d.dims(x), lambda d, x: d.flag()),
    "var.correction": _one(lambda d, x: d.dims(x)),
    "std.correction": _one(lambda d, x: d.dims(x)),
    "mm": _product(bias=False, batch=False),
    "bmm": _product(bias=False, batch=True),
    "addmm": _product(bias=True, batch=False),
    "baddbmm": _product(bias=True, batch=True),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_native_batch_norm_legit_no_training": lambda d: ([*_batch_norm(d)[0], 0.1, 1e-5], {}),
    "_native_batch_norm_legit_functional": lambda d: ([*_batch_norm(d)[0], True, 0.1, 1e-5], {}),
    "convolution": _convolution,
    "avg_pool2d": _pool([2, 2]),
    "avg_pool3d": _pool([2, 2, 2], n=3),
    "_adaptive_avg_pool2d": _pool([2, 2]),
    "upsample_nearest1d": _pool([8], n=1),
    "upsample_nearest2d": _pool([8, 8]),
    "upsample_nearest3d": _pool([8, 8, 8], n=3),
    "upsample_bilinear2d": _pool([8, 8], False),
    "max_pool2d_with_indices": _pool([2, 2]),
    "max_pool3d_with_indices": _pool([2, 2, 2], n=3),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "nll_loss_forward": _nll(0),
    "nll_loss2d_forward": _nll(2),
    "nll_loss_backward": _nll_backward(0),
    "nll_loss2d_backward": _nll_backward(2),
    "native_batch_norm_backward": _batch_norm_backward,
    "mse_loss": _loss(),
    "soft_margin_loss": _loss(),
    "soft_margin_loss_backward": lambda d: (
        [
            d.float() if (over := d.rng.choice((NONE, MEAN, SUM))) else d.float(4, 6),
            d.float(4, 6),
            d.float(4, 6),
            over,
        ],
        {},
    ),
    "binary_cross_entropy_with_logits": lambda d: (
        [
            x := d.tensor(),
            d.float(*x.shape),
            d.float(*d.narrower([*x.shape])) if d.flag() else None,
            d.float(x.shape[-1]) if d.flag() else None,
            d.rng.choice((NONE, MEAN, SUM)),
        ],
        {},
    ),
    "fill.Tensor": _one(lambda d, x: d.float()),
    "repeat": _one(lambda d, x: [2, 1, *(d.rng.choice((1, 2)) for _ in x.shape)]),
    "diagonal": _one(lambda d, x: 1, lambda d, x: 0, lambda d, x: -1, least=2),
    "diag_embed": _one(
        lambda d, x: 1, lambda d, x: d.rng.choice((0, 1)), lambda d, x: -1, least=2
    ),
    "unfold": _one(lambda d, x: d.dim(x), lambda d, x: 2, lambda d, x: 1),
    "view_as_real": lambda d: ([_complex(d, *d.shape())], {}),
    "view_as_complex": lambda d: ([d.float(*d.shape(), 2)], {}),
    "_conj": lambda d: ([_complex(d, *d.shape())], {}),
    "_fft_c2c": lambda d: ([x := _complex(d, *d.shape(2, 3)), [d.dim(x) % x.dim()], 0, True], {}),
    "_fft_r2c": _one(lambda d, x: [d.dim(x) % x.dim()], lambda d, x: 0, lambda d, x: True, least=2),
    "_fft_c2r": lambda d: ([_complex(d, d.size(), 4, 3), [2], 0, 4], {}),
    "unsafe_split.Tensor": _one(lambda d, x: 1, lambda d, x: d.dim(x), least=2),
    "linalg_cross": lambda d: (
        [x := d.float(d.size(), d.size(), 3), d.float(*x.shape)],
        {"dim": -1},
    ),
    "index.Tensor": lambda d: (_looked_up(d), {}),
    "_unsafe_index.Tensor": lambda d: (_looked_up(d), {}),
    "index_put": _put,
    "_unsafe_index_put": _put,
    "nansum": _reduced(),
    "count_nonzero.dim_IntList": _one(lambda d, x: d.dims(x)),
    "kthvalue": _one(lambda d, x: 2, lambda d, x: d.dim(x), lambda d, x: d.flag()),
    "aminmax": lambda d: ([x := d.tensor()], {"dim": d.dim(x), "keepdim": d.flag()}),
    "var_mean.correction": _one(lambda d, x: d.dims(x)),
    "std_mean.correction": _one(lambda d, x: d.dims(x)),
    "norm.ScalarOpt_dim": _one(lambda d, x: 2, lambda d, x: d.dims(x), lambda d, x: d.flag()),
    "addbmm": lambda d: ([d.float(4, 2), d.float(x := d.size(), 4, 6), d.float(x, 6, 2)], {}),
    "dot": lambda d: ([d.float(4), d.float(4)], {}),
    "vdot": lambda d: ([d.float(4), d.float(4)], {}),
    "_trilinear": _trilinear,
    "_cdist_forward": _distances,
    "linalg_inv_ex": _square(),
    "linalg_cholesky_ex": _square(definite=True),
    "linalg_qr": _square(),
    "_linalg_eigh": _square(definite=True),
    "_linalg_svd": _square(),
    "linalg_solve_triangular": _solved,
    "bucketize.Tensor": _one(lambda d, x: torch.tensor([0.2, 0.5, 0.7]).double()),
    "_native_batch_norm_legit.no_stats": lambda d: ([*_batch_norm(d)[0][:3], True, 0.1, 1e-5], {}),
    "_adaptive_avg_pool3d": _pool([2, 2, 2], n=3),
    "_upsample_bilinear2d_aa": _pool([8, 8], False),
    "adaptive_max_pool2d": _pool([2, 2]),
    "adaptive_max_pool3d": _pool([2, 2, 2], n=3),
    "grid_sampler_2d": _grid(2),
    "grid_sampler_3d": _grid(3),
    "im2col": _pool([2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda d: ([d.float(d.size(), 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]], {}),
    "channel_shuffle": lambda d: ([d.float(d.size(), 4, d.size(), 2), 2], {}),
    **{
        f"{kind}_pad{space}d": _edge(space)
        for kind in ("reflection", "replication")
        for space in (1, 2, 3)
    },
    "smooth_l1_loss": _loss(more=(0.3,)),
    "huber_loss": _loss(more=(0.3,)),
    "binary_cross_entropy": _loss(weight=True),
    **dict.fromkeys(
        (
            "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "_safe_softmax", "cummax",
            "cummin",
        ),
        _with_dim(),
    ),
    **dict.fromkeys(("median.dim", "nanmedian.dim", "mode"), _reduced(many=False)),
    **dict.fromkeys(
        (
            "sum.dim_IntList", "mean.dim", "amax", "amin", "any.dims", "all.dims", "logsumexp",
        ),
        _reduced(),
    ),
}  # fmt: skip
