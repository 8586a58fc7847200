"""Check that changed executables, descriptions, solutions and configurations are refused, or give a
result: never a crash, code that runs, much memory or much time."""

import json
import os
import pickle
import random
import resource
import time
from pathlib import Path

import pytest
import torch

from ipu_dynamo.saved.archive import Archive, write_archive
from ipu_dynamo.saved_model import load
from ipu_dynamo.saved_model.conversion.convert import convert
from ipu_dynamo.saved_model.conversion.executable.executable_file import file_sum
from ipu_dynamo.saved_model.conversion.executable.open_executable import Executable
from ipu_dynamo.saved_model.conversion.pipelines.solution_file import read_solution_file
from ipu_dynamo.saved_model.conversion.settings.config_file import read_request
from tests.saved_model.converting import embedded, inputs, save_branches
from tests.saved_model.prepared_processes import errors_of, run

PIPELINE = {
    "converter": "manual",
    "manual_pipeline_config": [
        ["left", "middle", "table"],
        ["right", "cat", "res", "view", "tran"],
    ],
    "device_info": [0, 1],
}
REFUSALS = (ValueError, TypeError, RuntimeError)
KINDS = ("executable", "description", "solution", "configuration")


def prepare(folder):
    """A converted program, its solution and its options, in a folder."""
    os.chdir(folder)
    os.environ["IPU_DYNAMO_ENGINE"] = "eager"
    save_branches(folder / "p")
    options = embedded(batch_size=2, num_ipus=2, pipeline_cfg=PIPELINE)
    convert(folder / "p", folder / "out", **options)


def changed(content, draw):
    """Bytes with some bits flipped, cut, or with parts exchanged."""
    new = bytearray(content)
    match draw.randrange(4):
        case 0:
            for _ in range(draw.randint(1, 3)):
                new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
        case 1:
            del new[draw.randrange(len(new)) :]
        case 2:
            a, b, size = (draw.randrange(len(new)) for _ in range(3))
            size = min(size, 64)
            new[a : a + size], new[b : b + size] = new[b : b + size], new[a : a + size]
        case _:
            a = draw.randrange(len(new))
            new[a:a] = draw.choice([b"\0" * 8, b"9" * 30, b"[" * 2000, b'"', b"}", b"-1", b"1e999"])
    return bytes(new)


class Target:
    """A file that is changed, and what reads it.

    Args:
        folder: of `prepare`.
    """

    def __init__(self, folder, kind):
        self.folder, self.kind = folder, kind
        self.path = {
            "executable": folder / "out/cache/application.ipu_exec",
            "description": folder / "out/cache/application.json",
            "solution": folder / "solution/manual.pipeconfig",
            "configuration": folder / "out/conversion_params.json",
        }[kind]
        self.content = self.path.read_bytes()
        self.nodes = list(json.loads((folder / "solution/manual.pipeconfig").read_text())
                          ["pipeline_mapping"])  # fmt: skip
        self.expected = self.read()

    def read(self):
        match self.kind:
            case "executable":  # with its new sum: whoever changes it can change that, too
                executable = Executable(self.path, file_sum(self.path))
                given = inputs(4)
                tensors = [given["x"], given["y"], given["ids"].int()]
                results = executable.run(tensors)
                executable.close()
                return results
            case "description":
                with load(self.folder / "out")["serving_default"] as signature:
                    return list(signature(**inputs(4)).values())
            case "solution":
                return read_solution_file(self.path, self.nodes, self.nodes, 2)
            case "configuration":
                return read_request({}, self.path)

    def try_changed(self, seed):
        """What becomes of a changed file: refused, or the result."""
        self.path.write_bytes(changed(self.content, random.Random(f"{self.kind} {seed}")))
        try:
            result = self.read()
        except REFUSALS:
            return "refused"
        finally:
            self.path.write_bytes(self.content)
        if self.kind in ("executable", "description"):
            pairs = zip(result, self.expected, strict=True)
            return "same" if all(torch.equal(a, b) for a, b in pairs) else "different"
        return "read"


def try_all(folder, count):
    """Print what becomes of each changed file, in a gigabyte of memory more than is used."""
    torch.set_num_threads(1)
    prepare(folder)
    targets = [
        Target(folder, kind) for kind in ("executable", "description", "solution", "configuration")
    ]
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
        assert result != "different", (kind, seed)
        assert float(seconds) < 2, (kind, seed)
    refused = [kind for kind, _, result, _ in lines if result == "refused"]
    assert refused.count("executable") == count
    assert refused.count("solution") > count // 4
    assert refused.count("configuration") > count // 4


def test_changed_files_are_refused_or_read(tmp_path):
    check(tmp_path, 100)


@pytest.mark.slow
def test_many_changed_files_are_refused_or_read(tmp_path):
    check(tmp_path, 1000)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (Path(self.path), "it ran")


def test_a_pickle_in_any_member_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    path = tmp_path / "out/cache/application.ipu_exec"
    with Archive(path) as archive:
        parts = {name: archive.read(name, 1 << 20) for name in archive.names}
        head = {key: archive.head[key] for key in ("kind", "ipu_dynamo", "torch", "entries")}
    assert len(parts) >= 5
    canary = tmp_path / "canary"
    for name in parts:
        write_archive(path, {**parts, name: pickle.dumps(Canary(canary))}, head)
        with pytest.raises(RuntimeError):
            Executable(path, file_sum(path))
        assert not canary.exists()


def test_an_executable_that_is_another_kind_of_saved_program_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    path = tmp_path / "out/cache/application.ipu_exec"
    with Archive(path) as archive:
        parts = {name: archive.read(name, 1 << 20) for name in archive.names}
        head = {key: archive.head[key] for key in ("kind", "ipu_dynamo", "torch", "entries")}
    write_archive(path, parts, {**head, "kind": "core"})
    with pytest.raises(RuntimeError, match="'core' wrote it, not saved_model"):
        Executable(path, file_sum(path))
