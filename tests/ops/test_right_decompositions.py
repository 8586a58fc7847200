"""Compare the decompositions of PyTorch that traces use with the operators themselves."""

from copy import deepcopy
from itertools import product
from math import inf, nan

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ipu_dynamo
import ipu_dynamo.ops.operators
from ipu_dynamo.ops.private.native import AUTOGRAD, COMPOSITE

LABELS = (
    [[3, 0, -1, 1], [0, -1, 1, 2], [1, 2, 3, -1], [-1, 0, 0, 0]],
    [[0, 1, 2, 3]] * 4,
    [[-1] * 4] * 4,
    [[1, 1, -1, 0]] * 4,
)
EDGES = torch.tensor([[nan, inf, -inf, 0.0, -0.0], [0.5, -0.5, 0.50001, -0.50001, 1e-40]])
REDUCTIONS = ("none", "mean", "sum")
WEIGHT = torch.tensor([0.0, 1.0, -1.0, 2.0])


def multilabel_margin_loss():
    for reduction, labels in product(REDUCTIONS, LABELS):
        for x in (torch.randn(4, 4), torch.ones(4, 4), torch.tensor([[nan, 1, inf, 0]] * 4)):
            for y in (labels, labels[0]):
                rows = x if y is labels else x[0]
                yield F.multilabel_margin_loss, (rows, torch.tensor(y)), {"reduction": reduction}


def multi_margin_loss():
    tied = torch.tensor([[0.0, 1.0, 1.0, 2.0], [3.0, 0.25, -1.0, 0.0]])
    for p, margin, weight, reduction in product((1, 2), (1.0, -1.0), (None, WEIGHT), REDUCTIONS):
        options = {"p": p, "margin": margin, "weight": weight, "reduction": reduction}
        for x in (tied, torch.tensor([[nan, 1, inf, 0]])):
            yield F.multi_margin_loss, (x, torch.tensor([1, 2])[: len(x)]), options
        yield F.multi_margin_loss, (tied[0], torch.tensor(1)), options


def shrink():
    for dtype, bound in product((torch.float32, torch.bfloat16), (0.0, 0.5, 1.0)):
        yield F.softshrink, (EDGES.to(dtype), bound), {}
        yield F.hardshrink, (EDGES.to(dtype), bound), {}


def interpolate():
    modes = {1: "linear", 2: "bilinear bicubic", 3: "trilinear"}
    for dims, names in modes.items():
        for mode in (*names.split(), "nearest", "nearest-exact"):
            options = (
                {"mode": mode, "align_corners": False} if "nearest" not in mode else {"mode": mode}
            )
            for size in (1, 3, 8):
                yield F.interpolate, (torch.randn(2, 3, *(4, 5, 1)[:dims]), size), options
            for factor in (1.0, 1.3, 2.7):
                yield F.interpolate, (torch.randn(1, 2, *(4, 5, 1)[:dims]), None, factor), options
        for factor in (1.3, 2.3):  # sizes that stay, and that double
            x = torch.randn(1, 2, *(3, 2, 1)[:dims])
            yield F.interpolate, (x, None, factor), {"mode": "nearest"}
    picture = (torch.rand(2, 3, 5, 4) * 255).to(torch.uint8)
    holed = torch.tensor([[[[nan, 0.0, 1.0], [2.0, inf, 0.0]]]])
    for corners, size in product((False, True), ((3, 7), (10, 2), (2, 3))):
        options = {"mode": "bilinear", "align_corners": corners}
        yield F.interpolate, (picture, size), options
        yield F.interpolate, (holed, size), options
        for mode in ("bilinear", "bicubic"):
            yield F.interpolate, (torch.randn(1, 2, 5, 4), size), {"mode": mode, "antialias": True}


def dropout():
    for p, training in product((0.0, 0.3, 1.0), (True, False)):
        yield F.dropout, (torch.tensor([nan, inf, 1.0, 0.0]), p, training), {}
        yield F.dropout, (torch.randn(0, 3), p, training), {}


def products():
    shapes = [((3,), (3,)), ((2, 3), (3,)), ((3,), (4, 3, 2)), ((1, 4, 2, 3), (5, 1, 3, 2))]
    shapes += [((0,), (0,)), ((2, 0), (0, 3)), ((4, 2, 0), (0, 5)), ((0, 2, 3), (3, 5))]
    for left, right in shapes:
        yield torch.matmul, (torch.randn(left), torch.randn(right)), {}
    yield torch.matmul, (EDGES.expand(3, 2, 5), torch.zeros(5)), {}


def batch_norm():
    for training, momentum, shape in product((True, False), (0.1, 0.0, 1.0), ((4, 3), (1, 3, 2))):
        moments = {"running_mean": torch.randn(3), "running_var": torch.rand(3)}
        options = {"training": training, "momentum": momentum, "eps": 1e-5} | moments
        x = torch.randn(shape), torch.randn(3), torch.randn(3)
        yield torch.native_batch_norm, x, options


def splits():
    for places in (3, 0, -2), (1, 3), (3, 1), (-1,), (9,), ():
        sections = torch.tensor(places[0] if len(places) == 3 else places, dtype=torch.int64)
        yield torch.tensor_split, (torch.randn(5, 7), sections, 0), {}
    for parts in (1, 2, 3, 7):
        yield torch.unsafe_chunk, (torch.randn(5, 7), parts, -1), {}
    yield torch.broadcast_tensors, (torch.randn(0, 1), torch.randn(4)), {}


def one_hot():
    for labels, classes in (([0, 1, 2], -1), ([0, 1], 5), ([], 4), ([[0, 2], [1, 1]], 3)):
        yield F.one_hot, (torch.tensor(labels, dtype=torch.int64), classes), {}


def padding():
    rows = [torch.randn(length, 2) for length in (3, 0, 2)]
    for first, side in product((True, False), ("left", "right")):
        yield torch.nn.utils.rnn.pad_sequence, (rows, first, -1.0, side), {}


def spectra():
    for window, centre, normalized in product((None, 3), (True, False), (True, False)):
        options = {"window": torch.ones(window) if window else None, "win_length": window}
        options |= {"center": centre, "normalized": normalized, "return_complex": True}
        x = torch.randn(2, 20)
        yield torch.stft, (x, 4, 2), options
        spectrum = torch.stft(x, 4, 2, **(options | {"center": True}))
        yield torch.istft, (spectrum, 4, 2), options | {"center": True, "return_complex": False}


def recurrent():
    torch.manual_seed(0)
    for kind, both in product((torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN), (True, False)):
        yield kind(3, 4, 2, bidirectional=both), (torch.randn(5, 2, 3),), {}
    yield torch.nn.RNN(3, 4, nonlinearity="relu"), (torch.randn(5, 3),), {}


OPERATORS = {
    multilabel_margin_loss: "multilabel_margin_loss.default",
    multi_margin_loss: "multi_margin_loss.default",
    shrink: "",  # traces record these operators
    interpolate: """upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
        upsample_bilinear2d.vec _upsample_nearest_exact1d.default _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec
        _upsample_nearest_exact3d.default _upsample_nearest_exact3d.vec upsample_linear1d.vec
        upsample_trilinear3d.vec upsample_bicubic2d.default upsample_bicubic2d.vec
        _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec""",
    dropout: "dropout.default",
    products: "matmul.default",
    batch_norm: "native_batch_norm.default",
    splits: """tensor_split.tensor_indices_or_sections unsafe_chunk.default
        broadcast_tensors.default""",
    one_hot: "one_hot.default",
    padding: "pad_sequence.default",
    spectra: "stft.center istft.default",
    recurrent: "lstm.input gru.input rnn_tanh.input rnn_relu.input",
}
UNUSED = {  # other devices, calls that write into a tensor, and inner forms of those above
    *("cudnn_batch_norm.default", "miopen_batch_norm.default", "empty.out", "matmul.out"),
    *("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_upsample_lanczos2d_aa.vec"),
    "multilabel_margin_loss_forward.default",  # of the loss that is written anew
}
LATER = {"to_dense.default"}  # since PyTorch 2.14: sparse tensors, which programs refuse
OURS = {"cov.default", "combinations.default", "ctc_loss.IntList", "ctc_loss.Tensor"}


def test_every_decomposition_is_compared():
    found = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            if {AUTOGRAD, COMPOSITE} & getattr(packet, overload).py_kernels.keys():
                found.add(f"{name}.{overload}")
    compared = set(" ".join(OPERATORS.values()).split())
    assert found - UNUSED - OURS - LATER == compared


def computed(function, args, options):
    """Results and gradients, with draws that begin at one seed."""
    torch.manual_seed(0)
    args = [
        a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a
        for a in args
    ]
    options = {key: deepcopy(value) for key, value in options.items()}
    results = [x for x in tree_leaves(function(*args, **options)) if isinstance(x, torch.Tensor)]
    results += [x for x in options.values() if isinstance(x, torch.Tensor)]
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    reached = [result for result in results if result.requires_grad]
    gradients = []
    if reached and inputs:
        weights = [torch.linspace(0.5, 2, x.numel()).view(x.shape).to(x.dtype) for x in reached]
        gradients = torch.autograd.grad(reached, inputs, weights, allow_unused=True)
    return [x.detach() for x in results], [g for g in gradients if g is not None]


@pytest.mark.parametrize("cases", OPERATORS, ids=lambda cases: cases.__name__)
def test_is_its_operator_on_edge_values(cases):
    torch.manual_seed(0)
    with torch.backends.mkldnn.flags(enabled=False):
        for function, args, options in cases():
            expected = computed(function, args, options)
            with enable_python_dispatcher():
                found = computed(function, args, options)
            torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 4, 0), (0, 4, 5), (2, 4, 5)])
@pytest.mark.parametrize("weighted", [True, False])
def test_group_norm_of_nothing_has_gradients(shape, weighted):
    if torch.__version__ >= "2.14" and 0 in shape[1:]:
        with pytest.raises(RuntimeError, match="to be greater than 0"):
            F.group_norm(torch.zeros(shape), 4)
        return  # this PyTorch refuses it, too
    run = torch.compile(F.group_norm, backend="ipu", options={"engine": "eager"})
    results = []
    for function in (run, F.group_norm):
        torch.manual_seed(0)
        inputs = [torch.randn(n, requires_grad=True) for n in (shape, shape[1], shape[1])]
        y = function(inputs[0], 4, *(inputs[1:] if weighted else ()))
        inputs = inputs if weighted else inputs[:1]
        results.append([y, *torch.autograd.grad((y * y).sum(), inputs)])
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_batch_of_no_rows_trains_as_in_plain_pytorch(loss, reduction):
    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            value = loss(y, torch.zeros_like(y), reduction=reduction)
            return ipu_dynamo.identity_loss(value, "none")

    model, plain, x = Model(4, 3), Model(4, 3), torch.empty(0, 4)
    plain.load_state_dict(model.state_dict())
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), 0.1), {"engine": "eager"}
    )
    value = plain(x)
    value.backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    torch.testing.assert_close(step(x), value.detach(), equal_nan=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
