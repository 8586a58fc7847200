"""Check the parts of a placed graph: what they compute, read, make, save and repeat."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    Block,
    ClipGradNorm,
    CompileError,
    Options,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.testing import assert_same_bits, assert_same_inference, assert_same_training

EAGER = {"engine": "eager"}


class Skips(nn.Module):
    """Four stages on three IPUs: skips, a shared weight, a way back to IPU 0."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, y):
        with Block("a", 0):
            a = self.layers[0](x)
        with Block("b", 1):
            b = torch.tanh(self.layers[1](a))
        with Block("c", 2):
            c = torch.sigmoid(self.layers[2](b) + a) @ self.layers[0].weight
        with Block("d", 0):
            d = self.layers[3](c) * b + a
            return F.mse_loss(d, y), d


def batch(rows=6, width=4):
    torch.manual_seed(0)
    return torch.randn(rows, width), torch.randn(rows, width)


def parts(program):
    return [(call.stage, call.direction, call.ipu) for call in program.calls]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_parts_compute_what_the_whole_does(accumulation):
    torch.manual_seed(0)
    options = Options(engine="eager", gradient_accumulation=accumulation)
    step = assert_same_training(Skips(), [batch()] * 3, options)
    assert parts(step.program) == [
        (0, "forward", 0),
        (1, "forward", 1),
        (2, "forward", 2),
        (3, "forward_backward", 0),
        (2, "backward", 2),
        (1, "backward", 1),
        (0, "backward", 0),
    ]


def test_every_value_is_made_before_it_is_read():
    model = Skips()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    step(*batch())
    known = {v.name for v in step.program.variables}
    for instruction in step.program.walk():
        for name in getattr(instruction, "arguments", ()):
            assert name in known
        for name in (getattr(instruction, "result", None), *getattr(instruction, "results", ())):
            known.add(name)


def test_views_of_values_are_repeated_and_not_copied():
    def model(x):
        with Block("a", 0):
            h = torch.sin(x)
            t = h.t().unflatten(0, (2, 2))
        with Block("b", 1):
            return t + 1

    compiled = assert_same_inference(wrapped(model), [batch()[0]], EAGER)
    (copy,) = compiled.program.copies
    assert copy.type.shape == (6, 4)


def test_small_view_is_copied_instead_of_the_whole():
    def model(x):
        with Block("a", 0):
            h = torch.sin(x)[:1]
        with Block("b", 1):
            return h + 1

    compiled = assert_same_inference(wrapped(model), [batch()[0]], EAGER)
    (copy,) = compiled.program.copies
    assert copy.type.shape == (1, 4)


def test_constants_are_repeated_and_not_copied():
    def model(x):
        with Block("a", 0):
            ones = torch.ones(4)
            h = x + ones
        with Block("b", 1):
            return h * ones

    compiled = assert_same_inference(wrapped(model), [batch()[0]], EAGER)
    assert len(compiled.program.copies) == 1


def test_value_that_two_later_stages_read_is_copied_to_each():
    def model(x):
        with Block("a", 0):
            h = torch.sin(x)
        with Block("b", 1):
            b = h * 2
        with Block("c", 2):
            return b + h

    compiled = assert_same_inference(wrapped(model), [batch()[0]], EAGER)
    assert [(c.src, c.dst) for c in compiled.program.copies] == [(0, 1), (0, 2), (1, 2)]


def wrapped(function):
    module = nn.Module()
    module.forward = function
    return module


# --- Outputs ------------------------------------------------------------------------------------


class Aliases(nn.Module):
    """Returns inputs, parameters, buffers, views and repetitions of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.add_(1)
        y = x * 2
        return x, x, self.weight, self.seen, y, y[0:1], y.t(), self.weight[0], x.view(-1)


def test_returned_tensors_share_no_memory():
    model, x = Aliases(), torch.randn(2, 3)
    before = x.clone()
    run = compile_inference(model, EAGER)
    results = run(x)
    memories = [r.untyped_storage().data_ptr() for r in (*results, x, model.weight, model.seen)]
    assert len(set(memories)) == len(memories)
    assert all(r.is_contiguous() for r in results)
    for result in results:
        result.fill_(100)
    assert torch.equal(x, before)
    assert model.weight.tolist() == [1, 1, 1]
    assert model.seen.tolist() == [1, 1, 1]


def test_aliases_have_the_right_values():
    assert_same_inference(Aliases(), [torch.randn(2, 3)] * 3, EAGER)


def test_model_that_computes_nothing_returns_its_input():
    x = torch.randn(2, 3)
    assert torch.equal(compile_inference(lambda x: x, EAGER)(x), x)


# --- Variables that change ----------------------------------------------------------------------


class Counter(nn.Module):
    """A buffer that changes on IPU 0 and is read before and after, there and on IPU 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        with Block("a", 0):
            old = self.count * 10
            self.count.add_(1)
            h = x + old
        with Block("b", 1):
            return h + self.count * 100, old


def test_buffer_is_read_as_it_was_where_the_model_reads_it():
    options = Options(engine="eager", device_iterations=2)
    assert_same_inference(Counter(), [torch.zeros(2, 2)] * 3, options)


def test_gradient_uses_the_buffer_from_before_its_change():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x, y):
            with Block("a", 0):
                h = self.layer(x) * self.scale.clone()
                self.scale.mul_(2)
            with Block("b", 1):
                return F.mse_loss(h, y)

    assert_same_training(Scaled(), [batch(4, 2)] * 3, EAGER)


def test_functions_of_a_step_are_pure_and_write_accumulators_on_the_host():
    model = Skips()
    options = {"engine": "eager", "gradient_accumulation": 2}
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    step(*batch())
    kinds = {v.name: v.kind for v in step.program.variables}
    assert [f.written for f in step.program.functions] == [()] * len(step.program.functions)
    inlined = step.executable.host_program.inlined
    functions = {f.name: f for f in inlined.functions}
    written = set()
    for call in inlined.calls:
        written |= {kinds[call.arguments[i]] for i in functions[call.function].written}
    assert written == {"accumulator"}


# --- Names -----------------------------------------------------------------------------------


def test_parameters_whose_names_are_one_identifier_stay_two():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Module()
            self.a.b = nn.Parameter(torch.full((2,), 2.0))
            self.a_b = nn.Parameter(torch.full((2,), 3.0))
            self.add = nn.Parameter(torch.full((2,), 5.0))

        def forward(self, x, y):
            return F.mse_loss(x * self.a.b + self.a_b + self.add, y)

    assert_same_training(Model(), [batch(4, 2)] * 2, EAGER)


def test_input_may_be_called_like_a_parameter_or_a_stream_of_the_program():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.full((2,), 2.0))

        def forward(self, x, random_key, accumulation_weight):
            kept = F.dropout(random_key, 0.0)
            return F.mse_loss(x * self.x + kept, accumulation_weight)

    one = torch.ones(4, 2)
    options = Options(engine="eager", gradient_accumulation=2, mean_strategy="running")
    assert_same_training(Model(), [(one, one * 2, one * 3)] * 2, options)


# --- Accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_running_mean_of_half_gradients_uses_every_micro_batch(engine):
    model = nn.Linear(2, 1).half()
    model.forward = lambda x, y, f=model.forward: F.mse_loss(f(x), y)
    options = Options(engine=engine, gradient_accumulation=4, mean_strategy="running")
    x, y = torch.ones(4, 2).half(), torch.tensor([[1.0], [2.0], [3.0], [4.0]]).half()
    before = model.weight.detach().clone().float(), model.bias.detach().clone().float()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    step(x, y)
    output = x.float() @ before[0].t() + before[1]
    gradient = (2 * (output - y.float())).mean()
    assert torch.allclose(before[1] - model.bias.float(), gradient, rtol=5e-3)


def test_two_compilations_give_the_same_bits():
    def train():
        torch.manual_seed(0)
        model = Skips()
        step = compile_training(model, torch.optim.Adam(model.parameters(), lr=0.1), EAGER)
        return [step(*batch()) for _ in range(3)], dict(model.named_parameters())

    assert_same_bits(train(), train())


class Counting(nn.Module):
    """Has a weight, a buffer that it changes, and inputs by any name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, **inputs):
        before = self.seen.clone()
        self.seen.add_(1)
        return identity_loss(sum(x * self.weight * before for x in inputs.values()), "sum")


NAMES = ["weight.grad", "weight..grad", "seen..before", "seen..new", ".clip.factor", "new", ""]


@pytest.mark.parametrize("name", NAMES)
def test_an_input_may_have_any_name(name):
    model, data = Counting(), {name: torch.tensor([[1.0, 2.0]]), "x": torch.ones(1, 2)}
    assert_same_training(model, [data] * 2, EAGER)


class Named(nn.Module):
    """Has parameters by any path, and two stages."""

    def __init__(self, paths):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.paths = paths
        for number, path in enumerate(paths):
            *modules, name = path.split(".")
            owner = self
            for module in modules:
                if not hasattr(owner, module):
                    owner.add_module(module, nn.Module())
                owner = getattr(owner, module)
            owner.register_parameter(name, nn.Parameter(torch.tensor(1 + number / 8)))

    def forward(self, x, y):
        with Block("first", 0):
            h = F.dropout(torch.tanh(self.first(x)), 0.0)
            for path in self.paths[::2]:
                h = h * self.get_parameter(path)
        with Block("second", 1):
            h = self.second(h)
            for path in self.paths[1::2]:
                h = h + self.get_parameter(path)
            return F.mse_loss(h, y)


class AnyKeys(torch.optim.Optimizer):
    """Keeps states under names that a program has for other things."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for number, key in enumerate(("grad", "new", "on1", "state.grad", "x"), 1):
                    state[key] = state.get(key, torch.zeros_like(p)) / number + p.grad
                    p.sub_(state[key], alpha=group["lr"] / number)


MADE = [
    "accumulation_weight",
    "clip.factor",
    "clip.norm.ipu0",
    "clip.norm.ipu1.on0",
    "group0.ipu0.momentum_started",
    "group0.ipu1.step",
    "group0.mu_product",
    "group0.step",
    "mul_1.on1",
    "mm.on0",
    "mse_loss.returned0",
    "optimizer.step",
    "random_key",
    "replica_index",
    "tanh",
    "tanh_value",
    "update.epoch",
    "update.factor0",
    "update.factor1.on1",
]
UPDATES = {
    "SGD": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01),
    "NAdam": lambda own: torch.optim.NAdam(own, lr=0.01),
    "AnyKeys": lambda own: AnyKeys(own, lr=0.1),
}
SCALES = {"loss_scale": 8.0, "loss_scale_is_variable": True}


@pytest.mark.parametrize(
    ("update", "scale"),
    [
        ("SGD", "loss_scale"),
        ("AdamW", "loss_scale.steps"),
        ("AnyKeys", "loss_scale.within0"),
        pytest.param("NAdam", "loss_scale", marks=pytest.mark.slow),
    ],
)
def test_a_parameter_may_be_called_like_what_a_program_makes(update, scale):
    model = Named([*MADE, scale])
    other = copy.deepcopy(model)
    optimizer, theirs = (UPDATES[update](list(m.parameters())) for m in (model, other))
    options = Options(engine="eager", gradient_accumulation=2, mean_strategy="running", **SCALES)
    step = compile_training(model, optimizer, options, clip=ClipGradNorm(0.5))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    for _ in range(3):
        step(x, y)
        theirs.zero_grad()
        other(x, y).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


def test_a_path_with_an_empty_part_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    setattr(model[0], "", nn.Linear(4, 4))  # add_module refuses it
    model.forward = lambda x: identity_loss(model[0]._modules[""](model[0](x)), "sum")
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    with pytest.raises(
        CompileError, match=r"the name of parameter '0\.\.weight' has an empty part"
    ):
        step(torch.ones(2, 4))


def test_module_paths_have_no_empty_part():
    module = nn.Module()
    for name in ("", ".", "a.", ".a", "a..b"):
        with pytest.raises(KeyError):
            module.register_parameter(name, nn.Parameter(torch.ones(1)))
        with pytest.raises(KeyError):
            module.register_buffer(name, torch.ones(1))
        with pytest.raises(KeyError):
            module.add_module(name, nn.Module())
