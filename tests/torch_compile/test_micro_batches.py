"""Check what `options={"micro_batches": n}` does: losses, norms, mutation, refusals, programs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, Block, CompileError
from ipu_dynamo.program import Program, Repeat
from ipu_dynamo.program.text.program_text import parse_text, write_text
from ipu_dynamo.torch_compile.backend import ipu


def compiled(model, n=4, **options):
    options = {"engine": "eager", "micro_batches": n, **options}
    return torch.compile(model, backend=ipu, fullgraph=True, options=options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        BeginBlock(self.second)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loops() -> list:
    return [i for p in ipu_dynamo.programs() for i in p.walk() if isinstance(i, Repeat)]


def compare(model, loss, *inputs, n=4, **options):
    """A loss and all gradients, compiled and on the whole batch."""
    found = []
    for call in (loss, compiled(loss, n, **options)):
        model.zero_grad()
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        result = call(model, *leaves)
        result.sum().backward()
        tensors = [*leaves, *model.parameters()]
        found.append([result.detach(), *(t.grad for t in tensors if t.grad is not None)])
    torch.testing.assert_close(found[1], found[0])


LOSSES = {
    "mean": lambda y, t: F.cross_entropy(y, t),
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "none": lambda y, t: F.cross_entropy(y, t, reduction="none"),
    "ignored targets": lambda y, t: F.cross_entropy(y, t, ignore_index=1),
    "weights": lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([0.5, 1, 2]).double()),
    "smooth": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "mse": lambda y, t: F.mse_loss(y, t[:, None].double().expand_as(y)),
    "huber": lambda y, t: F.huber_loss(y, t[:, None].double().expand_as(y), reduction="sum"),
    "root of a mean": lambda y, t: y.square().mean().sqrt(),
    "divided by a size": lambda y, t: (y.sum() + t.sum()) / y.shape[0],
    "penalty on the batch's mean": lambda y, t: y.square().sum() + y.mean(0).square().sum(),
    "rows against rows": lambda y, t: F.cross_entropy(y @ y.t(), torch.arange(8)),
    "transposed": lambda y, t: y.t() * 2,
    "flat": lambda y, t: y.reshape(-1),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", LOSSES)
def test_the_batch_is_what_counts(name):
    """Every loss, forward and backward, is that of the whole batch, not of micro-batches."""
    torch.manual_seed(1)
    targets = torch.tensor([1, 1, 0, 1, 2, 2, 1, 0])  # micro-batch 0 has only ignored targets
    compare(Net(), lambda m, x, t: LOSSES[name](m(x), t), torch.randn(8, 4).double(), targets)
    assert {loop.count for loop in loops()} >= {4}


QUICK = {"low-rank term", "scale of a loss", "loss of logits", "slice set", "last token"}
QUICK |= {"token set", "rows in dim 1", "instance norm"}


def some(names: dict) -> list:
    """The names of cases, all but the quick ones marked as slow."""
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(name, marks=marks[name in QUICK]) for name in names]


COMPUTED = {
    "low-rank term": lambda m, x: F.linear(x, m.base.weight + m.b @ m.a),
    "gain": lambda m, x: F.linear(x, m.base.weight * m.gain),
    "weight norm": lambda m, x: m.normed(x),
    "layer of a table": lambda m, x: x + m.base(m.a).mean(0),
    "scale of a loss": lambda m, x: m.base(x).mean() * m.scale.exp() + m.scale,
    "layer of the batch's mean": lambda m, x: m.base(x.tanh().mean(0)),
}


@pytest.mark.parametrize("name", some(COMPUTED))
def test_what_parameters_and_sums_over_the_batch_make_is_no_layer(name):
    """It has no rows, so that it mixes none: it is computed before the micro-batches, or after."""
    torch.manual_seed(0)
    model = nn.Module()
    model.base = nn.Linear(4, 4)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    shapes = {"a": (2, 4), "b": (4, 2), "gain": (4, 1), "scale": ()}
    for parameter, shape in shapes.items():
        model.register_parameter(parameter, nn.Parameter(torch.randn(shape)))
    model.double()
    compare(model, lambda m, x: COMPUTED[name](m, x).square().mean(), torch.randn(8, 4).double())
    assert 4 in {loop.count for loop in loops()}


def rows() -> Tensor:
    return torch.arange(8)


ROW_BY_ROW = {
    "loss of logits": lambda h, n: F.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    "soft margin": lambda h, n: F.soft_margin_loss(h, torch.ones_like(h)),
    "slice set": lambda h, n: (h.__setitem__((slice(None), 0), 0.0), h)[1],
    "last token": lambda h, n: h[rows(), n],
    "last token from the end": lambda h, n: h[rows(), -n - 1],
    "tokens": lambda h, n: h[rows()[:, None], torch.stack([n, n * 0], 1)],
    "token and channel": lambda h, n: h[rows(), n, n % 3],
    "token set": lambda h, n: h.index_put((rows(), n), h.new_zeros(())),
    "added to a token": lambda h, n: h.index_put((rows(), n), h[:, 0], accumulate=True),
    "columns": lambda h, n: h[:, torch.tensor([0, 2, 2])],
    "rows in dim 1": lambda h, n: h.transpose(0, 1)[n, rows()].tanh(),
    "a channel of each row": lambda h, n: h.transpose(0, 1)[:, rows(), n % 3],
    "instance norm": lambda h, n: F.instance_norm(h.mT).mT.tanh(),
    "circular padding": lambda h, n: F.pad(h, (1, 1), mode="circular").tanh(),
    "distances": lambda h, n: torch.cdist(h, torch.ones(2, 3).double()),
    "spectrum": lambda h, n: torch.fft.rfft(h, dim=1).abs(),
    "looked up": lambda h, n: h * torch.linspace(0, 1, 5).double()[n][:, None, None],
}


@pytest.mark.parametrize("name", some(ROW_BY_ROW))
def test_a_layer_may_follow_what_mixes_no_rows(name):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            h = ROW_BY_ROW[name](self.first(x) * 2, n)
            return (self.second(h) if h.dim() > 1 and h.shape[-1] == 3 else h).square().mean()

    n = torch.tensor([4, 2, 0, 1, 3, 4, 2, 1])
    compare(Two(), lambda m, x, n: m(x, n), torch.randn(8, 5, 4).double(), n)
    assert 4 in {loop.count for loop in loops()}


def test_statistics_of_instance_norm_are_those_of_the_whole_batch():
    torch.manual_seed(0)
    x, norm = (
        torch.randn(8, 3, 5).double(),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True).double(),
    )
    plain = nn.InstanceNorm1d(3, affine=True, track_running_stats=True).double()
    for _ in range(2):
        torch.testing.assert_close(compiled(norm)(x), plain(x))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(compiled(norm.eval())(x), plain.eval()(x))


def test_blocks_are_a_pipeline():
    call, x = compiled(Net()), torch.randn(8, 4).double()
    call(x)
    forward = next(p for p in ipu_dynamo.programs() if p.kind == "forward" and p.copies)
    assert [c.ipu for c in forward.calls] == [0, 1]
    assert str(forward.inputs[0]) == "input %x: f64[2,4]"
    assert {str(o) for o in forward.outputs} >= {"output %0: f64[2,3]  return all"}


@pytest.mark.parametrize("workers", [1, 2, None])
def test_workers_change_no_bit(workers):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 4).double()
    call = compiled(model, workers=workers)
    reference = compiled(model, workers=1)
    results = []
    for one in (call, reference):
        model.zero_grad()
        one(x).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def test_batch_norm_has_statistics_of_each_micro_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(8, 3).double()
    norm = model[1]
    parts = []
    for part in x.chunk(4):
        copy = nn.BatchNorm1d(4).double()
        copy.load_state_dict(norm.state_dict())
        parts.append((copy(model[0](part)), copy.running_mean, copy.running_var))
    expected, means, variances = zip(*parts, strict=True)
    result = compiled(model)(x)
    torch.testing.assert_close(result, torch.cat(expected))
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0))
    assert norm.num_batches_tracked == 1
    whole = nn.BatchNorm1d(4).double()
    whole(model[0](x))
    torch.testing.assert_close(norm.running_mean, whole.running_mean)  # means of means

    model.eval()
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_inputs_that_are_no_batch_stay_whole():
    def run(x, table, scale):
        with Block("a"):
            h = x @ table
        with Block("b"):
            return h * scale, table.sum(), scale + 1

    given = torch.randn(8, 4), torch.randn(4, 4), torch.tensor(3.0)
    with pytest.raises(CompileError, match=r"not clear what the batch is.*x has 8, table has 4"):
        compiled(run)(*given)
    call = compiled(run, batch_inputs=["x"])
    for found, wanted in zip(call(*given), run(*given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_weights_do_not_outvote_the_batch():
    """Two inputs of four rows are no majority over one of eight."""

    def run(x, a, b):
        return x @ a @ b

    given = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(CompileError, match="not clear what the batch is"):
        compiled(run)(*given)
    torch.testing.assert_close(compiled(run, batch_inputs=["x"])(*given), run(*given))


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["z"], "(?s)batch_inputs names 'z'.*these are: x, y"), (["x", "y"], "not clear")],
)
def test_wrong_names_of_the_batch_are_refused(names, problem):
    with pytest.raises(CompileError, match=problem):
        compiled(lambda x, y: x.sum() + y.sum(), batch_inputs=names)(torch.ones(8), torch.ones(4))


AFFINE = {
    "counts": lambda x, t: (x > 0).sum() + 1,
    "a size": lambda x, t: x.size(0) + x.sum(),
    "less": lambda x, t: 1 - x.sum(),
    "a product over the batch": lambda x, t: x.t() @ x + 1,
    "a loss": lambda x, t: F.cross_entropy(x, t, reduction="sum") + 1,
    "alpha": lambda x, t: torch.sub(x.sum(), 2, alpha=2),
    "in place": lambda x, t: x.sum(0).add_(1).sub_(x.sum(0), alpha=3),
    "two sums": lambda x, t: torch.add(x.sum(), (x > 0).sum(), alpha=2) - 1,
    "a mean": lambda x, t: x.mean(0) + 1,
    "a mean of a sum": lambda x, t: x.sum(0).mean(),
    "where": lambda x, t: torch.where(x.sum(0) > 0, x.sum(0), 1.0),
    "clamp": lambda x, t: x.sum(0).clamp(-0.5, 0.5),
    "to integers": lambda x, t: x.sum(0).to(torch.int64),
    "to bools": lambda x, t: x.sum(0).bool(),
    "bits": lambda x, t: x.float().sum(0).view(torch.int32),
    "filled": lambda x, t: torch.zeros_like(x.sum(0)) + torch.ones_like(x.sum(0)),
    "filled in place": lambda x, t: x.sum(0).fill_(3),
    "a constant row": lambda x, t: torch.cat([x.sum(0), torch.ones(1)]),
    "padded": lambda x, t: F.pad(x.sum(0), (1, 1), value=2.0),
    "a bias": lambda x, t: torch.addmm(torch.ones(3, 3), x.t(), x * 2),
    "absolute": lambda x, t: (x.sum(0) - x.mean(0)).abs(),
}


@pytest.mark.parametrize("name", AFFINE)
def test_what_is_not_linear_waits_for_the_whole_sum(name):
    """An affine map of a partial sum would add its constant once for each micro-batch."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (8, 3)).float()  # whose sums are exact
    t = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    run = AFFINE[name]
    torch.testing.assert_close(compiled(run)(x, t), run(x, t))


def test_a_sum_in_a_checkpoint_gets_a_constant_once():
    def run(x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: y.exp().sum() + 1, x, use_reentrant=False
        )

    results = []
    for call in (run, compiled(run)):
        x = torch.linspace(0, 1, 8, requires_grad=True)
        loss = call(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])


def test_attention_with_a_learned_mask_is_split():
    def run(x, bias, w):
        query = x.view(4, 1, 5, 6)
        h = F.scaled_dot_product_attention(query, query, query, attn_mask=bias)
        return (h.flatten(0, 1) @ w).square().mean()

    results = []
    for call in (run, compiled(run, n=2)):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 2))
        bias = torch.zeros(1, 1, 5, 5, requires_grad=True)
        x = torch.randn(4, 5, 6, requires_grad=True)
        loss = call(x, bias, w)
        loss.backward()
        results.append((loss.detach(), x.grad, bias.grad, w.grad))
    torch.testing.assert_close(results[1], results[0])
    assert 2 in {loop.count for loop in loops()}


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_of_which_nothing_can_be_split_is_refused(training):
    """It used to run unsplit without a word."""
    x = torch.randn(8, 4, requires_grad=training)
    with pytest.raises(CompileError, match="nothing is left that 4 micro-batches") as caught:
        compiled(lambda x: x.softmax(0) * 2)(x)
    assert "_softmax" in str(caught.value)
    assert "x.softmax(0)" in str(caught.value)


def test_a_layer_behind_an_unsplittable_first_operator_is_refused():
    with pytest.raises(CompileError, match=r"the layer with .*second") as caught:
        compiled(lambda m, x: m.second(x.softmax(0)))(Net(), torch.randn(8, 5).double())
    assert "_softmax" in str(caught.value)


def test_an_operator_that_is_not_in_the_table_is_refused_with_its_line():
    with pytest.raises(CompileError, match="not in the table of those that work") as caught:
        compiled(lambda x: F.pdist(x).sum())(torch.randn(8, 4))
    assert "_pdist_forward" in str(caught.value)
    assert "F.pdist(x).sum()" in str(caught.value)


def test_a_square_mask_of_the_batchs_size_is_used_whole():
    """Dim 0 of the mask has as many elements as the batch has rows; it is no batch."""

    def run(x, mask):
        return x.masked_fill(mask.logical_not(), 0.0).sum(-1)

    x, mask = torch.randn(4, 4, 4), torch.ones(4, 4).tril().bool()
    torch.testing.assert_close(compiled(run)(x, mask), run(x, mask))
    layer = nn.Linear(4, 2)
    with pytest.raises(CompileError, match="needs all rows of the batch at once"):
        compiled(lambda m, x, mask: m(x.masked_fill(mask, 0.0)))(layer, x, mask)
    call = compiled(run, batch_inputs=["x"])
    torch.testing.assert_close(call(x, mask), run(x, mask))
    assert 4 in {loop.count for loop in loops()}


def test_a_mask_that_is_looked_up_for_each_row_is_prepared_whole():
    """As in BERT. What is no mask is looked up in after the micro-batches."""

    def run(x, mask):
        rows = torch.arange(8)[:, None]
        kept = mask.bool()[rows, torch.arange(4)]
        return torch.where(kept, x.tanh(), 0.0)

    x, mask = torch.randn(8, 4), torch.randint(0, 2, (8, 4))
    torch.testing.assert_close(compiled(run)(x, mask), run(x, mask))
    assert 4 in {loop.count for loop in loops()}
    rows = torch.arange(8).flip(0)
    torch.testing.assert_close(compiled(lambda x: x.tanh()[rows])(x), x.tanh()[rows])


def test_mutation_reaches_the_callers_tensors():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3).double())
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            self.calls += 1
            self.mean.mul_(0.5).add_(x.mean(0))
            seen.add_(x)
            return x * 2

    model, plain = Counting(), Counting()
    x = torch.randn(8, 3).double()
    seen, other = torch.zeros(8, 3).double(), torch.zeros(8, 3).double()
    call = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(call(x, seen), plain(x, other))
    torch.testing.assert_close(seen, other)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_dropout_is_repeatable():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    BeginBlock(model[1])
    call, x = compiled(model, workers=2), torch.ones(8, 4)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(call(x))
    assert torch.equal(*results)
    kept = (results[0] != 0).double().mean().item()
    assert 0.3 < kept < 0.7
    assert not torch.equal(results[0][:2], results[0][2:4])  # micro-batches differ


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_behind_the_meeting_of_rows_is_refused(training):
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(x).softmax(0))

    with (
        torch.set_grad_enabled(training),
        pytest.raises(CompileError, match="needs all rows of the batch at once") as caught,
    ):
        compiled(Mixing())(torch.randn(8, 4))
    assert "_softmax" in str(caught.value)
    assert "the layer with layer." in str(caught.value)
    assert "return self.layer(torch.tanh(x).softmax(0))" in str(caught.value)


def test_a_stage_behind_the_meeting_of_rows_is_refused():
    def run(x):
        with Block("a"):
            y = torch.tanh(x)
            y = y - y.amax(0)
        with Block("b"):
            return y * 2

    with pytest.raises(CompileError, match="stage 1 needs its result"):
        compiled(run)(torch.randn(8, 4))


def test_inputs_prepared_over_the_batch_are_refused():
    """To compute on the whole batch what layers read would leave the pipeline without work."""
    with pytest.raises(CompileError, match="needs all rows of the batch at once") as caught:
        compiled(lambda m, x: m((x - x.amax(0)) * 2))(Net(), torch.randn(8, 4).double())
    assert "amax" in str(caught.value)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(
        CompileError, match=r"a batch of 6 rows \(dim 0 of x\) does not divide into 4"
    ):
        compiled(lambda x: x * 2)(torch.randn(6, 4))


def test_nothing_to_split_is_refused():
    with pytest.raises(CompileError, match="there is no batch to split"):
        compiled(lambda x: x * 2)(torch.tensor(1.0))


def test_half_precision_means_do_not_overflow():
    x = torch.full((8, 4000), 60.0, dtype=torch.float16)
    result = compiled(lambda x: x.mean())(x)
    assert result.item() == 60.0
    scores = torch.zeros(8000, 2, dtype=torch.float16)
    scores[:, 1] = 40.0
    targets = torch.zeros(8000, dtype=torch.int64)
    loss = compiled(F.cross_entropy)(scores, targets)
    assert loss.dtype == torch.float16
    assert loss.item() == 40.0


def test_no_grad_autocast_and_new_shapes():
    model = Net().float()
    call = compiled(model, 2)
    for rows in (4, 8, 6):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(call(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = call(x), model(x)
        assert found.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_dump_has_a_folder_for_each_program(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_DUMP", str(tmp_path))
    compiled(lambda m, x: m(x).square().mean().sqrt())(Net(), torch.randn(8, 4).double())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000_captured",
        "001_joint",
        "002_forward",
        "003_forward_before",
        "004_forward_loop",
        "005_forward_after",
        "006_backward",
        "007_backward_before",
        "008_backward_loop",
    ]


def test_programs_read_back_from_their_text():
    """With rows along another dimension, and repeated along one."""

    def run(x, w):
        time_first = x.transpose(0, 1).contiguous()  # [3, 8, 4]
        return (time_first.view(24, 4) @ w).tanh(), time_first * 2

    x, w = torch.randn(8, 3, 4, requires_grad=True), torch.randn(4, 4)
    found, wanted = compiled(run, batch_inputs=["x"])(x, w), run(x, w)
    torch.testing.assert_close(found, wanted)
    programs = ipu_dynamo.programs()
    assert any("along dim 0, repeated 3 times" in str(program) for program in programs)
    assert any("along dim 1" in str(program) for program in programs)
    for program in programs:
        assert parse_text(write_text(program), Program) == program
