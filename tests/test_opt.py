"""Check `python -m ipu_dynamo.opt`: passes on files give what the pipeline gives."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import ipu_dynamo
from examples.digits import ACCUMULATION, ITERATIONS, MICRO_BATCH, Network, pipelined
from ipu_dynamo.opt import main, read_pass, run_passes
from ipu_dynamo.options import Options
from ipu_dynamo.passes import dump
from ipu_dynamo.passes.dump import DUMP, PASSES
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.host.recipes import choose_matmuls
from ipu_dynamo.passes.host.recipes.choose_matmuls import ChooseMatmuls
from ipu_dynamo.passes.level_text import parse_level, pass_text, write_level
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import host_passes, run_host_passes
from ipu_dynamo.torch_compile.backend import ipu
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_classes import MEASURED


class TwoStages(nn.Module):
    """Two stages with dropout, batch norm, a constant and an anchored value."""

    def __init__(self):
        super().__init__()
        self.first = ipu_dynamo.BeginBlock(nn.Linear(4, 6), "first", ipu_id=0)
        self.norm = nn.BatchNorm1d(6)
        self.second = ipu_dynamo.BeginBlock(nn.Linear(6, 3), "second", ipu_id=1)

    def forward(self, x, y):
        h = torch.dropout(self.norm(self.first(x)), 0.5, True) * torch.tensor([2.0])
        return nn.functional.cross_entropy(self.second(h), y)


def train_two_stages():
    model = TwoStages()
    options = Options(engine="eager", gradient_accumulation=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ipu_dynamo.compile_training(model, optimizer, options)(
        torch.randn(8, 4), torch.randint(3, (8,))
    )


def train_digits():
    model = pipelined(Network())
    options = Options(
        engine="eager", gradient_accumulation=ACCUMULATION, device_iterations=ITERATIONS
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = MICRO_BATCH * ACCUMULATION * ITERATIONS
    ipu_dynamo.compile_training(model, optimizer, options)(
        torch.rand(rows, 1, 8, 8), torch.randint(10, (rows,))
    )


def infer_linear():
    model = nn.Linear(256, 256)
    ipu_dynamo.compile_inference(model, Options(engine="eager"))(torch.randn(128, 256))


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """The files of a training step and its passes, compiled once."""
    found = {}

    def of(train):
        if train not in found:
            root = tmp_path_factory.mktemp("dump")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(DUMP, str(root))
                train()
            (folder,) = root.iterdir()
            files = sorted(folder.glob("*_*.txt"))
            found[train] = files, (folder / PASSES).read_text().splitlines()
        return found[train]

    return of


def named(files, name):
    """The place of the file that the pass of that name left."""
    return next(i for i, file in enumerate(files) if file.stem.partition("_")[2] == name)


@pytest.mark.few(1)
@pytest.mark.parametrize("train", [train_two_stages, train_digits])
def test_each_pass_on_its_file_gives_the_next_file(train, dumps):
    files, passes = dumps(train)
    for before, line, after in zip(files[:-1], passes, files[1:], strict=True):
        if before.stem.endswith("_InlineWrites"):
            break
        step = read_pass(line)
        assert pass_text(step) == line
        found = write_level(run_passes(parse_level(before.read_text()), [step]))
        assert found == after.read_text(), f"{line} on {before.name}"


def test_passes_of_torch_compile_on_their_files_give_the_next_ones(tmp_path, monkeypatch):
    first = ipu_dynamo.BeginBlock(nn.Linear(4, 8), "first", ipu_id=0)
    second = ipu_dynamo.BeginBlock(nn.Linear(8, 3), "second", ipu_id=1)
    model = nn.Sequential(first, nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(), second)
    with monkeypatch.context() as patch:
        patch.setenv(DUMP, str(tmp_path))
        torch._dynamo.reset()
        torch.compile(model, backend=ipu, options={"engine": "eager"})(
            torch.randn(2, 4)
        ).sum().backward()
    captured, *folders = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^line \d+: no operator ipu.begin_block is registered"):
        parse_level(next(captured.glob("00_*")).read_text())
    assert [folder.name for folder in folders] == ["001_joint", "002_forward", "003_backward"]
    for folder in folders:
        files, passes = sorted(folder.glob("*_*.txt")), (folder / PASSES).read_text().splitlines()
        for before, line, after in zip(files[:-1], passes, files[1:], strict=True):
            if line == "InlineWrites()":
                break
            found = write_level(run_passes(parse_level(before.read_text()), [read_pass(line)]))
            assert found == after.read_text(), f"{line} on {before.name}"


def test_a_file_says_which_operators_forward_has_deferred(tmp_path, monkeypatch):
    def loss(h):  # of all pairs of rows
        return (h @ h.t()).logsumexp(1).sum()

    model = nn.Linear(4, 3)
    with monkeypatch.context() as patch:
        patch.setenv(DUMP, str(tmp_path))
        torch._dynamo.reset()
        torch.compile(
            lambda x: loss(model(x)), backend=ipu, options={"engine": "eager", "micro_batches": 2}
        )(torch.randn(8, 4)).backward()
    (folder,) = tmp_path.glob("*_backward")
    (line,) = (x for x in (folder / PASSES).read_text().splitlines() if x.startswith("SplitBatch"))
    assert "deferred=(" in line
    (before,), (after,) = folder.glob("*_PrepareBatch.txt"), folder.glob("*_SplitBatch.txt")
    found = run_passes(parse_level(before.read_text()), [read_pass(line)])
    assert write_level(found) == after.read_text()


@pytest.mark.parametrize("train", [train_two_stages, train_digits])
def test_host_passes_on_the_file_of_a_program_give_their_files(train, dumps):
    files, passes = dumps(train)
    start = named(files, "OffloadVariables")
    model, expected = parse_level(files[start].read_text()), files[start + 1 :]
    assert len(expected) == len(passes[start:])
    for line, after in zip(passes[start:], expected, strict=True):
        step = read_pass(line)
        assert pass_text(step) == line
        model = run_passes(model, [step])
        assert write_level(model) == after.read_text(), line


def test_host_passes_decide_by_the_figures_in_their_options(dumps, tmp_path, monkeypatch):
    files, _ = dumps(infer_linear)
    program = parse_level(files[named(files, "OffloadVariables")].read_text())
    slow, fast = {"torch": 1.0, "onednn": 0.1}, {"torch": 0.1, "onednn": 1.0}
    texts = []
    for times in (slow, fast):
        figures = Figures(None, dict.fromkeys(MEASURED, times))
        with monkeypatch.context() as patch:  # as if they had been measured here
            patch.setattr(dump, "figures_of", lambda functions, own=figures: own)
            patch.setattr(choose_matmuls, "matmul_choice", figures.choice)
            patch.setenv(DUMP, str(tmp_path))
            steps = host_passes(Options(), Machine("inductor"))
            expected = run_host_passes(program, steps, PassManager(f"program{len(texts)}"))
        (folder,) = tmp_path.glob(f"*_program{len(texts)}")
        lines = (folder / PASSES).read_text().splitlines()
        assert pass_text(ChooseMatmuls(figures)) in lines
        texts.append(write_level(run_passes(program, [*map(read_pass, lines)])))
        assert texts[-1] == write_level(expected)
    assert "onednn" in texts[0]
    assert texts[0] != texts[1]


def test_a_command_runs_several_passes(dumps, tmp_path, capsys):
    files, passes = dumps(train_two_stages)
    start, stop = named(files, "ReadStages"), named(files, "OffloadVariables")
    chosen = [part for line in passes[start:stop] for part in ("-p", line)]
    assert main([str(files[start]), *chosen]) == 0
    assert capsys.readouterr().out == files[stop].read_text()


def test_a_process_writes_a_file(dumps, tmp_path):
    files, _ = dumps(train_two_stages)
    out = tmp_path / "out.txt"
    source = files[named(files, "SplitGradientSums")]
    command = [sys.executable, "-m", "ipu_dynamo.opt", str(source), "-p", "Outline", "-o", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert out.read_text() == files[named(files, "Outline")].read_text()


@pytest.mark.slow
def test_only_dumps_load_the_modules_of_texts():
    code = "import sys, ipu_dynamo.torch_compile.compile_graph as _; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in ran.stdout.split() if name.startswith("ipu_dynamo.passes.")}
    assert "ipu_dynamo.passes.dump" in loaded
    assert not {name for name in loaded if name.endswith((".level_text", ".listing"))}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Recomput", "there is no pass 'Recomput'; did you mean: Recompute?"),
        ("Recompute(mod=1)", "Recompute has no option mod; it has mode, budget"),
        ("CallChecks(x=1)", "CallChecks has no option x; it has no options"),
        ('Recompute(mode="some")', 'mode is "some"'),
        ("Partition", "missing 1 required positional argument: 'accumulation'"),
        ("Recompute(mode=", "expected a value"),
        ("PrepareBodies(passes=(None,))", "expected a name with options"),
        ("PrepareBodies(passes=(Nothing(),))", "there is no pass 'Nothing'"),
        ('Emit(options=opaque("x"))', "x is a Python object"),
        ('Emit(options=Options(replicas="2"))', 'replicas is "2", which is not int'),
        ("3", "nothing may follow before ("),
    ],
)
def test_other_passes_are_refused(line, message):
    with pytest.raises(ValueError, match=r"^pass '") as error:
        read_pass(line)
    assert message in str(error.value)


def test_nothing_is_written_where_a_pass_fails(dumps, tmp_path, capsys):
    files, _ = dumps(train_two_stages)
    out = tmp_path / "out.txt"
    out.write_text("before")
    joint = str(files[named(files, "ReadStages")])
    for passes, message in (
        (["-p", "NameValues"], f"{joint}: it takes a traced, not joint\n  in pass NameValues"),
        (["-p", "RemoveDeadCode", "-p", "Outlin"], "-p: pass 'Outlin': there is no pass 'Outlin'"),
        (["-o", str(tmp_path / "none" / "out.txt")], f"{tmp_path / 'none' / 'out.txt'}: "),
    ):
        assert main([joint, "-o", str(out), *passes]) == 1
        assert capsys.readouterr().err.startswith(message)
    assert main([str(tmp_path / "missing.txt")]) == 1
    assert out.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_passes_are_listed_with_their_levels(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "joint      Recompute" in lines
    assert "parts      Outline" in lines
