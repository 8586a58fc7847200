"""Check that matmuls of another library are right for every layout, and chosen as measured."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ipu_dynamo import Options, compile_inference, compile_training
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.private.graphs import FakeTensorMode
from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.passes.host.recipes.choose_matmuls import apply, plan
from ipu_dynamo.program import make_function
from ipu_dynamo.program.recipe import PrepackedWeight
from ipu_dynamo.runtime.engines.stage_key import stage_key
from ipu_dynamo.tune.matmul_choice import MATMUL, MatmulChoice
from ipu_dynamo.tune.matmul_classes import MEASURED, class_of, example_of

aten = torch.ops.aten
FORCED = MatmulChoice(forced="onednn")
SIZES = st.integers(1, 40)


@st.composite
def matrices(draw, *shape):
    """A float32 tensor with one of the layouts that operands come in."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    *batch, rows, columns = shape
    layout = draw(st.sampled_from(["plain", "transposed", "part", "repeated", "spread"]))
    if layout == "plain":
        return torch.randn(shape, generator=rng)
    if layout == "transposed":
        return torch.randn((*batch, columns, rows), generator=rng).transpose(-1, -2)
    if layout == "part":
        whole = torch.randn((*batch, rows + 2, columns + 3), generator=rng)
        return whole[..., 1:-1, 2:-1]
    if layout == "repeated":
        return torch.randn((*batch, 1, columns), generator=rng).expand(shape)
    return torch.randn((*batch, rows, 2 * columns), generator=rng)[..., ::2]


def function_of(compute, *tensors):
    """A stage of one operator or a few, as programs hold it."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    graph.output((compute(graph.call_function, *inputs),))
    gm = torch.fx.GraphModule({}, graph)
    FakeTensorProp(gm, FakeTensorMode()).propagate(*tensors)
    return make_function("stage", gm)


def choose_matmuls(function, constants=(), choice=FORCED):
    """A function with the matmuls that are chosen, and the weights that are packed for it."""
    matmuls = plan(function.graph.graph, choice, constants)
    return apply(function, [matmul for matmul in matmuls if matmul.way != "torch"])


def targets(function):
    return [node.target for node in function.operators]


def close(found, exact, *factors):
    """Within the rounding of sums of float32 matmuls."""
    depth = factors[0].shape[-1]
    scale = torch.matmul(factors[0].double().abs(), factors[1].double().abs())
    bound = 2.0**-24 * (depth + 2) * scale + 1e-5 * exact.abs() + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()


@given(SIZES, SIZES, SIZES, st.data())
def test_a_product_is_right_for_every_shape_and_layout(m, k, n, data):
    a, b = data.draw(matrices(m, k)), data.draw(matrices(k, n))
    function = function_of(lambda call, x, y: call(aten.mm.default, (x, y)), a, b)
    chosen = choose_matmuls(function)[0]
    (found,) = chosen.graph(a, b)
    exact = a.double() @ b.double()
    close(found, exact, a, b)
    (reference,) = function.graph(a, b)
    assert found.stride() == reference.stride()
    close(onednn.matmul(a, b, None, "none"), exact, a, b)  # also where the layout is refused


@given(SIZES, SIZES, SIZES, st.sampled_from([None, "none", "tanh"]), st.data())
def test_bias_and_gelu_join_the_matmul(m, k, n, approximate, data):
    a, b, bias = data.draw(matrices(m, k)), torch.randn(k, n), torch.randn(n)

    def compute(call, x, y, z):
        matmul = call(aten.addmm.default, (z, x, y))
        if approximate is None:
            return matmul
        view = call(aten.view.default, (matmul, [1, m, n]))
        return call(aten.gelu.default, (view,), {"approximate": approximate})

    function = function_of(compute, a, b, bias)
    chosen = choose_matmuls(function)[0]
    (found,), (reference,) = chosen.graph(a, b, bias), function.graph(a, b, bias)
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
    if class_of(function.operators[0]) is not None:
        assert aten.gelu.default not in targets(chosen)
        assert aten.addmm.default not in targets(chosen)


@given(SIZES, SIZES, SIZES, SIZES, st.data())
def test_batched_products_are_right(count, m, k, n, data):
    a, b = data.draw(matrices(count, m, k)), data.draw(matrices(count, k, n))
    function = function_of(lambda call, x, y: call(aten.bmm.default, (x, y)), a, b)
    chosen = choose_matmuls(function)[0]
    (found,) = chosen.graph(a, b)
    close(found, a.double() @ b.double(), a, b)


@given(SIZES, SIZES, SIZES)
def test_a_packed_weight_gives_the_same_matmul(m, k, n):
    a, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    function = function_of(
        lambda call, x, w, z: call(aten.addmm.default, (z, x, call(aten.t.default, (w,)))),
        a,
        weight,
        bias,
    )
    assert choose_matmuls(function)[1] == ()
    chosen, packed = choose_matmuls(function, {1})
    if class_of(function.operators[1]).form == "a @ b.t()":
        assert packed == (PrepackedWeight(source=1, rows=m),)
        (found,) = chosen.graph(a, weight, bias, onednn_pack(weight, m))
        (reference,) = function.graph(a, weight, bias)
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)


def test_a_weight_is_packed_once_for_all_products_of_as_many_rows():
    def compute(call, x, y, w):
        t = call(aten.t.default, (w,))
        matmuls = [call(aten.mm.default, (v, t)) for v in (x, y, x)]
        return call(aten.cat.default, (matmuls,))

    x, y, w = torch.randn(3, 4), torch.randn(5, 4), torch.randn(6, 4)
    chosen, packed = choose_matmuls(function_of(compute, x, y, w), {2})
    assert packed == (PrepackedWeight(2, 3), PrepackedWeight(2, 5))
    (found,) = chosen.graph(x, y, w, onednn_pack(w, 3), onednn_pack(w, 5))
    torch.testing.assert_close(found, torch.cat([x, y, x]) @ w.t())


def test_what_nobody_else_computes_stays():
    a, b, bias = torch.randn(4, 5), torch.randn(5, 6), torch.randn(4, 6)

    def matmuls(tensor, bias):
        return function_of(
            lambda call, x, y, z: call(aten.addmm.default, (z, x, y)), *map(tensor, (a, b)), bias
        )

    same = lambda t: t  # noqa: E731
    for function in (
        matmuls(torch.Tensor.double, bias[0].double()),
        matmuls(torch.Tensor.half, bias[0].half()),
        matmuls(same, bias),
        matmuls(same, bias[0, :1]),
        function_of(
            lambda call, x, y, z: call(aten.addmm.default, (z, x, y), {"beta": 2}), a, b, bias[0]
        ),
        function_of(lambda call, x, y: call(aten.mm.default, (x, y)), a[:, :0], b[:0]),
    ):
        assert targets(choose_matmuls(function)[0]) == targets(function)


def test_relu_stays_outside_because_it_must_keep_nan():
    a = torch.tensor([[float("nan"), 1.0]])
    function = function_of(
        lambda call, x, y: call(aten.relu.default, (call(aten.mm.default, (x, y)),)),
        a,
        torch.ones(2, 3),
    )
    chosen = choose_matmuls(function)[0]
    assert targets(chosen) == [onednn.matmul, aten.relu.default]
    assert chosen.graph(a, torch.ones(2, 3))[0].isnan().all()


def test_a_value_that_others_read_keeps_its_gelu_apart():
    def compute(call, x, y):
        matmul = call(aten.mm.default, (x, y))
        return call(aten.add.Tensor, (matmul, call(aten.gelu.default, (matmul,))))

    function = function_of(compute, torch.randn(4, 5), torch.randn(5, 6))
    chosen = choose_matmuls(function)[0]
    assert targets(chosen) == [onednn.matmul, aten.gelu.default, aten.add.Tensor]


@pytest.mark.parametrize("one", MEASURED, ids=str)
def test_what_is_measured_is_of_its_class(one):
    a, b = example_of(one)
    matmul = aten.bmm.default if a.dim() == 3 else aten.mm.default
    function = function_of(lambda call, x, y: call(matmul, (x, y)), a, b)
    (found,) = plan(function.graph.graph, MatmulChoice(forced="torch"))
    assert found.of == one


def test_the_library_is_part_of_a_stage_s_key():
    function = function_of(
        lambda call, x, y: call(aten.mm.default, (x, y)), torch.ones(4, 4), torch.ones(4, 4)
    )
    chosen = choose_matmuls(function)[0]
    keys = stage_key(function, {}), stage_key(chosen, {})
    assert None not in keys
    assert keys[0] != keys[1]


class Small(nn.Module):
    """Every kind of matmul: with bias and gelu, without, batched; tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, tokens, targets=None):
        h = self.embedding(tokens)
        h = h + torch.softmax(h @ h.transpose(1, 2), -1) @ h
        h = h + self.down(nn.functional.gelu(self.up(h)))
        logits = h @ self.embedding.weight.t()
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


TOKENS = torch.randint(12, (3, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.inductor
def test_inference_by_each_library_is_eager_s(monkeypatch):
    model = Small().eval()
    exact = copy.deepcopy(model).double()(TOKENS)
    for library in ("torch", "onednn"):
        for own in (False, True):
            monkeypatch.setenv(MATMUL, library)
            run = compile_inference(model, Options("inductor"), own_weights=own)
            first = run(TOKENS)
            torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
            assert torch.equal(run(TOKENS), first)


@pytest.mark.slow
@pytest.mark.inductor
def test_training_by_each_library_is_eager_s(monkeypatch):
    torch.manual_seed(1)
    start = Small()
    exact = copy.deepcopy(start).double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        exact(TOKENS, TOKENS.roll(1)).backward()
        optimizer.step()
    for library in ("torch", "onednn"):
        monkeypatch.setenv(MATMUL, library)
        model = copy.deepcopy(start)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_training(model, sgd, Options("inductor"))
        for _ in range(3):
            step(TOKENS, TOKENS.roll(1))
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.inductor
@pytest.mark.parametrize("own", [False, True])
def test_weights_loaded_anew_are_seen(monkeypatch, own):
    """Also in place and behind PyTorch's back, where the program computes on the model's own."""
    monkeypatch.setenv(MATMUL, "onednn")
    model = Small().eval()
    run = compile_inference(model, Options("inductor"), own_weights=own)
    before = run(TOKENS)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    if own:
        assert torch.equal(run(TOKENS), before)
        run.write_weights()
    torch.testing.assert_close(run(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5)
