"""Check `horovod.torch`, a distribution of its own: alone, over processes, and its refusals."""

import importlib
import sys

import pytest
import torch

from tests.popdist import processes

HOROVOD = processes.ROOT / "packaging" / "horovod_compat"


@pytest.fixture
def hvd(monkeypatch):
    """The module, imported anew by a process without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(HOROVOD))
    yield importlib.import_module("horovod.torch")
    for name in ("horovod.torch", "horovod"):
        sys.modules.pop(name, None)


def test_without_a_launcher_it_is_a_world_of_one(hvd):
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    own = torch.tensor([[1.0, 2.0]])
    results = [
        hvd.allreduce(own),
        hvd.allreduce(own, op=hvd.Sum),
        *hvd.grouped_allreduce([own]),
        hvd.allgather(own),
        hvd.broadcast(own, 0),
    ]
    for result in results:
        assert torch.equal(result, own)
        assert result.data_ptr() != own.data_ptr()
    hvd.broadcast_parameters({"a": own, "b": None}, root_rank=0)
    assert own.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("call", ["rank", "size", "local_rank", "local_size"])
def test_it_is_initialised_first(hvd, call):
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        getattr(hvd, call)()
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        hvd.allreduce(torch.ones(1))


def test_what_has_no_meaning_is_refused(hvd):
    hvd.init()
    with pytest.raises(ValueError, match="average or op, not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op must be Average or Sum, got 1"):
        hvd.allreduce(torch.ones(1), op=1)
    with pytest.raises(ValueError, match="bool has no sums"):
        hvd.allreduce(torch.tensor(True))
    with pytest.raises(ValueError, match="has no dim 0"):
        hvd.allgather(torch.tensor(1))
    with pytest.raises(ValueError, match=r"rank 1 is none of the processes \[0\]"):
        hvd.broadcast(torch.ones(1), root_rank=1)


def test_other_names_say_what_torch_has(hvd):
    with pytest.raises(AttributeError, match=r"Use torch.nn.parallel.DistributedDataParallel"):
        hvd.DistributedOptimizer  # noqa: B018
    with pytest.raises(AttributeError, match=r"Use torch.distributed instead"):
        hvd.nonsense  # noqa: B018
    for instead in hvd._INSTEAD.values():
        path = instead.partition("(")[0]
        thing = torch if path.startswith("torch.") else torch.distributed
        for part in path.removeprefix("torch.").split("."):
            thing = getattr(thing, part)


def test_it_refuses_to_stand_beside_horovod(hvd, tmp_path, monkeypatch):
    sys.modules.pop("horovod.torch")
    sys.modules.pop("horovod")
    other = tmp_path / "horovod" / "__init__.py"
    other.parent.mkdir()
    other.touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ImportError, match=f"Horovod itself is installed .{other}"):
        importlib.import_module("horovod.torch")
    other.unlink()
    other.parent.rmdir()
    metadata = tmp_path / "horovod-0.28.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    with pytest.raises(ImportError, match=r"the distribution horovod 0.28.1"):
        importlib.import_module("horovod.torch")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_three_instances_reduce_gather_and_broadcast():
    program = processes.PROGRAMS / "horovod_calls.py"
    paths = f"{processes.ROOT}:{HOROVOD}"
    result = processes.poprun(
        *("--num-instances", "3", sys.executable, str(program)), PYTHONPATH=paths
    )
    assert result.returncode == 0, result.stderr
    shown = [
        "place (3, 3, True)",
        "mean [2.0, 10.0]",
        "sum [6.0, 30.0]",
        "old sum [6.0, 30.0]",
        "own True",
        "whole 2",
        "half torch.float16",
        "group [[2.0, 10.0], 2.0]",
        "rows [[1, 1], [2, 2], [2, 2]]",
        "root [2.0, 10.0]",
        "weights [2.0, -2.0]",
        "state {0: {'sum': tensor(1)}}",
        "step True",
        "shapes allreduce: tensor 0 is float32[1] on rank 0, but float32[2] on rank 2",
        "types broadcast: tensor 0 is int32[1] on rank 0, but int64[1] on rank 2",
        "count broadcast_parameters: rank 0 has 1 tensors, rank 2 2",
        "operations processes call different collectives: rank 0 in allreduce, Average, "
        "rank 1 in allreduce, Average, rank 2 in allgather",
        "nobody broadcast: rank 3 is none of the processes [0, 1, 2]",
        "afterwards [2.0, 10.0]",
        "pair True",
    ]
    for line in result.stdout.splitlines():
        assert line.split(" | ") == shown
    assert result.stdout.count("\n") == 3
