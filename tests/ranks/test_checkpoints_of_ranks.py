"""Check that ranks go on from checkpoints of any mesh, with the bits of one process."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    Options,
    SavedProgramError,
    Strategy,
    compile_training,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ipu_dynamo.errors import RankFailed, RanksDiffer
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.checkpoints import save_checkpoint as saving
from ipu_dynamo.whole_step.checkpoints.save_checkpoint import dealt
from tests.ranks.test_any_mesh import MAKING, on_ranks

REPLICAS, ROWS = 4, 2
OPTIONS = Options("eager", replicas=REPLICAS, seed=3, strategy=Strategy("pipelined"),
                  gradient_accumulation=3)  # fmt: skip
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


class Net(nn.Module):
    """Two stages, each with buffers that every replica has for itself; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.second, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.2)
        return F.cross_entropy(self.last(self.second(h)), y)


def made(seed, optimizer=torch.optim.Adam):
    with MAKING:
        torch.manual_seed(seed)
        model = Net()
        BeginBlock(model.first, "first", ipu_id=0)
        BeginBlock(model.second, "second", ipu_id=1)
        return compile_training(model, optimizer(model.parameters(), lr=0.01), OPTIONS)


def batch(number, share=None):
    generator = torch.Generator().manual_seed(number)
    rows = ROWS * REPLICAS * 3
    data = torch.randn(rows, 5, generator=generator), torch.randint(5, (rows,), generator=generator)
    if share is None:
        return data
    return [ranks.rows_of_share(tensor, OPTIONS, share, training=True) for tensor in data]


def on_mesh(shape, run):
    """What `run` returns for each rank's share; in one process, for None."""
    if shape == (1, 1):
        return [run(None)]
    return run_ranks(*shape, lambda transport: run(transport.share))


def left(step, share):
    """What a rank has: weights and states, and buffers of its replicas and IPUs by their number."""
    step.read_weights()
    step.bring_states()
    executable = step.executable
    ipus = range(2) if share is None else share.ipus(2)
    own = {
        (v.name, replica): executable.tensor(v.name, place).clone()
        for v in step.program.variables
        if v.kind == "buffer" and v.ipu in ipus
        for place, replica in enumerate(executable.replicas.own)
    }
    weights = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    states = {n: {k: t.clone() for k, t in of.items()} for n, of in step.states().items()}
    return {"weights": weights, "states": states, "own": own, "random": step.random_state}


def begun(folder, share):
    """Train, and save: what a rank has."""
    step = made(0)
    for number in range(2):
        step(*batch(number, share))
    path = save_checkpoint(folder, step, {"batch": 2})
    return {"path": path, **left(step, share)}


def gone_on(folder, share, early=True):
    """Load, and go on."""
    step = made(1)
    if not early:
        step(*batch(7, share))
    extra = load_checkpoint(folder, step)
    if early:
        step.compile(*batch(0, share))
    loaded = left(step, share)
    for number in range(extra["batch"], 4):
        step(*batch(number, share))
    return {"loaded": loaded, **left(step, share)}


def whole():
    """What one process has in the middle and at the end."""
    step = made(0)
    for number in range(2):
        step(*batch(number))
    middle = left(step, None)
    for number in range(2, 4):
        step(*batch(number))
    return middle, left(step, None)


def compare(found, expected):
    for key in ("weights", "states"):
        assert_same_bits(found[key], expected[key])
    assert_same_bits(found["own"], {key: expected["own"][key] for key in found["own"]})
    assert found["random"] == expected["random"]


@pytest.mark.few(1, 1)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 2), (1, 1)), ((2, 2), (2, 1)), ((1, 1), (4, 2)), ((1, 2), (2, 2)), ((4, 2), (1, 2))],
)
def test_any_mesh_goes_on_from_any_other(saved, loaded, early, tmp_path):
    with on_ranks():
        middle, end = whole()
        for found in on_mesh(saved, lambda share: begun(tmp_path, share)):
            compare(found, middle)
            assert found["path"] == latest_checkpoint(tmp_path)
        for found in on_mesh(loaded, lambda share: gone_on(tmp_path, share, early)):
            compare(found["loaded"], middle)
            compare(found, end)
    (path,) = tmp_path.glob("checkpoint-*")
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    names = [f["name"] for f in files if f["name"].startswith("rank")]
    assert len(names) == saved[0] * saved[1]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*Net().state_dict()}
    assert {*index["weight_map"].values()} == {*names} or saved == (4, 2)


def test_an_error_of_one_rank_is_that_of_all(tmp_path):
    """A rank that cannot write leaves no checkpoint, and the next one is complete."""

    def run(transport):
        step = made(0)
        step(*batch(0, transport.share))
        try:
            save_checkpoint(tmp_path, step)
        finally:
            save_checkpoint(tmp_path / "again", step)

    real = saving.write_tensors

    def write(folder, tensors, rank, ranks):
        if rank == 1 and folder.parent == tmp_path:
            raise OSError("no space left")
        return real(folder, tensors, rank, ranks)

    with pytest.MonkeyPatch.context() as patch, on_ranks():
        patch.setattr(saving, "write_tensors", write)
        errors = run_failing_ranks(1, 2, run)
    assert isinstance(errors[0], RankFailed)
    assert "rank 1 could not write its file: OSError: no space left" in str(errors[0])
    assert isinstance(errors[1], OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    load_checkpoint(tmp_path / "again", made(1))


def test_ranks_refuse_different_checkpoints(tmp_path):
    def run(transport):
        step = made(0)
        step(*batch(0, transport.share))
        paths = [save_checkpoint(tmp_path, step) for _ in range(2)]
        load_checkpoint(paths[transport.share.rank], step)

    with on_ranks():
        errors = run_failing_ranks(1, 2, run)
    assert all(isinstance(error, RanksDiffer) for error in errors)
    assert "checkpoint-000002" in str(errors[0])


def test_a_missing_file_of_another_rank_is_refused(tmp_path):
    with on_ranks():
        on_mesh((1, 2), lambda share: begun(tmp_path, share))
        path = latest_checkpoint(tmp_path)
        (path / "rank-0001-of-0002.safetensors").unlink()
        with pytest.raises(SavedProgramError) as caught:
            load_checkpoint(tmp_path, made(1))
    assert caught.value.path == str(path / "rank-0001-of-0002.safetensors")


def test_tensors_are_dealt_by_bytes():
    nbytes = {"a": 8, "b": 5, "c": 4, "d": 4, "e": 1, "only": 100}
    holders = {name: [0, 1] for name in nbytes} | {"only": [2], "e": [1, 2]}
    writers = dealt(nbytes, holders)
    assert writers == {"only": 2, "a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
