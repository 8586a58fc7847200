"""Check that ranks compile one program together, or name what differs."""

from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.collectives import all_reduce
from ipu_dynamo.errors import RankFailed, RanksDiffer
from ipu_dynamo.runtime.ranks.agreement import (
    broadcast_tensors,
    gather_values,
    value_of_first,
)
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks, transport_here
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.intra_op import set_intra_op_threads
from ipu_dynamo.whole_step import agreement, lowering, ranks
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.lowering import Lowering
from tests.ranks.mesh import Pipeline

PIPELINED = Options(engine="eager", strategy=Strategy("pipelined"), gradient_accumulation=4)
X = torch.linspace(-1, 1, 32).view(8, 4)


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    """Compiled models of threads belong to their mesh; what they would run is noted."""
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(Lowering, "_bring_up", lambda _, lowered, seed, transport: (lowered, seed))
    monkeypatch.setattr(CompiledModel, "_adopt", note)


def note(step, given, lowered, executable, transport):
    step.noted = executable


def train(transport, options=PIPELINED, model=None, optimizer=None):
    """Compile a training step of two IPUs on this rank."""
    model, options = model or Pipeline(), replace(options, replicas=transport.share.rows)
    optimizer = optimizer or optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_training(model, optimizer, options)
    step.prepare(X)
    return step


def test_values_are_gathered_and_told():
    def run(transport):
        rank = transport.share.rank
        own = {"rank": rank, "text": "ä" * rank}
        assert value_of_first(transport, own) == {"rank": 0, "text": ""}
        return gather_values(transport, "column", own)

    found = run_ranks(2, 2, run)
    assert [[value["rank"] for value in values] for values in found] == [[0, 2], [1, 3]] * 2
    assert found[3][1]["text"] == "äää"


def test_tensors_are_overwritten_in_place_whatever_their_layout(monkeypatch):
    monkeypatch.setattr("ipu_dynamo.runtime.ranks.agreement._BYTES", 100)

    def run(transport):
        rank = transport.share.rank
        tensors = [
            torch.full((3, 4), rank + 1.0).t(),
            torch.tensor(rank == 0),
            torch.full((2, 3, 4), rank, dtype=torch.int16)[:, 1],
            torch.full((30,), rank + 0.5, dtype=torch.bfloat16),
            torch.full((2,), complex(rank, 1)),
            torch.empty(0),
            nn.Parameter(torch.full((5,), float(rank))),
        ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(transport, tensors)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        return tensors

    first, second = run_ranks(1, 2, run)
    assert all(map(torch.equal, first, second))
    assert first[0].eq(1).all()
    assert first[1].item()


def test_parameters_buffers_states_and_seed_are_those_of_rank_0():
    def run(transport):
        rank = transport.share.rank
        model = nn.Sequential(Pipeline())
        model.register_buffer("unread", torch.tensor(rank))
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.data += rank
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        for _ in range(3 - rank):  # rank 3 has no states
            optimizer.step()
        optimizer.zero_grad()
        memory = [p.data_ptr() for p in model.parameters()]
        step = train(transport, model=model, optimizer=optimizer)
        assert [p.data_ptr() for p in model.parameters()] == memory
        return model.state_dict(), optimizer.state_dict()["state"], step.noted[1]

    (weights, states, seed), *others = run_ranks(2, 2, run)
    assert states[0]["step"] == 3
    assert weights["unread"] == 0
    for other, its_states, its_seed in others:
        assert all(torch.equal(weights[name], other[name]) for name in weights)
        assert its_states.keys() == states.keys()
        for index, state in states.items():
            assert all(torch.equal(value, its_states[index][name]) for name, value in state.items())
        assert its_seed == seed


def test_states_that_rank_0_has_not_are_dropped():
    def run(transport):
        model = Pipeline()
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        if transport.share.rank:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        train(transport, model=model, optimizer=optimizer)
        return [name for state in optimizer.state.values() for name in state]

    assert run_ranks(1, 2, run) == [[], []]


def test_random_numbers_begin_with_the_seed_of_rank_0():
    class Dropped(Pipeline):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x))

    def run(transport):
        return train(transport, model=Dropped()).noted[1]

    first, second = run_ranks(1, 2, run)
    assert first == second > 0


def test_costs_and_threads_are_those_of_rank_0(monkeypatch):
    options = replace(PIPELINED, strategy=Strategy("pipelined", ipus=2))
    measured, costs_of = [], Lowering._costs

    def noted(step, given, share):
        measured.append(share.rank)
        return costs_of(step, given, share)

    def run(transport):
        set_intra_op_threads(2 - transport.share.rank)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        step = train(transport, model=nn.Sequential(*layers, Loss()), options=options)
        lowered, _ = step.noted
        return lowered.options.strategy.costs, torch.get_num_threads()

    monkeypatch.setattr(Lowering, "_costs", noted)
    (costs, threads), (others, its_threads) = run_ranks(1, 2, run)
    assert costs == others != ()
    assert threads == its_threads == 2
    assert measured == [0]


@pytest.mark.parametrize(("sizes", "kept"), [((1 << 30, 100), True), ((100, 1 << 30), False)])
def test_values_are_kept_by_the_memory_of_rank_0(monkeypatch, sizes, kept):
    def run(transport):
        lowered, _ = train(transport).noted
        host = lowered.compiled.host
        return [decision.choice for decision in host.decisions if decision.by == "KeepValues"]

    def installed(device):
        return sizes[transport_here().share.rank]

    monkeypatch.setattr(agreement, "installed_bytes", installed)
    first, second = run_ranks(1, 2, run)
    assert first == second == ["kept, 3 x 32 B" if kept else "computed again"]


class Loss(nn.Module):
    """The mean square as a loss."""

    def forward(self, x):
        return identity_loss(x.square(), "mean")


class Other(Pipeline):
    """The same layers with another function between them."""

    def forward(self, x):
        with Block("0", ipu_id=0):
            hidden = self.layers[0](x).sigmoid()
        with Block("1", ipu_id=1):
            return identity_loss(self.layers[1](hidden).square(), "mean")


class Wide(Pipeline):
    """It has one more buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("unread", torch.zeros(3))


class Constant(Pipeline):
    """A buffer of whole numbers is a constant of the program."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("factor", torch.tensor(value))

    def forward(self, x):
        return super().forward(x * self.factor)


DIFFERENCES = [
    (
        "differ in options",
        lambda rank: {"options": replace(PIPELINED, recompute="off" if rank == 2 else "auto")},
        {0: "recompute='auto'", 1: "recompute='auto'", 2: "recompute='off'", 3: "recompute='auto'"},
        None,
    ),
    (
        "differ in the seed of Options",
        lambda rank: {"options": replace(PIPELINED, seed=rank // 2)},
        {0: "0", 1: "0", 2: "1", 3: "1"},
        None,
    ),
    (
        "differ in parameters and buffers",
        lambda rank: {"model": Wide() if rank == 3 else Pipeline()},
        {0: "(nothing)", 1: "(nothing)", 2: "(nothing)", 3: "unread: f32[3]"},
        None,
    ),
    (
        "differ in programs",
        lambda rank: {
            "model": Constant(2 + (rank == 1)),
            "options": replace(PIPELINED, narrow=True),
        },
        None,
        ("constant %factor", {0, 1, 2, 3}),
    ),
    (
        "differ in programs",
        lambda rank: {"model": Pipeline() if rank else Other()},
        None,
        ("sigmoid", {0}),
    ),
]


@pytest.mark.parametrize(("problem", "given", "values", "words"), DIFFERENCES)
def test_what_differs_is_named_with_the_values_of_all_ranks(problem, given, values, words):
    def run(transport):
        train(transport, **given(transport.share.rank))

    errors = run_failing_ranks(2, 2, run)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert type(error) is RanksDiffer
        assert problem in error.problem
        if values is not None:
            assert error.values == values
    if words is not None:
        text, other = words
        assert {rank for rank, line in errors[0].values.items() if text in line} == other


def test_other_versions_are_named(monkeypatch):
    versions = {0: "2.13.0", 1: "2.14.0"}
    record = agreement.Facts.record

    def of_rank(facts):
        same = record(facts)["same"] | {"torch": versions[transport_here().share.rank]}
        return record(facts) | {"same": same}

    monkeypatch.setattr(agreement.Facts, "record", of_rank)
    for error in run_failing_ranks(1, 2, train):
        assert type(error) is RanksDiffer
        assert error.values == versions


def test_other_processors_are_one_warning_of_rank_0(monkeypatch, caplog):
    monkeypatch.setattr(
        agreement, "machine_name", lambda: f"processor {transport_here().share.rank}"
    )
    run_ranks(1, 2, train)
    (record,) = caplog.records
    assert "processor 0; processor 1" in record.getMessage()


class Refused(Pipeline):
    """Decides in Python by a value."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_that_does_not_compile_on_one_rank_is_an_error_on_all():
    def run(transport):
        train(transport, model=Refused() if transport.share.rank == 1 else None)

    first, second, third = run_failing_ranks(3, 1, run)
    assert isinstance(second, CompileError)
    for other in (first, third):
        assert type(other) is RankFailed
        assert other.rank == 1
        assert second.problem in str(other)


def test_functions_that_do_not_compile_on_one_rank_are_an_error_on_all(monkeypatch):
    def bring_up(step, *_):
        if transport_here().share.rank == 2:
            raise MemoryError("no memory for it")

    monkeypatch.setattr(Lowering, "_bring_up", bring_up)
    *others, third = run_failing_ranks(3, 1, train)
    assert isinstance(third, MemoryError)
    for other in others:
        assert type(other) is RankFailed
        assert "rank 2 could not compile its functions: MemoryError: no memory" in str(other)


def test_inference_agrees_with_a_dimension_ipu_or_collectives_only():
    class Sum(nn.Module):
        def forward(self, x):
            return all_reduce(x)

    def infer(transport, model):
        step = compile_inference(model, {"engine": "eager", "replicas": transport.share.rows})
        step.prepare(X)

    def one_alone(transport):
        if transport.share.rank == 1:
            infer(transport, Pipeline())

    def different(transport):
        infer(transport, nn.Sequential(*(Sum(), nn.ReLU(), nn.Tanh())[: 2 + transport.share.rank]))

    def different_stages(transport):
        infer(transport, Other() if transport.share.rank else Pipeline())

    run_ranks(2, 1, one_alone)
    for shape, run in (((2, 1), different), ((1, 2), different_stages)):
        assert all(type(error) is RanksDiffer for error in run_failing_ranks(*shape, run))


def test_figures_are_those_of_the_first_rank_of_each_column(monkeypatch):
    """What was measured decides how functions are compiled, and so the last bits of results."""
    libraries = {0: "torch", 1: "onednn", 2: "onednn", 3: "torch"}

    def measured(functions, engine, figures):
        assert functions
        return {"library": libraries[transport_here().share.rank]}

    monkeypatch.setattr(lowering, "write_decided", measured)
    monkeypatch.setattr(lowering, "read_decided", lambda decided, _: Figures(decided["library"]))
    steps = run_ranks(2, 2, train)
    assert [step.noted[0].machine.figures for step in steps] == [
        None,  # its own
        None,
        Figures("torch"),
        Figures("onednn"),
    ]


def test_ranks_that_share_a_program_cache_do_not_wait_for_each_other_in_it(tmp_path):
    options = replace(PIPELINED, program_cache=str(tmp_path))

    def run(transport):
        return train(transport, options).noted[0].compiled.program.text()

    assert len({*run_ranks(2, 2, run), *run_ranks(2, 2, run)}) == 1
    assert len([*tmp_path.glob("**/*program*")]) >= 1
