"""Kill conversions at random times, and look at what they leave."""

import random
import time

import pytest
import torch

from ipu_dynamo.saved_model import load, save
from tests.saved_model.conversion.killed_conversions import convert_all
from tests.saved_model.prepared_processes import prepared
from tests.saved_model.programs import branches, exported


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts)
    }


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_what_a_killed_conversion_leaves_is_absent_old_or_complete(tmp_path, monkeypatch, rounds):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    save(tmp_path / "p", {"serving_default": exported()})
    context = prepared()

    def start(folder):
        process = context.Process(target=convert_all, args=(tmp_path / "p", folder))
        process.start()
        return process

    whole = tmp_path / "whole"
    start(whole).join()  # imports
    seconds = -time.monotonic()
    process = start(tmp_path / "timed")
    process.join()
    seconds += time.monotonic()
    assert process.exitcode == 0
    complete = contents(whole)
    solution = next(name for name in complete if name.startswith("solution/"))
    assert {name.split("/")[0] for name in complete} == {"out", "exec", "solution", "profile"}
    rng, states = random.Random(rounds), set()
    for number in range(rounds):
        folder = tmp_path / str(number)
        (folder / "solution").mkdir(parents=True)
        (folder / solution).write_text("old")
        process = start(folder)
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        process.join()
        left = contents(folder)
        old = left.pop(solution)
        assert old in (b"old", complete[solution])
        inside = {name for name in complete if name.startswith("out/")}
        there = inside & left.keys()
        assert there in (set(), inside)
        states.add(bool(there))
        for name, content in left.items():
            # paths that the index names are those of the folder
            if not name.startswith("out/"):
                assert content == complete[name], name
        if there:
            with load(folder / "out")["serving_default"] as signature, torch.no_grad():
                x, y = torch.randn(3, 4), torch.randn(3, 4)
                for name, value in branches()(x, y).items():
                    torch.testing.assert_close(signature(x=x, y=y)[name], value)
    assert False in states
