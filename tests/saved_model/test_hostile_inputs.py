"""Check that changed archives, arrays, graphs, variables and indexes are refused, or give a result:
never a crash, code that runs, much memory or much time."""

import io
import pickle
import random
import resource
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.feeds.array_files import read_array
from ipu_dynamo.saved_model.gate.read_program import read_program
from ipu_dynamo.saved_model.gate.refusal import Refusal
from tests.saved_model.prepared_processes import errors_of, run
from tests.saved_model.programs import branches, exported, packed
from tests.saved_model.test_hostile_conversions import changed

FIXTURES = Path(__file__).parent / "fixtures"
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)
WITH_SUMS = ("archive", "variables.index", "variables.data-00000-of-00001")
KINDS = (*WITH_SUMS, "index", "graph", "npy", "npz")


class Target:
    """A file that is changed, and what reads it.

    Args:
        folder: of `prepare`.
    """

    def __init__(self, folder, kind):
        self.folder, self.kind = folder, kind
        self.path = {
            "archive": folder / "alone.pt2",
            "index": folder / "p/saved_model.json",
            "graph": folder / "mlp/saved_model.pb",
            "npy": folder / "x.npy",
            "npz": folder / "x.npz",
        }.get(kind, folder / "mlp/variables" / kind)
        self.content = self.path.read_bytes()
        self.expected = self.read()

    def read(self):
        match self.kind:
            case "npy" | "npz":
                return [torch.from_numpy(np.array(read_array(str(self.path))))]
            case "archive" | "index":
                path = self.path if self.kind == "archive" else self.path.parent
                with load(path)["serving_default"] as signature:
                    x = torch.ones(3, 4)
                    return list(signature(x=x, y=x).values())
            case _:
                with load(self.folder / "mlp")["serving_default"] as signature:
                    return list(signature(x=torch.ones(3, 4)).values())

    def try_changed(self, seed):
        """What becomes of a changed file: refused, or a result."""
        self.path.write_bytes(changed(self.content, random.Random(f"{self.kind} {seed}")))
        try:
            result = self.read()
        except REFUSALS:
            return "refused"
        except KeyError:  # the changed file has another signature, or another name for it
            return "read"
        finally:
            self.path.write_bytes(self.content)
        pairs = zip(result, self.expected, strict=False)
        equal = len(result) == len(self.expected) and all(torch.equal(a, b) for a, b in pairs)
        return "same" if equal else "different"


def prepare(folder):
    """One good file of each kind."""
    save(folder / "p", {"serving_default": exported()})
    torch.export.save(exported(), folder / "alone.pt2")
    shutil.copytree(FIXTURES / "mlp", folder / "mlp")
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.save(folder / "x.npy", array)
    np.savez(folder / "x.npz", x=array)


def try_all(folder, count):
    """Print what becomes of each changed file, in a gigabyte of memory more than is used."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare(folder)
    targets = [Target(folder, kind) for kind in KINDS]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    for target in targets:
        for seed in range(count):
            start = time.process_time()
            result = target.try_changed(seed)
            print(target.kind, seed, result, time.process_time() - start, flush=True)


def check(folder, count):
    output = folder / "output"
    status = run(try_all, folder, count, output=output, seconds=3000)
    assert status == 0, errors_of(output)[-2000:]
    lines = [line.split() for line in output.read_text().splitlines() if line.count(" ") == 3]
    assert len(lines) == len(KINDS) * count
    for kind, seed, result, seconds in lines:
        assert float(seconds) < 2, (kind, seed)
        if kind in WITH_SUMS:
            assert result in ("refused", "same"), (kind, seed)
    for kind in KINDS:
        refused = [result for name, _, result, _ in lines if name == kind and result == "refused"]
        assert len(refused) > count // 10, kind


def test_changed_files_are_refused_or_read(tmp_path):
    pytest.importorskip("google.protobuf")
    check(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_changed_files_are_refused_or_read(tmp_path):
    pytest.importorskip("google.protobuf")
    check(tmp_path, 1000)


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


OLD_MEMBERS = (
    "archive/serialized_exported_program.json",
    "archive/serialized_state_dict.pt",
    "archive/serialized_constants.pt",
    "archive/serialized_example_inputs.pt",
    "archive/version",
)


@pytest.mark.parametrize("name", OLD_MEMBERS)
def test_a_pickle_in_any_member_of_an_old_archive_is_not_loaded(tmp_path, name):
    canary, state = tmp_path / "canary", io.BytesIO()
    torch.save(branches().state_dict(), state)
    good = dict.fromkeys(OLD_MEMBERS, state.getvalue()) | {"archive/version": b"8"}
    content = packed({**good, name: pickle.dumps(Canary(canary))})
    with pytest.raises(Refusal, match=r"torch 2\.8"):
        read_program(memoryview(bytearray(content)))
    (tmp_path / "old.pt2").write_bytes(content)
    with pytest.raises(ValueError, match=r"old\.pt2"):
        load(tmp_path / "old.pt2")
    assert not canary.exists()
