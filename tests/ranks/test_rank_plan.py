"""Check that the plan of a mesh has all that ranks send, from a printed program alone."""

import threading
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn, optim

from ipu_dynamo import (
    Block,
    ClipGradNorm,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.collectives import all_gather, all_reduce, all_to_all
from ipu_dynamo.program import Copy, Program, TensorType, UpdateFactors
from ipu_dynamo.program.rank_plan import RankPlan, exchanged_bytes, main
from ipu_dynamo.program.replica_tree import subtrees
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport
from ipu_dynamo.testing.rank_threads import MemoryTransport, run_ranks
from tests.ranks import gpt24
from tests.ranks.mesh import Pipeline, mesh, world

OPTIONS = {"engine": "eager", "gradient_accumulation": 8, "strategy": Strategy("pipelined")}
MESHES = [(1, 1), (1, 2), (2, 3), (4, 4), (3, 1), (256, 4)]


class Tied(Pipeline):
    """The first and the last layer have one weight."""

    def __init__(self):
        super().__init__(4)
        self.layers[3].weight = self.layers[0].weight


def train(model, optimizer, **more):
    step = compile_training(model, optimizer(model.parameters()), OPTIONS, **more)
    step.compile(torch.ones(8, 4))
    return step.program


def sgd(parameters):
    return optim.SGD(parameters, lr=0.1)


@pytest.fixture(scope="module")
def programs():
    def adamw(parameters):
        return optim.AdamW(parameters, lr=0.1)

    def radam(parameters):
        return optim.RAdam(parameters, lr=0.1)

    clip = ClipGradNorm(0.1)
    infer = compile_inference(Pipeline(4), {"engine": "eager", "strategy": Strategy("pipelined"),
                                            "device_iterations": 4})  # fmt: skip
    infer.compile(torch.ones(4, 4))
    return {
        "adamw": train(Pipeline(4), adamw, clip=clip),
        "tied": train(Tied(), sgd),
        "radam": train(Pipeline(4), radam),
        "inference": infer.program,
    }


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", ["adamw", "tied", "radam", "inference"])
def test_wires_carry_the_copies_that_cross_ranks(programs, name, shape):
    rows, columns = shape
    program = replace(programs[name], replicas=2 * rows)
    plan = RankPlan(Program.parse(program.text()), rows, columns)
    sent, received = Counter(), Counter()
    for column in range(columns):
        for wire in plan.sent(column):
            sent[wire.number, wire.messages, wire.nbytes] += rows
        for wire in plan.received(column):
            received[wire.number, wire.messages, wire.nbytes] += rows
    assert sent == received
    assert sum(nbytes * count for (*_, nbytes), count in sent.items()) == crossing(
        program, Share(rows, columns, 0, 0)
    )
    assert bool(sent) == (columns > 1)


def crossing(program, share):
    """The bytes of copies between IPUs of several ranks, in a step of all ranks."""
    cut, nbytes = sections(program), 0
    own = {v.name for v in program.variables if not v.replicated}
    numbers = {name for i in cut.before if isinstance(i, UpdateFactors) for name in i.results}

    def column(ipu):
        return ipu * share.columns // program.num_ipus

    for copy in cut.all:
        if isinstance(copy, Copy) and column(copy.src) != column(copy.dst):
            if copy in cut.loop:
                nbytes += copy.type.nbytes * cut.micro_batches * program.replicas
            elif copy.value not in numbers:
                nbytes += copy.type.nbytes * (program.replicas if copy.value in own else share.rows)
    return nbytes


def test_variables_and_functions_are_those_of_each_column(programs):
    program = replace(programs["adamw"], replicas=4)
    plan = RankPlan(program, 2, 2)
    every = [variable for column in range(2) for variable, _ in plan.variables(column)]
    assert sorted(v.name for v in every) == sorted(v.name for v in program.variables)
    assert [[*plan.ipus(column)] for column in range(2)] == [[0, 1], [2, 3]]
    for column in range(2):
        for variable, tensors in plan.variables(column):
            assert variable.ipu in plan.ipus(column)
            assert tensors == (1 if variable.replicated else 2)
    called = {call.function for call in program.calls}
    assert {name for column in range(2) for name in plan.functions(column)} == called
    assert plan.functions(0) != plan.functions(1)


class Counted(MemoryTransport):
    """Counts the bytes that collectives of the column send to other ranks, and get of them."""

    def gather(self, among, part, into=None):
        others = len(self.share.of_column) - 1
        self.sent += others * part.numel()
        self.received += others * part.numel()
        return super().gather(among, part, into)

    def exchange(self, among, sent, received):
        self.sent += sum(part.numel() for part in sent.values())
        self.received += sum(part.numel() for part in received.values())
        return super().exchange(among, sent, received)


@pytest.mark.parametrize(("rows", "replicas"), [(2, 2), (3, 6), (4, 12)])
@pytest.mark.parametrize("sizes", [(5, 3), (20_000, 7), (30_000,)])
def test_sums_exchange_the_bytes_of_the_plan(rows, replicas, sizes):
    dtypes = (torch.float32, torch.float16)
    types = [TensorType(dtypes[i % 2], (size,)) for i, size in enumerate(sizes)]
    blocks = [Share(rows, 1, row, 0).replicas(replicas) for row in range(rows)]
    counts = [len(subtrees(replicas, block)) for block in blocks]

    def run(transport):
        transport.__class__ = Counted
        transport.sent = transport.received = 0
        own = [[torch.ones(t.shape, dtype=t.dtype) for t in types] for _ in blocks[0]]
        ReplicaSums(own, replicas, transport)()
        return transport.sent, transport.received

    planned = [exchanged_bytes(types, counts, row) for row in range(rows)]
    assert run_ranks(rows, 1, run) == planned
    assert sum(sent for sent, _ in planned) == sum(received for _, received in planned)


class Exchanging(Pipeline):
    """Replicas exchange values on the first IPU and on the last one."""

    def forward(self, x):
        with Block("0", ipu_id=0):
            x = all_gather(self.layers[0](x), 8).mean(0)
        with Block("1", ipu_id=1):
            x = all_reduce(self.layers[1](x))
            x = all_to_all(x.expand(8, *x.shape).flatten(0, 1))
            return identity_loss(x.square(), "mean")


class Normed(Pipeline):
    """Replicas have running statistics of their own on both IPUs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(each, nn.BatchNorm1d(4)) for each in self.layers)


@pytest.mark.parametrize(
    ("model", "rows", "columns", "replicas", "rank"),
    [
        *((Normed, 3, 2, 6, rank) for rank in (0, 5)),
        *((partial(Pipeline, 4), 256, 4, 256, rank) for rank in (0, 1, 511, 1023)),
        *((Exchanging, 4, 2, 8, rank) for rank in (0, 5)),
    ],
)
def test_a_step_makes_the_calls_of_the_plan(model, rows, columns, replicas, rank, monkeypatch):
    """A rank makes a step without the others, up to 1,023 of them."""
    made, inner = Counter(), threading.local()  # some methods call others

    def count(name):
        call = getattr(TorchTransport, name)

        def counted(*arguments, **keywords):
            is_outer = not getattr(inner, "runs", False)
            made[name] += is_outer
            inner.runs = True
            try:
                return call(*arguments, **keywords)
            finally:
                inner.runs = not is_outer

        monkeypatch.setattr(TorchTransport, name, counted)

    with world(rows * columns, rank=rank):
        options = Options(**OPTIONS, replicas=replicas, mesh=mesh(rows, columns))
        model = model()
        step = compile_training(model, sgd(model.parameters()), options)
        x = torch.ones(16 * replicas // rows, 4)
        step.compile(x)
        for name in ("send", "receive", "gather", "exchange", "maximum", "broadcast"):
            count(name)
        step(x)
    plan, column = step.rank_plan, rank % columns
    results = [len(plan.results(each)) for each in range(columns)]
    collective = [messages for _, messages, *_ in plan.collectives(rank)]
    assert made["send"] == sum(
        [*(wire.messages for wire in plan.sent(column)), *collective],
        (columns - 1) * results[column],
    )
    assert made["receive"] == sum(
        [*(wire.messages for wire in plan.received(column)), *collective],
        sum(results) - results[column],
    )
    assert bool(collective) == (type(model) is Exchanging)
    assert made["gather"] == len(plan.exchanges(rank))
    assert made["maximum"] == 2 * plan.votes  # along the row and along the column
    assert made["broadcast"] == bool(plan.of_first_replica(column)) == (type(model) is Normed)
    assert not made["exchange"]


def test_all_that_collectives_send_is_received():
    model = Exchanging()
    step = compile_training(model, sgd(model.parameters()), OPTIONS | {"replicas": 8})
    step.compile(torch.ones(64, 4))
    plan = RankPlan(Program.parse(step.program.text()), 4, 2)
    moved = [each for rank in range(8) for each in plan.collectives(rank)]
    assert sum(sent for _, _, sent, _ in moved) == sum(received for *_, received in moved) > 0
    assert "all_gather of %" in str(plan)


def test_buffers_of_replica_0_are_sent_to_all_rows():
    model = Normed()
    step = compile_training(model, sgd(model.parameters()), OPTIONS | {"replicas": 2})
    step.compile(torch.ones(32, 4))
    nbytes = 16 + 16 + 16  # mean and variance, and the number of batches in its own 16
    assert f"row 0 sends buffers of replica 0 to all others: {nbytes} B" in str(
        RankPlan(Program.parse(step.program.text()), 2, 2)
    )
    assert RankPlan(step.program, 1, 2).of_first_replica(0) == 0


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({"output_mode": "all", "device_iterations": 2}, 2 * 8 * 2 * 4),
        ({"output_mode": "final", "device_iterations": 2}, 2 * 4),
        ({"output_mode": "every", "device_iterations": 4, "return_period": 2}, 2 * 8 * 2 * 4),
        ({"output_mode": "sum"}, 2 * 4),
    ],
)
def test_the_last_column_gives_its_row_the_results_of_a_call(options, nbytes):
    options = OPTIONS | options | {"replicas": 4}
    model = Pipeline(2)
    step = compile_training(model, sgd(model.parameters()), options)
    loss = step(torch.ones(8 * 4 * options.get("device_iterations", 1), 4))
    assert loss.nbytes == 2 * nbytes
    plan = RankPlan(step.program, 2, 2)
    assert [plan.results(column) for column in range(2)] == [{}, {"0": nbytes}]
    assert RankPlan(step.program, 2, 1).results(0) == {}


@pytest.mark.slow
def test_a_large_program_has_a_plan_for_1024_ranks():
    program = gpt24.program()
    plan = str(RankPlan(Program.parse(program.text()), 256, 4))
    assert plan.startswith("rank plan: 1024 ranks, 256 rows x 4 columns; a step of training has 8 ")
    assert plan.endswith("the schedule of a row, 4 workers, has no cycle")


def test_the_command_prints_the_plan_of_a_file(programs, tmp_path, capsys):
    file = tmp_path / "program.txt"
    program = replace(programs["adamw"], replicas=256)
    file.write_text(program.text())
    assert main([str(file), "--mesh", "256x4"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{RankPlan(program, 256, 4)}\n"
    assert printed.startswith("rank plan: 1024 ranks, 256 rows x 4 columns; ")
    assert "wire 2 of %tanh: f32[1,4], 8 messages of 16 bytes  ipu0 -> ipu1" in printed
    assert len(printed.splitlines()) < 60


@pytest.mark.parametrize(
    ("shape", "problem"), [("3x1", "256 replicas, and the mesh 3 rows"), ("1x5", "on 4 IPUs")]
)
def test_a_mesh_that_cannot_divide_the_program_is_refused(
    shape, problem, programs, tmp_path, capsys
):
    file = tmp_path / "program.txt"
    file.write_text(replace(programs["adamw"], replicas=256).text())
    assert main([str(file), "--mesh", shape]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert "try:  " in error


def test_other_meshes_and_files_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["program.txt", "--mesh", "256"])
    assert main([str(tmp_path / "none.txt"), "--mesh", "2x2"]) == 1
    (tmp_path / "other.txt").write_text("no program")
    assert main([str(tmp_path / "other.txt"), "--mesh", "2x2"]) == 1
