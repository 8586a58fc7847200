"""Check that groups of replicas train weights of their own, against copies of the model that do
nothing together but add up gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    CompileError,
    Options,
    ReplicaGroups,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.program import AllReduce, Program
from ipu_dynamo.testing import assert_close, assert_same_bits, assert_same_training

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.001, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}


class Net(nn.Module):
    """Two products on two IPUs, and statistics; the tensors in `groups` have a slice for each
    group."""

    def __init__(self, groups=(), replicas=1, seed=0):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.linear = BeginBlock(nn.Linear(3, 4), "linear", 0)
        self.w, self.b = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(4))
        self.norm = nn.BatchNorm1d(4)
        self.out = BeginBlock(nn.Linear(4, 2), "out", 1)
        self.double()
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            path, _, leaf = name.rpartition(".")
            lead = (groups[name].count(replicas),) if name in groups else ()
            value = torch.randn((*lead, *tensor.shape), generator=rng, dtype=torch.float64)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value)
            setattr(self.get_submodule(path), leaf, value)

    def forward(self, x, y):
        assert self.w.shape == (4, 4)
        value = self.linear(x)
        hidden = torch.tanh(value @ self.w * self.b + self.shift) + self.norm(value)
        return nn.functional.mse_loss(self.out(hidden), y)


def slice_of(model, groups, replica, replicas):
    """A copy of `model` with what `replica` has of the grouped tensors."""
    twin = copy.deepcopy(model)
    for name, of in groups.items():
        path, _, leaf = name.rpartition(".")
        module = twin.get_submodule(path)
        value = getattr(module, leaf).detach()[of.of(replicas)[replica]].clone()
        setattr(module, leaf, nn.Parameter(value) if leaf in module._parameters else value)
    return twin


def simulate(model, options, make_optimizer, data):
    """Train R copies; return losses in the order [D, A, R], the tensors with their groups, and the
    statistics of every replica."""
    R, A, D = options.replicas, options.gradient_accumulation, options.device_iterations
    groups, reads = options.replica_groups, options.input_replica_groups
    copies = [slice_of(model, groups, r, R) for r in range(R)]
    optimizers = [make_optimizer(twin.parameters()) for twin in copies]
    losses = []
    for x, y in data:
        shape = (D, A, reads.count(R), -1)
        x, y = x.view(*shape, 3), y.view(*shape, 2)
        for d in range(D):
            for a in range(A):
                for r, twin in enumerate(copies):
                    loss = twin(x[d, a, reads.of(R)[r]], y[d, a, reads.of(R)[r]])
                    loss.backward()
                    losses.append(loss.detach())
            for name, _ in model.named_parameters():
                owned = [twin.get_parameter(name) for twin in copies]
                sums = groups.get(name, ReplicaGroups(R))
                gradients = [p.grad for p in owned]
                for members in sums.members(R):
                    total = sum(gradients[r] for r in members)
                    for r in members:
                        owned[r].grad = total / (A * R if options.reduction == "mean" else 1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    tensors = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        values = [dict(twin.state_dict())[name] for twin in copies]
        if name.startswith("norm.") and name not in dict(model.named_parameters()):
            tensors[name] = values[0]
            continue
        for members in groups.get(name, ReplicaGroups(R)).members(R):
            for r in members:
                assert_same_bits(values[r], values[members[0]])
        if name in groups:
            tensors[name] = torch.stack([values[m[0]] for m in groups[name].members(R)])
        else:
            tensors[name] = values[0]
    statistics = [dict(twin.norm.named_buffers()) for twin in copies]
    return torch.stack(losses), dict(sorted(tensors.items())), statistics


def sizes(replicas):
    return [n for n in range(1, replicas + 1) if replicas % n == 0]


@st.composite
def grouped_options(draw, **fixed):
    """Options with up to six replicas and groups for some tensors of a `Net`."""
    replicas = draw(st.sampled_from([2, 3, 4, 6]))
    of = st.builds(ReplicaGroups, st.sampled_from(sizes(replicas)), st.booleans())
    names = ["linear.weight", "w", "b", "shift", "out.bias"]
    pipelined = draw(st.booleans())
    return Options(
        engine="eager",
        replicas=replicas,
        replica_groups=draw(st.dictionaries(st.sampled_from(names), of, min_size=1)),
        device_iterations=draw(st.integers(1, 2)),
        gradient_accumulation=draw(st.integers(3 if pipelined else 1, 4)),
        input_group_size=draw(st.sampled_from(sizes(replicas))),
        input_groups_orthogonal=draw(st.booleans()),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        mean_strategy=draw(st.sampled_from(["post", "running", "post_and_loss"])),
        strategy=Strategy(kind="pipelined" if pipelined else "sharded"),
        workers=draw(st.sampled_from([1, 3])),
        output_mode="all",
        **fixed,
    )


def tolerance(options):
    """1 / (k + 1) of a running mean comes in float32."""
    return {"rtol": 1e-5 if options.mean_strategy == "running" else 1e-8, "atol": 1e-10}


def data_for(options, calls=2, seed=1):
    rng = torch.Generator().manual_seed(seed)
    rows = 4 * options.device_iterations * options.gradient_accumulation * options.input_groups
    return [
        tuple(torch.randn(rows, n, generator=rng, dtype=torch.float64) for n in (3, 2))
        for _ in range(calls)
    ]


NUMBER_OF_EACH = Options(
    "eager", replicas=2, replica_groups={"b": ReplicaGroups(1)}, output_mode="all"
)


@pytest.mark.examples(10)
@given(options=grouped_options(), kind=st.sampled_from(list(OPTIMIZERS)))
def test_training_agrees_with_copies_that_add_gradients(options, kind):
    model = Net(options.replica_groups, options.replicas)
    expected, tensors, statistics = simulate(model, options, OPTIMIZERS[kind], data_for(options))
    step = compile_training(model, OPTIMIZERS[kind](model.parameters()), options)
    losses = torch.cat([step(x, y) for x, y in data_for(options)])
    assert_close(losses, expected, **tolerance(options))
    assert_close(dict(sorted(model.state_dict().items())), tensors, **tolerance(options))
    for replica, buffers in enumerate(statistics):
        held = {name: step.executable.tensor(f"norm.{name}", replica) for name in buffers}
        assert_close(held, buffers, **tolerance(options))


@pytest.mark.examples(10)
@given(options=grouped_options(), kind=st.sampled_from(list(OPTIMIZERS)))
@example(NUMBER_OF_EACH, "adam")  # whose count of steps has the shape of the parameter
def test_weights_and_states_of_groups_agree_with_pytorch(options, kind):
    """`assert_same_training` also compares the optimiser's states, after every call."""
    model = Net(options.replica_groups, options.replicas)
    assert_same_training(
        model,
        data_for(options, 3),
        options,
        optimizer=lambda m: OPTIMIZERS[kind](m.parameters()),
        **tolerance(options),
    )


@pytest.mark.slow
@pytest.mark.examples(10)
@given(options=grouped_options(), kind=st.sampled_from(list(OPTIMIZERS)))
def test_training_goes_on_from_a_checkpoint(options, kind):
    first, *rest = data_for(options, 3)
    model = Net(options.replica_groups, options.replicas)
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = compile_training(model, optimizer, options)
    step(*first)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = [step(*data) for data in rest]

    other = Net(options.replica_groups, options.replicas, seed=9)
    other.load_state_dict(weights)
    fresh = OPTIMIZERS[kind](other.parameters())
    fresh.load_state_dict(states)
    again = compile_training(other, fresh, options)
    assert_same_bits([again(*data) for data in rest], expected)
    assert_same_bits({**other.state_dict()}, {**model.state_dict()})


@pytest.mark.examples(10)
@given(options=grouped_options())
def test_inference_uses_the_weights_of_each_group(options):
    replicas = options.replicas
    model = Net(options.replica_groups, replicas)
    options = replace(options, device_iterations=2)  # a pipeline of two stages is full
    x, y = data_for(replace(options, gradient_accumulation=1))[0]
    got = compile_inference(model, options)(x, y)
    reads = options.input_replica_groups
    shape = (options.device_iterations, reads.count(replicas), -1)
    twins = [slice_of(model, options.replica_groups, r, replicas) for r in range(replicas)]
    blocks = zip(x.view(*shape, 3), y.view(*shape, 2), strict=True)
    with torch.no_grad():
        expected = [
            twins[r](xs[reads.of(replicas)[r]], ys[reads.of(replicas)[r]])
            for xs, ys in blocks
            for r in range(replicas)
        ]
    assert_close(got, torch.stack(expected), rtol=1e-9, atol=1e-12)


class Counter(nn.Module):
    """Counts its calls, and adds the count to its input."""

    def __init__(self, groups):
        super().__init__()
        self.register_buffer("count", 10.0 * torch.arange(groups))
        self.register_buffer("kind", torch.arange(groups))

    def forward(self, x):
        self.count += 1
        return x + self.count, self.kind * 1


def test_replicas_change_buffers_of_their_own():
    model = Counter(3)
    groups = {"count": ReplicaGroups(1), "kind": ReplicaGroups(1)}
    run = compile_inference(model, Options("eager", 2, replicas=3, replica_groups=groups))
    y, kind = run(torch.zeros(6))
    assert y.tolist() == [1, 11, 21, 2, 12, 22]
    assert kind.tolist() == [0, 1, 2] * 2  # no input reaches it, and yet replicas differ
    assert model.count.tolist() == [2, 12, 22]


def test_replicas_of_a_group_cannot_change_what_they_share():
    groups = {"count": ReplicaGroups(2), "kind": ReplicaGroups(1)}
    model = Counter(2)
    model.kind = torch.arange(4)
    run = compile_inference(model, Options("eager", replicas=4, replica_groups=groups))
    with pytest.raises(CompileError, match="count, which every group of 2 consecutive replicas"):
        run(torch.zeros(4))


def test_the_program_states_the_groups():
    groups = {"w": ReplicaGroups(2, orthogonal=True), "b": ReplicaGroups(1)}
    options = Options("eager", replicas=4, replica_groups=groups)
    model = Net(groups, 4)
    step = compile_training(model, OPTIMIZERS["adam"](model.parameters()), options)
    step.compile(*data_for(options)[0])
    assert Program.parse(step.program.text()).variables == step.program.variables
    text = str(step.program)
    own = "one per group of 2 orthogonal replicas"
    assert f"parameter %w: f64[4,4]  on ipu0, {own}" in text
    assert f"state %w..exp_avg_sq: f64[4,4]  on ipu0, {own}" in text
    assert "parameter %b: f64[]  on ipu0, one per group of 1 replica" in text
    assert "all_reduce sum over each group of 2 orthogonal replicas (%w..grad)  on ipu0" in text
    reduced = {n for i in step.program.walk() if isinstance(i, AllReduce) for n in i.values}
    assert "b..grad" not in reduced  # nothing to add up
    assert {"linear.weight..grad", "out.bias..grad", "w..grad"} <= reduced


def test_a_second_name_of_a_tensor_will_do():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight = nn.Parameter(torch.randn(2, 2, 2))

        def forward(self, x):
            return self.b(self.a(x))

    model, x = Tied(), torch.randn(2, 2)
    options = Options("eager", replicas=2, replica_groups={"b.weight": ReplicaGroups(1)})
    weights = model.a.weight.detach()
    expected = torch.cat([x[r : r + 1] @ weights[r].T @ weights[r].T for r in range(2)])
    assert_close(compile_inference(model, options)(x), expected)
    both = {"a.weight": ReplicaGroups(2), "b.weight": ReplicaGroups(1)}
    model.b.weight = model.a.weight = nn.Parameter(torch.randn(1, 2, 2))
    with pytest.raises((OptionError, CompileError), match="weight"):
        compile_inference(model, Options("eager", replicas=2, replica_groups=both))(x)


@pytest.mark.parametrize(
    ("replica_groups", "message"),
    [
        ({"w": ReplicaGroups(3)}, "groups of 3 for w; their size must divide the 4 replicas"),
        ({"w": 2}, "has 2 for w; give a ReplicaGroups"),
        ("w", "option replica_groups takes a dictionary, not the str 'w'"),
    ],
)
def test_groups_that_cannot_be_are_refused(replica_groups, message):
    with pytest.raises(OptionError, match=message):
        Options(replicas=4, replica_groups=replica_groups)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("v", OptionError, "'v', and the model no parameter.*did you mean"),
        ("linear.weigth", OptionError, "did you mean: linear.weight"),
        ("out.weight", CompileError, r"out.weight has shape \[2, 4\], and 4 groups.*\n.*of 4"),
        ("b", CompileError, r"b has shape \[\], and 4 groups of replicas"),
    ],
)
def test_tensors_that_do_not_fit_their_groups_are_refused(name, error, message):
    options = Options("eager", replicas=4, replica_groups={name: ReplicaGroups(1)})
    with pytest.raises(error, match=message):
        compile_inference(Net(), options)(*data_for(options)[0])
