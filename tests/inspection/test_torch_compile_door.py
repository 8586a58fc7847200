"""Check what `inspect` and `explain` show of functions and modules of `torch.compile`."""

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    Block,
    CompileError,
    InputError,
    IpuError,
    Strategy,
    explain,
    inspect,
)
from ipu_dynamo.inspection.private import version_counters
from ipu_dynamo.testing import assert_same_bits
from tests.inspection.looking import EAGER, check_members, nothing_changes

X = torch.arange(32.0).reshape(8, 4) / 32
GLOBAL = nn.BatchNorm1d(4)


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.drop, self.second = nn.Dropout(0.5), nn.Linear(width, 2)
        BeginBlock(self.first, "encoder", ipu_id=1)
        BeginBlock(self.second, "decoder", ipu_id=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3)
        self.seen: list[int] = []
        self.calls = 0

    def part(self, y):
        y = y.sin()
        print()
        return y.cos()

    def forward(self, x):
        self.calls += 1
        with Block("a"):
            y = x * 2
        print()
        with Block("b"):
            y = y + 1
        return self.lstm(self.part(y))[0]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(model, **options):
    return torch.compile(model, backend="ipu", options={**EAGER, **options})


def kinds(seen):
    return [entry.program.kind for entry in seen.programs]


def test_members_after_a_call(monkeypatch):
    model = Model()
    run = compiled(model)
    run(X).sum().backward()
    with nothing_changes(monkeypatch, model):
        seen = check_members(run)
    assert kinds(seen) == ["forward", "backward"]
    assert seen.program is seen.programs[1]
    run(X)
    assert inspect(run).program.program is seen.programs[0].program
    (graph,) = seen.graphs
    places = [(place.block, place.stage, place.ipu) for place in graph.blocks]
    assert places == [("'encoder'", 0, 1), ("'decoder'", 1, 0)]
    assert sum(place.operators for place in graph.blocks) == graph.operators
    assert [kind for kind, _ in seen.passes] == ["captured", "joint", "forward", "backward"]
    assert "test_torch_compile_door.py" in graph.first_line
    assert repr(seen) == "<torch.compile of Model: 2 programs>"
    assert [row.layers for row in seen.programs[0].cut.rows] == [("first", "norm"), ("second",)]
    assert "block 'encoder' -> stage 0 -> ipu1" in seen.details
    assert "(the last call)" in str(inspect(run)).splitlines()[1]


def test_the_module_itself_and_modules_of_its_class_show_the_same():
    model = Model()
    compiled(model)(X)
    expected = [entry.program for entry in inspect(model).programs]
    assert len(expected) == 2
    assert [entry.program for entry in inspect(Model()).programs] == expected
    assert inspect(Model(width=6)).programs == ()  # no graph has its shapes
    assert [entry.program for entry in inspect(compiled(model)).programs] == expected


def test_modules_of_torchs_own_classes_are_told_apart():
    small, large = nn.Sequential(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    alone = nn.Linear(4, 2)
    for model in (small, large, alone):
        compiled(model)(X)
    counts = [len(inspect(model).programs) for model in (small, large, alone)]
    assert counts == [2, 2, 2]
    assert len(inspect(large).program.program.variables) == 4


def test_functions_and_methods():
    def twice(x):
        return x * 2

    run, whole = compiled(twice), torch.compile(twice, backend="ipu", options=EAGER, fullgraph=True)
    run(X)
    assert kinds(inspect(run)) == ["inference"]
    assert repr(inspect(run)).startswith("<torch.compile of twice: 1 stage on 1 IPU")
    whole(X)
    assert inspect(whole).programs
    model = Model().eval()
    method = compiled(model.forward)
    with torch.no_grad():
        method(X)
    assert kinds(inspect(method)) == ["inference"]
    with pytest.raises(
        InputError, match="inspect takes a compiled model, and not an object of class int"
    ):
        inspect(3)


def test_another_backend_is_none_of_ours():
    model = Model()
    torch.compile(model, backend="eager")(X)
    assert inspect(model).programs == ()
    assert "not compiled yet; call it, or `explain(x, *inputs)`" in str(inspect(model))


def test_graphs_after_breaks_and_reasons_with_lines(monkeypatch):
    model = Broken()
    run = compiled(model)
    with warnings.catch_warnings(action="ignore"):
        run(torch.randn(2, 3))
    with nothing_changes(monkeypatch, model):
        seen = check_members(run)
    assert len(seen.graphs) == 4  # before and after each of two breaks
    breaks = [reason for reason in seen.reasons if reason.kind == "graph break"]
    assert [reason.where for reason in breaks] == [
        _line("print()", 2),
        _line("self.lstm("),
        _line("print()", 1),
    ]
    assert "Failed to trace builtin operator" in breaks[0].text
    assert breaks[1].text.startswith("PyTorch cannot trace what the line calls")
    explained = explain(model, torch.randn(2, 3), options=EAGER)
    (skipped,) = (reason for reason in explained.reasons if reason.kind == "not captured")
    assert "RNN, GRU, or LSTM" in skipped.text
    assert "allow_rnn = True" in skipped.text


def _line(text: str, number: int = 1) -> str:
    """Where a text stands in this file, for the `number`th time."""
    with open(__file__) as file:
        lines = [line for line, content in enumerate(file, 1) if text in content]
    return f"test_torch_compile_door.py:{lines[number - 1]}"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_reasons_of_a_model_in_no_program_before_and_after_a_call(engine):
    model, x = Tagger(), torch.randn(2, 8)
    reason = "not captured at test_torch_compile_door.py"
    options = {"engine": engine}
    assert reason in str(explain(model, x, options=options))
    torch._dynamo.reset()
    run = torch.compile(model, backend="ipu", options=options)
    run(x)
    for seen in (explain(run, x), explain(model, x), inspect(run)):
        assert reason in str(seen)
        assert seen.programs == ()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch._dynamo.reset()
        run(x)
        assert "not captured" not in str(inspect(run))


def test_each_object_shows_only_errors_of_its_own():
    fresh, wrong, recurrent = nn.Linear(4, 4), nn.Linear(3, 3), nn.LSTM(4, 4)
    inside = nn.Sequential(nn.Linear(4, 8), Tagger())
    with pytest.raises(RuntimeError, match="reduction dim"):
        compiled(wrong)(X)
    compiled(recurrent)(X)
    compiled(inside)(X)
    for model in (fresh, nn.LSTM(4, 4), nn.Sequential(nn.Linear(4, 8))):
        assert inspect(model).reasons == ()
        assert "not compiled yet" in str(inspect(model))
    for model, what in ((wrong, "fake tensor"), (recurrent, "LSTM"), (inside, "LSTM")):
        assert what in str(inspect(model).reasons[0])
    torch._dynamo.reset()
    assert inspect(recurrent).reasons == ()


def test_an_object_whose_class_pytorch_skips_shows_why():
    first, other = Tagger(), Tagger()
    compiled(first)(torch.randn(2, 8))
    compiled(other)(torch.randn(2, 8))  # PyTorch does not look at its code again
    assert "another Tagger" not in str(inspect(first))
    (reason,) = inspect(other).reasons
    assert "LSTM" in reason.text
    assert "of another Tagger" in reason.text


def test_an_error_is_forgotten_when_the_next_call_compiles():
    model = nn.Linear(3, 3)
    run = compiled(model)
    with pytest.raises(RuntimeError, match="reduction dim"):
        run(X)
    assert inspect(model).reasons
    run(X[:, :3])
    assert inspect(model).programs
    assert inspect(model).reasons == ()


def test_an_error_that_the_user_handles_is_no_reason():
    model = Model()
    try:
        raise ValueError
    except ValueError:
        compiled(model)(X)
    assert len(inspect(model).programs) == 2
    assert inspect(model).reasons == ()


def test_errors_of_other_backends_are_not_shown():
    model = Tagger()
    torch.compile(model, backend="eager")(torch.randn(2, 8))
    assert inspect(model).reasons == ()


def test_explain_compiles_anew_and_leaves_all_as_it_was():
    torch.manual_seed(3)
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    seen = explain(model, X, options=EAGER)
    assert kinds(seen) == ["forward", "backward"]
    assert all(torch.equal(model.state_dict()[name], old) for name, old in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model)
    assert inspect(model).programs == ()
    with torch.no_grad():
        assert kinds(explain(model, X, options=EAGER)) == ["inference"]

    given = torch.zeros(3)
    explain(lambda t: t.add_(1), given, options=EAGER)
    assert given.tolist() == [0.0, 0.0, 0.0]
    broken = Broken()
    with warnings.catch_warnings(action="ignore"):
        explain(broken, torch.randn(2, 3), options=EAGER)
    assert broken.calls == 0


def test_explain_of_what_has_a_program_runs_nothing(monkeypatch):
    model = Model()
    run = compiled(model, micro_batches=2)
    explained = explain(run, X)  # with the options of torch.compile
    assert "options: engine = 'eager', micro_batches = 2" in str(explained)
    assert "micro_batches = 2  (given)" in explained.details
    run(X)
    with nothing_changes(monkeypatch, model):
        assert str(explain(run, X)) == str(inspect(run))
    assert inspect(run).program.micro_batches in (1, 2)


@pytest.mark.inductor
def test_which_library_computes_products(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_MATMUL", "onednn")
    model = nn.Linear(4, 4)
    explained = explain(model, X, options={"engine": "inductor"})
    text = explained.details
    assert "1 x tiny a @ b.t(): onednn" in text
    assert "1 x tiny a.t() @ b: onednn" in text
    assert "tiny" not in explain(model, X, options=EAGER).details


def test_who_set_the_options(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    explained = explain(Model(), X, options={"micro_batches": 2})
    by = {setting.name: (setting.value, setting.by) for setting in explained.settings}
    assert by["engine"] == ("eager", "environment variable IPU_DYNAMO_ENGINE")
    assert by["micro_batches"] == (2, "given")
    assert by["fallback"] == ("error", "default")
    assert by["strategy"] == (
        Strategy(kind="pipelined"),
        "default, made pipelined by micro_batches",
    )
    assert "fallback = 'error'  (default)" in explained.details


def test_what_cannot_be_placed():
    options = {"engine": "eager", "fallback": "allow"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = explain(lambda x: x[x > 0], torch.randn(4), options=options)
        (graph,) = explained.graphs
        assert graph.programs == ()
        assert "not placed: " in str(explained)
        assert "1 x indexing: the shape of a result" in str(explained)
        with pytest.raises(CompileError, match="cannot be placed"):
            explain(lambda x: x[x > 0], torch.randn(4), options=EAGER)


def test_programs_that_are_gone_are_not_shown():
    run = compiled(Model())
    run(X)
    torch._dynamo.reset()
    assert inspect(run).programs == ()
    assert ipu_dynamo.programs() == ()


def test_explain_leaves_all_as_it_was_for_functions_and_after_errors():
    """Also what a function closes over, and a backward pass that is to come."""
    model, given = Model(), torch.zeros(8, 4)
    model.first.weight.data[0, 0] = torch.nan

    def function(x):
        given.add_(1)
        return model(x + given)

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls, self.seen = nn.BatchNorm1d(4), 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(self.calls)
            y = self.norm(x)
            torch._dynamo.graph_break()
            return y + torch.ones(3)

    failing = Failing()
    tensors = [*model.state_dict().values(), *failing.state_dict().values(), given]
    before = [tensor.clone() for tensor in tensors]
    loss = model.first(X).tanh().sum()
    with warnings.catch_warnings(action="ignore"):
        assert kinds(explain(function, X, options=EAGER)) == ["forward", "backward"]
        explain(model, X, options=EAGER)
        with pytest.raises(Exception, match="broadcast"):
            explain(failing, X, options=EAGER)
    assert_same_bits(tensors, before)
    assert (failing.calls, failing.seen) == (0, [])
    loss.backward()


@pytest.mark.parametrize("run", [lambda model: model, lambda model: lambda x: model(x)])
def test_a_backward_pass_that_is_to_come_is_the_same_after_explain(run):
    """A batch norm in training writes its statistics, and autograd keeps them."""

    def gradients(look):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        loss = model(X).sum() + (model[1].running_var * model[1].weight).sum()
        if look:
            explain(run(model), X, options=EAGER)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], [*model.buffers()]

    assert_same_bits(gradients(look=True), gradients(look=False))


def test_explain_leaves_modules_that_a_function_names_as_they_were():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(self.calls)
            return x * 2

    class Owner:
        def __init__(self):
            self.inner = Counting()

        def run(self, x):
            return self.inner(x)

    closed, listed, owner = Counting(), [Counting()], Owner()

    def function(x):
        return listed[0](closed(x)) + GLOBAL(x)

    explain(function, X, options=EAGER)
    explain(owner.run, X, options=EAGER)
    for module in (closed, *listed, owner.inner, GLOBAL):
        assert (module.training, getattr(module, "calls", 0)) == (True, 0)
        assert getattr(module, "seen", []) == []
    assert GLOBAL.num_batches_tracked.item() == 0


def test_a_pytorch_that_cannot_take_back_writes_is_refused_before_anything_runs(monkeypatch):
    model, called = Model(), []
    model.register_forward_hook(lambda *_: called.append(0))
    monkeypatch.setattr(version_counters, "_unsafe_set_version_counter", None)
    with pytest.raises(IpuError, match="cannot take back writes to tensors"):
        explain(model, X, options=EAGER)
    assert called == []
    monkeypatch.setattr(version_counters, "_unsafe_set_version_counter", lambda *_: None)
    with pytest.raises(IpuError, match="has not taken back writes"):
        explain(Model(), X, options=EAGER)


def test_explain_gives_lazy_modules_no_shape():
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    (graph,) = explain(lazy, X, options=EAGER).graphs
    assert "parameter %0.weight: f32[3,4]" in graph.programs[0].text
    assert type(lazy[0]) is nn.LazyLinear
    assert lazy[0].has_uninitialized_params()
    with pytest.raises(InputError, match="a lazy module of the function has no shapes yet"):
        explain(lambda x: lazy(x), X, options=EAGER)
    assert lazy(X).shape == (8, 3)


def test_a_class_is_nothing_to_look_at():
    """PyTorch would compile all of its objects from then on."""
    for look in (inspect, explain):
        with pytest.raises(InputError, match="a compiled model, and not the class Linear"):
            look(nn.Linear)


def test_functions_that_name_themselves_are_followed_once():
    def wrapped(forward):
        @functools.wraps(forward)
        def call(self, x=None):
            return forward(self, x) if x is not None else call(self, X)

        return call

    class Wrapped(nn.Module):
        @wrapped
        def forward(self, x):
            return torch.tanh(x)

    model = Wrapped()
    assert "not compiled yet" in str(inspect(model))
    torch.compile(model, backend="ipu", options=EAGER)(X)
    assert inspect(model).programs
