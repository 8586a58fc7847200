"""Check that a program from the cache is the one that would be compiled, and when it is."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Options, compile_inference, compile_training, cond, for_loop
from ipu_dynamo.errors import OptionError
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import ANY_MACHINE, form_passes
from ipu_dynamo.saved.archive import Archive, write_archive
from ipu_dynamo.testing import assert_same_bits, options_for, recipes
from tests.properties.running import calls, draw_placement, slow

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:the tensor scale")
# These say how a program runs here and now: they are no part of it.
FORM = [step.name for step in form_passes(Options(), ANY_MACHINE)]
X, Y = torch.arange(32.0).view(8, 4).sin(), torch.arange(8) % 3


class Net(nn.Module):
    def __init__(self, table=(0, 1)) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("table", torch.tensor(table))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x, y):
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.2)
        scores = self.last(h) * self.scale + self.table.sum()
        return F.cross_entropy(scores, y), scores


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def passes(monkeypatch):
    """The names of all passes that run."""
    found, run = [], PassManager.run

    def counted(self, passes, level):
        found.extend(one.name for one in passes)
        return run(self, passes, level)

    monkeypatch.setattr(PassManager, "run", counted)
    return found


def train(folder, model=None, rate=0.1, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = model or Net()
    options = {"engine": "eager", "seed": 3, "program_cache": folder and str(folder), **options}
    step = compile_training(model, optimizer(model.parameters(), lr=rate), options, loss=0)
    return [step(X, Y) for _ in range(2)], model.state_dict()


def programs(folder):
    return sorted(folder.glob("*.program"))


def test_the_second_time_only_the_form_is_decided(folder, passes):
    first = train(folder)
    assert passes
    passes.clear()
    assert_same_bits(train(folder), first)
    assert passes == FORM
    assert len(programs(folder)) == 1


@pytest.mark.examples(8)
@given(recipe=recipes(random=True), training=st.booleans(), data=st.data())
def test_results_are_those_of_compiling(recipe, training, data, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement, training=training))
    found = []
    for _ in range(2):
        model = placement.place(recipe.build())
        told = replace(options, program_cache=folder, seed=5)
        if training:
            run = compile_training(model, slow(model), told)
        else:
            run = compile_inference(model, told)
        results = [run(*args) for args in calls(recipe, options, training=training)]
        found.append([results, dict(model.state_dict())])
    assert_same_bits(*found)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        {"gradient_accumulation": 2},
        {"optimizer": torch.optim.Adam},
        {"narrow": True},
        {"without": ("Outline",)},
    ],
    ids=repr,
)
def test_what_changes_the_program_is_compiled(folder, change):
    train(folder)
    found = train(folder, **change)
    assert len(programs(folder)) == 2
    assert_same_bits(found, train(None, **change))


def test_an_integer_buffer_counts(folder):
    """With `narrow` it is a constant of the program."""

    def infer(table):
        torch.manual_seed(0)
        options = Options(engine="eager", narrow=True, seed=1, program_cache=str(folder))
        return compile_inference(Net(table), options)(X, Y)[1]

    torch.testing.assert_close(infer((0, 5)) - infer((0, 1)), torch.full((8, 3), 4.0))
    assert len(programs(folder)) == 2


def test_weights_numbers_and_seeds_do_not_count(folder, passes):
    train(folder)
    passes.clear()
    model = Net()
    nn.init.zeros_(model.last.weight)
    train(folder, model=model, rate=0.5, seed=9, workers=2)
    assert passes == FORM


class Loops(nn.Module):
    """A loop with a branch in its body, of which `factor` and `count` change something."""

    def __init__(self, factor=2.0, count=3) -> None:
        super().__init__()
        self.layer, self.factor, self.count = nn.Linear(4, 3), factor, count

    def forward(self, x, y):
        def double(h):
            return h * self.factor

        def body(h):
            return cond(h.sum() > 0, double, [h], torch.tanh, [h])[0] + self.layer.bias

        (scores,) = for_loop(self.count, body, [self.layer(x)])
        return F.cross_entropy(scores, y), scores


IN_ANOTHER_PROCESS = """
import sys
import tests.whole_step.cache.test_program_cache as t
from ipu_dynamo.passes.manager import PassManager
run, ran = PassManager.run, []
def noted(self, passes, level):
    ran.extend(one.name for one in passes)
    return run(self, passes, level)
PassManager.run = noted
t.train(sys.argv[1], model=t.Loops())
print(ran == t.FORM)
"""


@pytest.mark.slow
def test_the_bodies_of_loops_decide_in_another_process_too(folder, passes):
    torch.manual_seed(1)
    weights = Loops().state_dict()

    def trained(*args, **options):
        model = Loops(*args)
        model.load_state_dict(weights)
        return train(folder, model=model, **options)

    first = trained()
    passes.clear()
    assert_same_bits(trained(), first)
    assert passes == FORM
    for number, other in enumerate([(2.5,), (2.0, 4)], 2):
        compiled = trained(*other)
        assert len(programs(folder)) == number
        passes.clear()
        assert_same_bits(trained(*other), compiled)
        assert passes == FORM
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    assert output.strip() == "True"
    assert len(programs(folder)) == 3


def test_custom_python_is_not_kept(folder, caplog):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, y):
            return F.cross_entropy(Double.apply(self.layer(x)), y), x

    with caplog.at_level("INFO", "ipu_dynamo.program"):
        train(folder, model=Model())
    assert programs(folder) == []
    assert "kept in no cache" in caplog.text


def damaged(path):
    path.write_bytes(path.read_bytes()[:-100])


def changed(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def of_another(path):
    with Archive(path) as archive:
        members = {name: archive.read(name, 1 << 30) for name in archive.names}
        head = archive.head | {"key": "0" * 64}
    write_archive(path, members, head)


@pytest.mark.parametrize("harm", [damaged, changed, of_another])
def test_files_that_are_not_as_they_were_are_compiled_again(folder, harm, caplog, passes):
    first = train(folder)
    harm(programs(folder)[0])
    passes.clear()
    assert_same_bits(train(folder), first)
    assert passes
    assert "compiled again" in caplog.text
    passes.clear()
    train(folder)
    assert passes == FORM


def test_an_older_form_is_compiled_again(folder, monkeypatch, caplog, passes):
    monkeypatch.setattr("ipu_dynamo.saved.archive.FORM", 4)
    first = train(folder)
    monkeypatch.undo()
    assert_same_bits(train(folder), first)
    assert "form 4" in caplog.text


def test_other_sources_are_another_program(folder, monkeypatch):
    train(folder)
    monkeypatch.setattr("ipu_dynamo.whole_step.cache.program_key._sources", lambda: "others")
    train(folder)
    assert len(programs(folder)) == 2


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    train(tmp_path / "file" / "cache")
    assert "cannot be kept" in caplog.text


def test_a_full_disk_costs_a_line(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ipu_dynamo.whole_step.cache.program_cache.write_archive", full)
    first = train(folder)
    assert "No space left" in caplog.text
    assert_same_bits(train(folder), first)


def test_the_oldest_go_when_there_is_no_room(folder):
    train(folder)
    (first,) = programs(folder)
    size = first.stat().st_size
    train(folder, gradient_accumulation=2)
    os.utime(first, (1, 1))
    train(folder, program_cache_limit=3 * size)  # uses the first one
    train(folder, gradient_accumulation=4, program_cache_limit=5 * size // 2)
    assert first in programs(folder)
    assert len(programs(folder)) == 2
    with pytest.raises(OptionError, match="program_cache_limit is -1"):
        Options(program_cache_limit=-1)


PROGRAM = """
import os, sys, time
import tests.whole_step.cache.test_program_cache as t
from pathlib import Path
from ipu_dynamo.passes.manager import PassManager
run, ran = PassManager.run, []
def slowly(self, passes, level):
    ran.extend(one.name for one in passes)
    time.sleep(0.5)  # longer than the other takes to trace
    return run(self, passes, level)
PassManager.run = slowly
other = os.fork()  # before anything is compiled: what both know is how to import
Path(sys.argv[2], f"ready {os.getpid()}").touch()
while len(list(Path(sys.argv[2]).iterdir())) < 2:
    time.sleep(0.01)
t.train(sys.argv[1])
print("Emit" in ran, flush=True)
if other:
    os.waitpid(other, 0)
"""


@pytest.mark.slow
def test_two_processes_at_once_compile_once(folder, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(folder), str(meeting)]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=300)
    assert sorted(output.splitlines()[-2:]) == ["False", "True"]


def test_poptorch_asks_for_it(folder, passes):
    import poptorch

    for _ in range(2):
        passes.clear()
        options = poptorch.Options().showCompilationProgressBar(False)
        options.enableExecutableCaching(str(folder))
        options._Popart.set("cacheSizeLimit", 1 << 20)
        model = nn.Linear(4, 2)
        found = poptorch.inferenceModel(model, options)(X)
        torch.testing.assert_close(found, model(X))
    assert passes == FORM
    assert len(programs(folder)) == 1


def test_a_folder_that_others_can_write_gives_only_what_is_checked(folder, passes, caplog):
    first = train(folder)
    folder.chmod(0o777)
    passes.clear()
    assert_same_bits(train(folder), first)
    assert "InlineWrites" in passes
    assert "Differentiate" not in passes
    assert f"{folder} belongs to user {os.geteuid()} and has mode 0777" in caplog.text
