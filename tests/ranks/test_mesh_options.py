"""Check which meshes of ranks options take, and what programs on ranks refuse."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ipu_dynamo import (
    CompileError,
    InputError,
    IpuError,
    Options,
    ReplicaGroups,
    SavedProgramError,
    StageSpec,
    Strategy,
    bisect,
    compile_inference,
    compile_training,
    rows_of_rank,
    save,
)
from ipu_dynamo.options import Anchor, OptionError
from ipu_dynamo.program.share import Share
from ipu_dynamo.saved.options_json import read_options, write_options
from ipu_dynamo.testing.rank_threads import run_failing_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.cache.program_key import of_program
from tests.ranks.mesh import Pipeline, mesh, world

PHASED = Strategy("serial_phased", phases=((StageSpec(("0",)),), (StageSpec(("1",)),)))


@pytest.mark.parametrize(
    ("shape", "names", "grid"),
    [
        ((4, 2), ("replica", "ipu"), (4, 2)),
        ((4, 2), ("ipu", "replica"), (2, 4)),
        ((8,), ("replica",), (8, 1)),
        ((8,), ("ipu",), (1, 8)),
    ],
)
def test_dimensions_are_replica_and_ipu_in_either_order(shape, names, grid):
    with world(8, rank=5):
        options = Options(replicas=8, mesh=mesh(*shape, names=names))
        share = ranks.share_of(options)
        place = dict(zip(names, options.mesh.get_coordinate(), strict=True))
    assert options.grid == (share.rows, share.columns) == grid
    assert (share.row, share.column) == (place.get("replica", 0), place.get("ipu", 0))


@pytest.mark.parametrize("names", [("replica", "ipu"), ("ipu", "replica")])
@pytest.mark.parametrize("rank", range(6))
def test_a_rank_finds_itself_at_its_place(rank, names):
    with world(6, rank=rank):
        options = Options(replicas=6, mesh=mesh(3, 2, names=names))
        assert ranks.numbers_of_ranks(options.mesh)[ranks.share_of(options).rank] == rank


def test_without_a_mesh_or_with_one_of_one_rank_a_process_runs_all():
    with world(1):
        options = Options(mesh=mesh(1, 1))
    assert options == Options()
    assert options.grid == (1, 1)
    assert ranks.share_of(options) is None
    assert ranks.transport_of(options) is None


def _others():
    return DeviceMesh("cpu", [1, 2], mesh_dim_names=("replica",))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: "2x2", "option mesh is '2x2', a str"),
        (lambda: init_device_mesh("cpu", (4,)), "4 ranks, which have no names"),
        (lambda: mesh(4, names=("data",)), "4 ranks, which are called data"),
        (lambda: mesh(2, 2, names=("replica", "data")), "2 x 2 ranks, .* called replica, data"),
        (_others, r"the ranks \[1, 2\], and this process is rank 0"),
        (lambda: init_device_mesh("meta", (4,), mesh_dim_names=("ipu",)), "of device type meta"),
    ],
)
def test_other_meshes_are_refused(make, problem):
    with world(4):
        refused(problem, lambda: Options(mesh=make()))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"replicas": 3}, "replicas is 3, .* a multiple of the 2 ranks"),
        ({"input_group_size": 4}, "input_group_size has a group of 4 consecutive"),
        (
            {"input_group_size": 2, "input_groups_orthogonal": True},
            "input_group_size has a group of 2 orthogonal",
        ),
        ({"replica_groups": {"w": ReplicaGroups(4)}}, "replica_groups of w has a group of 4"),
        ({"strategy": PHASED}, "serial_phased .* 2 ranks in its dimension ipu"),
    ],
)
def test_options_that_ranks_cannot_divide_are_refused(given, problem):
    with world(4):
        shape = mesh(2, 2)
        refused(problem, lambda: Options(**{"replicas": 4, "mesh": shape, **given}))


def test_groups_and_phases_that_ranks_can_divide_are_taken():
    groups = {"w": ReplicaGroups(2)}
    with world(2):
        shape = mesh(2)
        Options(replicas=4, mesh=shape, input_group_size=2, replica_groups=groups)
        Options(replicas=2, mesh=shape, strategy=PHASED)


def test_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr("ipu_dynamo.options.devices.cuda_devices", lambda: (2, 0))
    with world(2):
        shape = mesh(2)
        refused("devices is cuda:1", lambda: Options(replicas=2, mesh=shape, devices="cuda:1"))


def test_the_mesh_is_in_no_key_and_no_file():
    with world(2):
        alone, shared = Options(replicas=2), Options(replicas=2, mesh=mesh(2))
    assert repr(of_program(alone)) == repr(of_program(shared))
    assert write_options(alone) == write_options(shared)


def test_a_saved_program_with_a_mesh_is_refused():
    with pytest.raises(SavedProgramError, match="option mesh is"):
        read_options({"mesh": [2, 2]})


def test_what_needs_all_ipus_is_refused_with_some_of_them():
    model, x = Pipeline(), torch.ones(2, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with world(2):
        options = Options(mesh=mesh(2, names=("ipu",)))
        refused('update="host"', lambda: compile_training(model, optimizer, options, update="host"))
        refused("bisect", lambda: bisect(model, x, options=options))
        step = compile_training(model, optimizer, options)
        refused("on_send", lambda: step.run([x], on_send=print), InputError)


def test_a_program_on_a_mesh_is_not_saved(tmp_path):
    with world(2):
        step = compile_inference(Pipeline(), Options(replicas=2, mesh=mesh(2)))
        refused("on 2 ranks", lambda: save(step, tmp_path / "program"), SavedProgramError)


def test_with_replicas_alone_the_host_may_update():
    model = Pipeline()
    with world(2):
        options = Options(replicas=2, mesh=mesh(2))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        compile_training(model, optimizer, options, update="host")


def test_programs_that_a_mesh_cannot_divide_are_refused(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())

    def errors(columns, **given):
        step = {"engine": "eager", **given}
        return run_failing_ranks(
            1, columns, lambda _: compile_inference(Pipeline(), step).compile(torch.ones(2, 4))
        )

    anchors = {"w": Anchor("layers.0.weight")}
    for found, problem in (
        (errors(3), "on 2 IPUs, and the mesh has 3 ranks"),
        (errors(2, anchors=anchors), "anchors w are of variables"),
    ):
        for error in found:
            assert type(error) is CompileError
            assert problem in str(error)
            assert "try:  " in str(error)


@pytest.mark.parametrize(
    ("given", "training"),
    [
        ({"device_iterations": 3, "gradient_accumulation": 2}, True),
        ({"device_iterations": 3, "gradient_accumulation": 2}, False),
        ({"input_group_size": 2}, True),
        ({}, True),
    ],
)
def test_rows_of_ranks_are_those_of_their_replicas(given, training):
    """Each micro-batch has the number of its replica in its rows."""
    options = Options(replicas=4, **given)
    whole = ranks.batching(options, training=training)
    splits = whole.splits // whole.groups
    groups = torch.arange(whole.groups).repeat(splits)
    rows = torch.stack([groups, torch.arange(whole.splits)]).repeat_interleave(3, 1).T
    with world(4, rank=2):
        options = replace(options, mesh=mesh(2, 2))
        own = rows_of_rank(rows, options, training)
        assert rows_of_rank(rows, replace(options, mesh=None), training) is rows
    share = Share(2, 2, 1, 0)
    local = ranks.batching(options, share, training=training)
    assert len(own) == 3 * local.splits
    assert {*own[:, 0].tolist()} == {*range(whole.groups // 2, whole.groups)}
    assert (own[:, 1].diff() >= 0).all()
    adjacent = splits == 1
    assert (own.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()) == adjacent


def test_rows_that_are_not_those_of_whole_micro_batches_are_refused():
    with world(2):
        options = Options(replicas=2, mesh=mesh(2))
        refused("3 rows", lambda: rows_of_rank(torch.ones(3, 1), options), InputError)


@pytest.mark.slow
def test_meshes_and_messages_are_loaded_for_programs_on_ranks_only():
    script = (
        "import sys, torch; sys.modules.pop('torch.distributed.device_mesh', None)\n"
        "import ipu_dynamo; ipu_dynamo.Options(replicas=2)\n"
        "assert 'torch.distributed.device_mesh' not in sys.modules\n"
        "ipu_dynamo.compile_training\n"
        "assert 'ipu_dynamo.runtime.ranks.torch_transport' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def refused(problem, action, kind: type[IpuError] = OptionError):
    """Check that an action raises this, with a hint."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert re.search(problem, text, re.S), text
    assert "try:  " in text or "it must be a multiple" in text
