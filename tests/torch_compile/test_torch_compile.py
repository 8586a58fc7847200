"""Check what torch.compile(backend="ipu") computes, and the programs that it makes."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ipu_dynamo
from ipu_dynamo import BeginBlock, Block, BlockFunction, Options, StageSpec, Strategy
from ipu_dynamo.options import OptionError
from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.torch_compile.backend import ipu

ROOT = Path(__file__).parents[2]
ENGINES = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def compiled(model, engine="eager", **kwargs):
    return torch.compile(
        model, backend=ipu, fullgraph=True, options=Options(engine=engine), **kwargs
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def gradients(model, call, *inputs) -> list[Tensor]:
    model.zero_grad()
    call(*inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_is_found_through_the_entry_point(tmp_path):
    """In a process that imports torch alone; the folder stands for an installed package."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "ipu_dynamo-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ipu_dynamo\nVersion: 0\n")
    lines = [f"[{group}]\n{name} = {at}\n" for group, e in entry.items() for name, at in e.items()]
    (folder / "entry_points.txt").write_text("".join(lines))
    script = """
import sys, torch
assert "ipu" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
assert "ipu_dynamo" not in sys.modules
double = torch.compile(lambda x: x * 2, backend="ipu", options={"engine": "eager"})
print(double(torch.ones(3)).tolist())
import ipu_dynamo
print(len(ipu_dynamo.programs()))
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "[2.0, 2.0, 2.0]\n1\n", run.stderr


def test_importing_the_backend_is_cheap():
    script = "import sys, ipu_dynamo.torch_compile.backend; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        *(("eager", dtype) for dtype in DTYPES),
        ("inductor", torch.bfloat16),  # which is computed in another one
        *(pytest.param("inductor", dtype, marks=pytest.mark.slow) for dtype in DTYPES[:-1]),
    ],
)
def test_keeps_dtypes(engine, dtype):
    model, x = Net().to(dtype), torch.randn(2, 4, dtype=dtype)
    expected, expected_gradients = model(x), gradients(model, model, x)
    call = compiled(model, engine)
    result = call(x)
    assert result.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for found, wanted in zip(gradients(model, call, x), expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert {variable.type.dtype for variable in ipu_dynamo.programs()[0].variables} == {dtype}


def test_keeps_int64():
    indices = torch.tensor([[2**40, 3], [1, 2**40]])
    result = compiled(lambda i: i.max(1).indices + i.sum())(indices)
    assert result.dtype == torch.int64
    assert result.tolist() == [2**41 + 4, 2**41 + 5]


def test_one_stage_is_one_compiled_call():
    class Counting(EagerEngine):
        calls = 0

        def compile(self, recipes):
            return [*map(self.counts, super().compile(recipes))]

        def counts(self, stage):
            def counted(arguments):
                Counting.calls += 1
                return stage(arguments)

            return counted

    model, x = Net(), torch.randn(2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipu_dynamo.torch_compile.compile_graph.make_engine", lambda *_: Counting())
        call = compiled(model)
        call(x)
        Counting.calls = 0
        call(x).sum().backward()
    assert Counting.calls == 2  # forward and backward
    assert all(len(program.functions) == 1 for program in ipu_dynamo.programs())
    assert not any(program.copies for program in ipu_dynamo.programs())


class Blocks(nn.Module):
    """Three stages, each begun in another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        BeginBlock(self.layers[0], "persistent")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with Block("context"):
            x = torch.tanh(self.layers[1](x)) + x
        return self.last(x)

    @BlockFunction("function", ipu_id=5)
    def last(self, x: Tensor) -> Tensor:
        return self.layers[2](x) * x


def test_every_form_of_block_makes_a_stage():
    model, x = Blocks(), torch.randn(2, 4)
    expected = gradients(model, model, x)
    found = gradients(model, compiled(model), x)
    assert all(map(torch.equal, found, expected))
    forward, backward = ipu_dynamo.programs()
    assert [call.ipu for call in forward.calls] == [0, 1, 5]
    assert [call.ipu for call in backward.calls] == [5, 1, 0]
    homes = {variable.name: variable.ipu for variable in forward.variables}
    assert homes == {
        f"layers.{layer}.{kind}": ipu_id
        for layer, ipu_id in enumerate((0, 1, 5))
        for kind in ("weight", "bias")
    }
    assert [copy.dst for copy in forward.copies] == [1, 5]


def test_a_strategy_says_which_blocks_are_a_stage():
    stages = (StageSpec(("persistent", "context"), 3), StageSpec(("function",), 1))
    call = torch.compile(
        Blocks(), backend=ipu, fullgraph=True, options={"strategy": Strategy(stages=stages)}
    )
    with torch.no_grad():
        call(torch.randn(2, 4))
    (program,) = ipu_dynamo.programs()
    assert program.kind == "inference"
    assert [call.ipu for call in program.calls] == [3, 1]


def test_the_program_names_the_users_lines():
    compiled(Blocks())(torch.randn(2, 4))
    forward, backward = ipu_dynamo.programs()
    for program in (forward, backward):
        assert "x = torch.tanh(self.layers[1](x)) + x" in str(program)
        assert all("test_torch_compile.py" in call.source for call in program.calls)


def test_inputs_may_be_called_like_operators():
    """Values travel between stages by name, and so do inputs."""

    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            BeginBlock(self.b)

        def forward(self, add: Tensor, tanh: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(add) + tanh)) + tanh

    model = Confusing()
    inputs = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(compiled(model)(*inputs), model(*inputs))


def test_inputs_may_be_called_like_saved_values():
    def run(mul, x):
        product = mul * x
        return (product * product * mul).sum()

    mul, x = (torch.tensor([value], requires_grad=True) for value in (3.0, 2.0))
    compiled(run)(mul, x).backward()  # mul**3 * x**2
    assert (mul.grad.item(), x.grad.item()) == (108.0, 108.0)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_each_shape_compiles_once(dynamic):
    model = Net()
    call = compiled(model, dynamic=dynamic)
    for rows in (2, 3, 5, 3, 2, 5):
        x = torch.randn(rows, 4)
        expected = gradients(model, model, x)
        assert all(map(torch.equal, gradients(model, call, x), expected))
    programs = ipu_dynamo.programs()
    shapes = [program.inputs[0].type.shape for program in programs if program.kind == "forward"]
    assert shapes == [(2, 4), (3, 4), (5, 4)]
    assert len(programs) == 6


def test_python_numbers_are_part_of_the_program():
    def scaled(x, n):
        return (x * n).sum() + x.shape[0]

    call = compiled(scaled)
    for n in (2, 3, 4, 3.5, 4.5):
        x = torch.randn(3, 4, requires_grad=True)
        result = call(x, n)
        assert torch.equal(result, scaled(x, n))
        result.backward()
        assert torch.equal(x.grad, torch.full_like(x, n))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trained", [False, True])
def test_keeps_mutation_and_aliases(engine, trained):
    def run(x, buffer):
        buffer.add_(1)
        flat = x.view(-1)
        return flat, x, buffer * 2, x[0], flat + buffer.sum()

    x = torch.randn(2, 3, requires_grad=trained)
    buffer, expected_buffer = torch.zeros(3), torch.zeros(3)
    results, expected = compiled(run, engine)(x, buffer), run(x, expected_buffer)
    assert torch.equal(buffer, expected_buffer)
    assert all(map(torch.equal, results, expected))
    assert results[0].data_ptr() == results[3].data_ptr() == x.data_ptr()
    assert results[1] is x
    assert [r.requires_grad for r in results] == [e.requires_grad for e in expected]
    if trained:
        (results[4] * results[0]).sum().backward()  # (x + 3) * x
        torch.testing.assert_close(x.grad, 2 * x.detach() + 3)


@pytest.mark.parametrize("trained", [False, True])
def test_a_changed_input_may_share_memory_with_another_one_in_a_later_call(trained):
    def run(x, y, w):
        x.mul_(2)
        return (x + y) * w

    call = compiled(run)
    w, expected_w = torch.ones(4, requires_grad=trained), torch.ones(4, requires_grad=trained)
    for cuts, shared in [(None, False), ((0, 4, 4, 8), False), ((0, 4, 2, 6), True)] * 2:
        results = []
        for weight, function in ((w, call), (expected_w, run)):
            base = torch.arange(1.0, 9.0)
            pair = [base[:4].clone(), base[4:].clone()]
            if cuts is not None:
                pair = [base[cuts[0] : cuts[1]], base[cuts[2] : cuts[3]]]
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                results.append((function(*pair, weight), base, *pair))
            texts = [w for w in map(str, (t.message for t in told)) if "shares memory with y" in w]
            assert bool(texts) == (shared and function is call)
            if trained:
                results[-1][0].sum().backward()
        assert_same_bits(*results)
    assert not trained or torch.equal(w.grad, expected_w.grad)


@pytest.mark.parametrize("trained", [False, True])
def test_a_changed_input_may_share_memory_with_another_one_in_the_first_call(trained):
    def run(x, y, w):
        x.add_(100)
        return y[0], y * w

    call = compiled(run)
    for cuts in [(0, 3, 1, 4), (1, 3, 0, 2), (0, 2, 0, 2)] * 2:
        results = []
        for function in (call, run):
            base, w = torch.arange(24.0).view(4, 6), torch.ones(6, requires_grad=trained)
            pair = base[cuts[0] : cuts[1]], base[cuts[2] : cuts[3]]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                view, product = function(*pair, w)
            if trained:
                product.sum().backward()
            assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
            results.append((view, product, base, w.grad if trained else w))
        assert_same_bits(*results)


def test_a_detached_output_stays_apart_from_its_source():
    def run(x):
        y = torch.tanh(x)
        return y, y.detach()

    x = torch.randn(3, requires_grad=True)
    y, detached = compiled(run)(x)
    assert (y.requires_grad, detached.requires_grad) == (True, False)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)


def test_frozen_parameters_and_buffers_of_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    plain.load_state_dict(model.state_dict())
    BeginBlock(model[1])
    BeginBlock(model[2])
    call = compiled(model)
    for net in (model, plain):
        net[0].requires_grad_(False)
    for _ in range(3):
        x = torch.randn(5, 4)
        call(x).sum().backward()
        plain(x).sum().backward()
    assert model[0].weight.grad is None
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        if p.requires_grad
    )
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    kinds = {v.name: v.kind for v in ipu_dynamo.programs()[0].variables}
    assert kinds["1.running_mean"] == "buffer"
    assert kinds["1.weight"] == "parameter"


@pytest.mark.parametrize(
    "idle",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, p=0.0),
        lambda x: torch.dropout(x, 0.5, train=False),
        nn.Dropout(0.5).eval(),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_that_drops_nothing_is_its_input(idle, grad):
    """PyTorch's aot_eager makes a copy, and loses the change."""

    def change(x, weight):
        idle(x).add_(1)
        return (x * weight).sum()

    x, weight = torch.zeros(2, 3), torch.ones(2, 3, requires_grad=grad)
    result = compiled(change)(x, weight)
    assert torch.equal(x, torch.ones(2, 3))
    assert result.item() == 6
    if grad:
        result.backward()
        assert torch.equal(weight.grad, torch.ones(2, 3))


def test_dropout_draws_torchs_random_numbers():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    call = compiled(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        assert torch.equal(call(x), expected)


def test_modes():
    model, x = Net(), torch.randn(2, 4)
    call = compiled(model)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    with torch.inference_mode():
        assert torch.equal(call(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = call(x), model(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found, expected)


def test_tensors_made_in_the_model():
    def run(x):
        with Block("a"):
            y = x + torch.tensor([1.0, 2.0])
        with Block("b"):
            return y * torch.tensor([3.0, 4.0])

    x = torch.ones(2, requires_grad=True)
    result = compiled(run)(x)
    result.sum().backward()
    assert result.tolist() == [6.0, 12.0]
    assert x.grad.tolist() == [3.0, 4.0]


def test_a_checkpoint_runs_in_the_stage_around_it():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            BeginBlock(self.second)

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(self.first(x))
            return checkpoint(lambda t: F.relu(torch.tanh(t)) * t, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(3, 4)
    expected = gradients(model, model, x)
    assert all(map(torch.equal, gradients(model, compiled(model), x), expected))
    forward, backward = ipu_dynamo.programs()
    assert [call.ipu for call in forward.calls] == [0, 1]
    assert [call.ipu for call in backward.calls] == [1, 0]
    names = {str(node.target) for node in backward.functions[0].operators}
    assert "aten.tanh.default" in names  # computed again, on IPU 1


def test_one_call_after_another_and_from_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    model = Blocks()
    call = compiled(model)
    inputs = [torch.randn(2, 4) for _ in range(40)]
    with torch.no_grad():
        call(inputs[0])

    def run(x):
        with torch.no_grad():
            return call(x), model(x)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found, expected in pool.map(run, inputs))


def test_reset_forgets_programs():
    with torch.no_grad():
        compiled(Net())(torch.randn(2, 4))
    assert len(ipu_dynamo.programs()) == 1
    torch._dynamo.reset()
    assert ipu_dynamo.programs() == ()


def test_dump_shows_both_passes(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_DUMP", str(tmp_path))
    compiled(Blocks())(torch.randn(2, 4))
    names = {
        part.name: [path.stem.partition("_")[2] for path in sorted(part.glob("*_*.txt"))]
        for part in sorted(tmp_path.iterdir())
    }
    assert {part: (found[0], found[-1]) for part, found in names.items()} == {
        "000_captured": ("captured", "AnnotateStages"),
        "001_joint": ("joint", "SplitDirections"),
        "002_forward": ("flat", "ReplaySteps"),
        "003_backward": ("flat", "ReplaySteps"),
    }


def test_dump_fixes_no_size(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_DUMP", str(tmp_path))
    compiled(lambda x: x.relu(), dynamic=True)(torch.ones(3, 4))
    text = next(tmp_path.glob("*_captured/00_*")).read_text()
    assert re.search(r'%relu: opaque\("torch.float32\[s\d+, s\d+\]"\) = call_method relu', text)


def programs_of(model, *inputs, **options):
    """The text of the programs, without where their lines are."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
    call(*inputs).sum().backward()
    return [str(program) for program in ipu_dynamo.programs()]


@pytest.mark.inductor
def test_the_engine_has_no_say_in_the_programs():
    x = torch.ones(2, 4)
    assert programs_of(Net(), x, engine="eager") == programs_of(Net(), x, engine="inductor")


def test_backward_repeats_cheap_operators_unless_told_not_to():
    class Cheap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return torch.cos(torch.sin(h) * 2) + h

    model, x = Cheap(), torch.randn(8, 4)
    expected = gradients(model, model, x)
    for recompute, repeated in (("auto", 1), ("cheap", 1), ("off", 0)):
        torch._dynamo.reset()
        options = {"engine": "eager", "recompute": recompute}
        call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
        torch.testing.assert_close(gradients(model, call, x), expected)
        forward, backward = (str(p.functions[0].listing()) for p in ipu_dynamo.programs())
        assert forward.count("= aten.sin(%addmm)") == 1
        assert backward.count("= aten.sin(%addmm)") == repeated
    with pytest.raises(OptionError, match="recompute"):
        ipu_dynamo.BackendOptions(recompute="stages")


def test_a_serialised_loss_is_one_loop_in_each_direction():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.words = nn.Linear(4, 6), nn.Embedding(12, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.first(x)
            scores = ipu_dynamo.serialized_matmul(h, self.words.weight.t(), "output_channels", 3)
            return F.cross_entropy(scores, y)

    model, inputs = Head(), (torch.randn(8, 4), torch.arange(8))
    expected = gradients(model, model, *inputs)
    torch.testing.assert_close(gradients(model, compiled(model), *inputs), expected)
    forward, backward = ("\n".join(f.listing() for f in p.functions) for p in ipu_dynamo.programs())
    assert "ipu.serialized_loss(" in forward
    assert "ipu.serialized_loss_backward(" in backward
    assert "_log_softmax" not in forward + backward


@pytest.mark.parametrize("recompute", ["cheap", "off"])
def test_backward_repeats_nothing_of_an_input_that_the_model_changes(recompute):
    def scale(y, factor):
        y *= factor  # in place: the gradient of the factor needs what was there
        return y

    factor = torch.tensor(3.0, requires_grad=True)
    options = {"engine": "eager", "recompute": recompute}
    call = torch.compile(scale, backend=ipu, fullgraph=True, options=options)
    call(torch.arange(4.0), factor).sum().backward()
    assert factor.grad == 6


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Annealed(nn.Module):
    """A number that changes between calls, and a backward of the user's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.temperature = nn.Linear(6, 6), nn.Linear(6, 3), 1.0

    def forward(self, x):
        return self.second(Halved.apply(self.first(x))) / self.temperature


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"recompute": "off"}, {}])
def test_operators_that_pytorch_gives_no_direction_are_backward_behind_gradients(options):
    model, expected = Annealed(), Annealed()
    call = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": "eager"} | options)
    x = torch.randn(8, 6)
    for epoch in range(3):
        model.temperature = expected.temperature = 1.0 - 0.3 * epoch
        call(x).pow(2).mean().backward()
        expected(x).pow(2).mean().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
