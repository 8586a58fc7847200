"""Check what replicas exchange within forward, against plain PyTorch on all of them at once."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import (
    Block,
    CompileError,
    IpuError,
    Options,
    ReplicaGroups,
    StageSpec,
    Strategy,
    collectives,
    compile_inference,
    compile_training,
)
from ipu_dynamo.errors import ProgramError
from ipu_dynamo.passes.level_text import parse_level, write_level
from ipu_dynamo.program import Collective, Program, TensorType, Traffic
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.share import OwnReplicas
from ipu_dynamo.runtime.execute.tasks.replica_exchange import ReplicaExchange
from ipu_dynamo.testing import Reference

WIDTH = 3
KINDS = [
    "linear",
    "gather",
    "identical",
    "reduce",
    "reduce_gradient",
    "exchange",
    "chain",
    "shared_weight",
]


# --- The same exchanges in one process -----------------------------------------------------------


class Exchange(torch.autograd.Function):
    """A collective of all replicas' tensors, with the gradient of one of each."""

    @staticmethod
    def forward(ctx, kind, groups, *xs):
        ctx.kind, ctx.groups = kind, groups
        return together(kind, groups, xs)

    @staticmethod
    def backward(ctx, *gradients):
        kind, groups = ctx.kind, ctx.groups
        if kind == "all_reduce":
            return None, None, *gradients
        if kind == "all_reduce_gradient":
            return None, None, *together("all_reduce", groups, gradients)
        if kind == "all_to_all":
            return None, None, *together(kind, groups, gradients)
        if kind == "all_gather":
            gradients = together("all_reduce", groups, gradients)
        place = {r: members.index(r) for members in groups for r in members}
        return None, None, *(gradient[place[r]] for r, gradient in enumerate(gradients))


def together(kind, groups, xs):
    """What each replica gets."""
    results = [None] * len(xs)
    for members in groups:
        of = [xs[member] for member in members]
        for place, member in enumerate(members):
            if kind in ("all_gather", "identical"):
                results[member] = torch.stack(of)
            elif kind == "all_reduce":
                results[member] = torch.stack(of).sum(0)
            elif kind == "all_reduce_gradient":
                results[member] = xs[member].clone()
            else:
                results[member] = torch.cat([x.tensor_split(len(of))[place] for x in of])
    return tuple(results)


# --- Drawn models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer of a drawn model.

    Args:
        groups: of the replicas that exchange; None: all.
        new_stage: it begins a stage.
    """

    kind: str
    groups: ReplicaGroups | None
    new_stage: bool


class Drawn(nn.Module):
    """A model of drawn layers, for one replica, or for all of them."""

    def __init__(self, layers, replicas):
        super().__init__()
        torch.manual_seed(0)
        self.drawn, self.replicas = layers, replicas
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.double()

    def forward(self, x):
        (h,) = self.run([x], self.alone)
        last = sum(layer.new_stage for layer in self.drawn[1:])
        with Block(f"stage{last}", ipu_id=last):
            return h, ipu_dynamo.identity_loss(h.square() + h, "sum")

    def alone(self, kind, groups, xs):
        (x,) = xs
        if kind in ("all_gather", "identical"):
            same = kind == "identical"
            gather = collectives.all_gather
            return [gather(x, self.replicas, groups=groups, identical_gradients=same)]
        return [getattr(collectives, kind)(x, groups=groups)]

    def all(self, xs):
        """Results and losses of all replicas."""

        def exchange(kind, groups, values):
            members = (groups or ReplicaGroups(len(xs))).members(len(xs))
            return Exchange.apply(kind, members, *values)

        hs = self.run(xs, exchange)
        return hs, [(h.square() + h).sum() for h in hs]

    def run(self, xs, exchange):
        hs, stage = xs, 0
        for place, (layer, linear) in enumerate(zip(self.drawn, self.linears, strict=True)):
            stage += layer.new_stage and place > 0
            with Block(f"stage{stage}", ipu_id=stage):
                hs = self.layer(layer, linear, hs, exchange)
        return hs

    def layer(self, layer, linear, hs, exchange):
        groups = layer.groups
        match layer.kind:
            case "linear":
                return [linear(h).tanh() for h in hs]
            case "gather":
                gathered = exchange("all_gather", groups, [linear(h) for h in hs])
                return [g.mean(0) + g[-1] * h for g, h in zip(gathered, hs, strict=True)]
            case "identical":
                return [g.sum(0).sin() for g in exchange("identical", groups, hs)]
            case "reduce":
                sums = exchange("all_reduce", groups, [h.t() for h in hs])
                return [h + 0.1 * s.t() for h, s in zip(hs, sums, strict=True)]
            case "reduce_gradient":
                return exchange("all_reduce_gradient", groups, [linear(h) for h in hs])
            case "exchange":
                return [x.cos() for x in exchange("all_to_all", groups, hs)]
            case "chain":
                return exchange("all_to_all", groups, exchange("all_reduce", groups, hs))
            case "shared_weight":
                weights = exchange("all_reduce_gradient", groups, [linear.weight] * len(hs))
                return [h @ weight for h, weight in zip(hs, weights, strict=True)]
        raise AssertionError(layer)


@st.composite
def cases(draw):
    replicas = draw(st.integers(1, 6))
    sizes = [size for size in range(1, replicas + 1) if replicas % size == 0]
    some = st.one_of(st.none(), st.builds(ReplicaGroups, st.sampled_from(sizes), st.booleans()))
    layer = st.builds(Layer, st.sampled_from(KINDS), some, st.booleans())
    layers = [Layer("linear", None, new_stage=False)]
    layers += draw(st.lists(layer, min_size=1, max_size=3))
    stages = sum(one.new_stage for one in layers[1:]) + 1
    pipelined = stages > 1 and draw(st.booleans())
    names = ["grouped", "zero_bubble", "gpipe", "1f1b", "zb_h1"] if pipelined else ["grouped"]
    schedule = draw(st.sampled_from(names))
    options = {
        "replicas": replicas,
        "gradient_accumulation": draw(st.sampled_from([1, 3])) + 2 * pipelined * stages,
        "device_iterations": draw(st.integers(1, 2)),
        "workers": draw(st.sampled_from([None, 1, 2, 3])),
        "recompute": draw(st.sampled_from(["off", "stages", "all"])),
        "outline": draw(st.sampled_from([True, False])),
        "strategy": Strategy("pipelined" if pipelined else "sharded", schedule=schedule),
    }
    return layers, options, draw(st.integers(0, 1000))


def expected_step(model, x, options):
    """Train on all micro-batches of a call; the results in the order of a call's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    replicas, accumulation = options.replicas, options.gradient_accumulation
    micro_batches = x.view(options.device_iterations, accumulation, replicas, -1, WIDTH)
    results = []
    for iteration in micro_batches:
        optimizer.zero_grad()
        for micro_batch in iteration:
            hs, losses = model.all(list(micro_batch))
            sum(losses).backward()
            results += [h.detach() for h in hs]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= accumulation * replicas
        optimizer.step()
    return torch.cat(results)


@given(case=cases())
def test_results_gradients_and_weights_are_those_of_stacked_replicas(case):
    layers, settings_, seed = case
    options = Options("eager", output_mode="all", **settings_)
    ours, theirs = (Drawn(layers, options.replicas) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    count = options.device_iterations * options.gradient_accumulation * options.replicas
    x = torch.randn(count * 60, WIDTH, dtype=torch.float64, generator=generator) / 4
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.5)
    step = compile_training(ours, optimizer, options)
    result, _ = step(x)
    step.read_weights()
    close(result, expected_step(theirs, x, options))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(one.detach(), other.detach())
    text = step.program.text()
    assert Program.parse(text).text() == text
    schedule = step.schedule
    schedule.check(step.program)
    assert Schedule.parse(str(schedule)) == schedule


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    """A gather whose value is read once more, behind it, and then overwritten."""

    def __init__(self, compute=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compute = compute or self.gathered

    def forward(self, x):
        with Block("a", ipu_id=0):
            return ipu_dynamo.identity_loss(self.compute(self.layer(x)), "sum")

    def gathered(self, h):
        h = h.tanh()
        return collectives.all_gather(h, 2).sum(0) + h.exp() * h


def test_a_schedule_whose_replicas_do_not_wait_for_each_other_is_refused():
    step = compile_inference(Net(), Options("eager", replicas=2, workers=2))
    step(torch.randn(4, WIDTH))
    text = str(step.schedule)
    step.schedule.check(step.program)
    waits = next(word for word in text.split() if word.startswith("r1:0Fb<"))
    changed = Schedule.parse(text.replace(waits, "", 1))
    with pytest.raises(CompileError, match="does not wait for r1:0F0"):
        changed.check(step.program)


@pytest.mark.parametrize("workers", [1, 2])
def test_compiled_functions_give_what_operators_give(workers):
    x = torch.randn(8, WIDTH)
    results = []
    for engine in ("eager", "inductor"):
        model = Net()
        options = Options(engine, replicas=2, gradient_accumulation=2, workers=workers)
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
        step(x)
        step.read_weights()
        results.append(model.layer.weight.detach())
    torch.testing.assert_close(*results)


def test_a_program_has_a_collective_between_two_calls_and_prints_its_bytes():
    step = compile_inference(Net(), Options("eager", replicas=2))
    step(torch.randn(4, WIDTH))
    (collective,) = (i for i in step.program.walk() if isinstance(i, Collective))
    assert "all_gather %tanh: f32[2,3] over 2 replicas, 24 bytes  on ipu0" in str(collective)


def test_a_program_counts_what_replicas_exchange():
    def compute(h):
        parts = collectives.all_to_all(h.repeat(2, 1))[:2]
        return collectives.all_gather(h, 2).sum(0) + collectives.all_reduce(h) + parts

    step = compile_inference(Net(compute), Options("eager", replicas=2, device_iterations=5))
    step(torch.randn(20, WIDTH))
    program, nbytes = step.program, 5 * 2 * 3 * (2 * WIDTH * 4)  # one micro-batch's of the other
    assert program.traffic == step.executable.memory.traffic == Traffic(exchanged=nbytes)
    assert f"between replicas: {nbytes} bytes exchanged in a call" in program.short()


class Forward(nn.Module):
    """A model without stages."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


EXCHANGING = Options("eager", replicas=2, output_mode="all")


def test_an_exchange_of_constants_differs_between_replicas():
    model = Forward(lambda _, x: (collectives.all_to_all(torch.arange(4)), x))
    step = compile_inference(model, EXCHANGING)
    result, _ = step(torch.randn(4, WIDTH))
    assert result.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_model_that_is_cut_by_its_measured_costs_exchanges_tensors(tmp_path, monkeypatch):
    def compute(model, x):
        gathered = collectives.all_gather(model.layer(x).tanh(), 2).sum(0)
        return collectives.all_to_all(collectives.all_reduce(model.layer(gathered)))

    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path))  # nothing is measured yet
    x, results = torch.randn(8, WIDTH), []
    for strategy in (Strategy("pipelined", ipus=2), Strategy()):
        model = Forward(compute).eval()
        options = Options("eager", replicas=2, device_iterations=2, strategy=strategy)
        results.append(compile_inference(model, options)(x))
    assert torch.equal(*results)


WRONG = [
    (lambda h: collectives.all_reduce(h.sum()) + h, {"kind": "all_to_all"}, "cannot be divided"),
    (lambda h: collectives.all_gather(h > 0, 2), {"kind": "all_reduce"}, "have no sum"),
    (
        lambda h: collectives.all_reduce(h),
        {"value": "layer.bias", "type": TensorType(torch.float32, (WIDTH,))},
        "is a variable",
    ),
]


@pytest.mark.parametrize(("compute", "changes", "message"), WRONG)
def test_a_program_with_an_exchange_that_cannot_be_is_refused(compute, changes, message):
    step = compile_inference(Forward(lambda model, x: compute(model.layer(x))), EXCHANGING)
    step(torch.randn(4, WIDTH))
    program = step.program
    numbered = {n: i for n, i in enumerate(program.walk()) if isinstance(i, Collective)}
    new = {number: (replace(i, **changes),) for number, i in numbered.items()}
    with pytest.raises(ProgramError, match=message):
        verify(program.with_instructions(new))


PHASED = Strategy("serial_phased", phases=((StageSpec(("a",)),),))
REFUSED = [
    (lambda h: collectives.all_gather(h, 3), {}, "between 3 replicas, and the program has 2"),
    (
        lambda h: collectives.all_reduce(h, groups=ReplicaGroups(4)),
        {},
        "2 replicas cannot be divided into groups of 4",
    ),
    (lambda h: collectives.all_to_all(h.view(-1)[:3]), {}, "cannot be divided between 2 replicas"),
    (collectives.all_reduce, {"strategy": PHASED}, "cannot exchange tensors in phases"),
]


@pytest.mark.parametrize(("compute", "options", "message"), REFUSED)
def test_what_does_not_fit_the_program_is_refused_with_its_line(compute, options, message):
    step = compile_inference(Net(compute), Options("eager", replicas=2, **options))
    with pytest.raises(CompileError, match=message) as error:
        step(torch.randn(4, WIDTH))
    assert "test_replica_collectives.py" in str(error.value)
    assert error.value.id == "collective"


def test_torch_compile_has_no_replicas():
    model = torch.compile(Net(collectives.all_reduce), backend="ipu", options={"engine": "eager"})
    with pytest.raises(IpuError, match=r"cannot exchange tensors through torch\.compile"):
        model(torch.randn(2, WIDTH))


def test_outside_of_a_program_there_is_nobody_to_exchange_with():
    with pytest.raises(CompileError, match="only within a program"):
        Net(collectives.all_reduce)(torch.randn(2, WIDTH))
    reference = Reference(Net(collectives.all_reduce), options=Options(replicas=2))
    with pytest.raises(CompileError, match="only within a program"):
        reference(torch.randn(4, WIDTH))


def test_rows_of_replicas_that_exchange_them_are_not_free():
    step = compile_inference(
        Net(lambda h: collectives.all_reduce(h).sum(1)),
        Options("eager", replicas=2, output_mode="all"),
    )
    step(torch.randn(4, WIDTH))
    with pytest.raises(IpuError, match="nothing is known of the rows"):
        ipu_dynamo.free_rows(step)


def test_the_parts_of_a_cut_graph_read_back_with_what_replicas_exchange(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_DUMP", str(tmp_path))
    step = compile_inference(Net(), Options("eager", replicas=2))
    step(torch.randn(4, WIDTH))
    (path,) = tmp_path.glob("**/*Partition*")
    text = path.read_text(encoding="utf-8")
    parts = parse_level(text)
    assert [one.kind for one in parts.collectives.values()] == ["all_gather"]
    assert write_level(parts) == text


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all"])
def test_a_result_is_dense_as_its_type_in_the_program(kind):
    """Operators of PyTorch may keep the layout of their arguments."""
    of = TensorType(torch.float32, (2, 3, 4, 5))
    exchange = ReplicaExchange(Collective(kind, "x", "y", of, 2, 0, "line"), OwnReplicas.all(2))
    for replica in range(2):
        value = torch.randn(of.shape).to(memory_format=torch.channels_last)
        exchange.give(replica, value)
    for replica in range(2):
        assert exchange.take(replica).is_contiguous()
