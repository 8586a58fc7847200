"""Check what jobs show while they take long, where, and that they leave nothing behind."""

import io
import logging
import os
import re
import sys
import threading
import time

import pytest
import torch
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo import BackendOptions, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.progress import PROGRESS, Watcher, begin, code_comes_from, job, watched_by
from ipu_dynamo.saved_model import save as save_signature
from ipu_dynamo.saved_model.conversion.convert import convert
from ipu_dynamo.testing import assert_same_training
from ipu_dynamo.watcher import ONE
from tests.terminals import Output, seconds_pass, shown

X, Y = torch.ones(2, 3), torch.tensor([0, 1])
COMPILING = {"tracing", "passes", "functions"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y=None):
        scores = self.head(torch.relu(self.fc(x)))
        return scores if y is None else nn.functional.cross_entropy(scores, y)


@pytest.fixture(autouse=True)
def shows(monkeypatch):
    monkeypatch.delenv(PROGRESS, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


def train(folder, **options):
    model = Net()
    step = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), Options(**options))
    step(X, Y)
    return step


def new_shapes(folder, **options):
    torch._dynamo.reset()
    model = torch.compile(Net(), backend="ipu", options=BackendOptions(**options))
    model(X, Y).backward()
    model(X[:1], Y[:1]).backward()


def explain_step(folder, **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ipu_dynamo.explain(compile_training(model, optimizer, Options(**options)), X, Y)


def converted(folder):
    save_signature(folder / "source", {"serving_default": (Net().eval(), (X,))})
    convert(folder / "source", folder / "made")


def converted_to_stages(folder):
    save_signature(folder / "source", {"serving_default": (Net().eval(), (X,))})
    stages = {"converter": "auto", "fine_tune_iter": 1, "ipu_model": False}
    stages |= {"solution_dir": str(folder), "profiling_root_dir": str(folder)}
    convert(folder / "source", folder / "made", num_ipus=2, batch_size=2, pipeline_cfg=stages)


def loaded(folder):
    ipu_dynamo.save(train(folder, progress=False), folder / "saved")
    ipu_dynamo.load(folder / "saved")


def cached(folder, **options):
    train(folder, program_cache=str(folder), progress=False)
    train(folder, program_cache=str(folder), **options)


def run_popart(folder, progress=True):
    options = poptorch.Options().showCompilationProgressBar(progress)
    poptorch.inferenceModel(Net().eval(), options).compile(X)


# what a job is, and the kinds of steps that it certainly has
JOBS = {
    "training": (train, COMPILING),
    "inference": (lambda _, **o: compile_inference(Net(), Options(**o))(X), COMPILING),
    "costs": (
        lambda folder, **o: train(folder, strategy=Strategy("sharded", ipus=2), **o),
        {*COMPILING, "measuring"},
    ),
    "torch.compile": (new_shapes, COMPILING),
    "explain": (
        lambda _, **o: ipu_dynamo.explain(Net(), X, options=BackendOptions(**o)),
        COMPILING,
    ),
    "explain a step": (explain_step, {"tracing", "passes"}),
    "bisect": (
        lambda _, **o: ipu_dynamo.bisect(Net(), X, options=Options(**o)),
        {*COMPILING, "comparisons"},
    ),
    "testing": (
        lambda _, **o: assert_same_training(Net(), [(X, Y)], Options(**o), steps=2),
        {*COMPILING, "calls"},
    ),
    "convert": (converted, {"reading", "passes", "writing"}),
    "load": (loaded, {"reading", "passes", "functions"}),
    "program cache": (cached, {"tracing", "reading the cache", "functions"}),
    "poptorch": (run_popart, COMPILING),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_shows_each_kind_of_step_that_begins_after_three_seconds(name, tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    run, expected = JOBS[name]
    with shown() as seen:
        run(tmp_path)
    assert len(seen.jobs) == (2 if name == "torch.compile" else 1)
    assert expected <= {kind for audience in seen.jobs for kind in audience.kinds}
    wide = by_job(re.split(r"[\r\n]+", seen.texts["wide"]))
    for audience, states in zip(seen.jobs, wide, strict=True):
        own = [state.removeprefix(f"{audience.title}: ") for state in states]
        per_cent = [int(state.partition("%")[0]) for state in own]
        assert per_cent == sorted(per_cent)
        assert re.match(r"100%\|█+\| \d+\.\d s: ", own[-1])
        for kind in audience.kinds:
            assert any(f"| {ONE.get(kind, kind)} " in state for state in own), kind
    for name in ("no columns", "file"):
        assert not re.search(r"(^|\n)\s*\n", seen.texts[name])
        texts = by_job(seen.texts[name].splitlines())
        for audience, lines in zip(seen.jobs, texts, strict=True):
            own = [line.removeprefix(f"{audience.title}: ") for line in lines]
            assert re.match(r"100% in \d+\.\d s: ", own[-1])
            for kind in audience.kinds:
                assert any(line.startswith(ONE.get(kind, kind)) for line in own), kind


def by_job(texts: list[str]) -> list[list[str]]:
    """What was shown, but for empty lines behind a bar; each job ends with 100 %."""
    jobs: list[list[str]] = [[]]
    for text in texts:
        jobs[-1].append(text)
        if "100%" in text:
            jobs.append([])
    return [[text for text in job if text] for job in jobs[:-1]]


@pytest.mark.parametrize(
    "name", ["training", "torch.compile", "explain", "bisect", "testing", "poptorch"]
)
def test_a_job_shows_nothing_with_the_option_off(name, tmp_path, capfd):
    run, _ = JOBS[name]
    with shown() as seen:
        run(tmp_path, progress=False)
    assert not seen.jobs
    assert "100%" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["convert", "load"])
def test_a_job_shows_nothing_with_the_environment_variable_off(name, tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS, "0")
    with shown() as seen:
        JOBS[name][0](tmp_path)
    assert not seen.jobs


@pytest.mark.slow
@pytest.mark.inductor
def test_waiting_for_the_process_that_compiles_is_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path))
    with shown() as seen:
        compile_inference(Net(), Options(engine="inductor", start="now")).compile(X)
    (audience,) = seen.jobs
    assert "compiler" in audience.kinds
    assert "compiler" in seen.texts["file"]


def test_another_rank_than_0_shows_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with shown() as seen, job("compiling Net"):
        begin("tracing")
    assert not seen.jobs


class Clock:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(*moments, title="compiling Net", **how):
    """What a job writes into a file if its steps begin at these seconds."""
    clock, stream = Clock(), io.StringIO()
    with watched_by(lambda: Watcher(clock, stream, None)), job(title, **how):
        for clock.now, *doing in moments:
            begin(*doing)
    return stream.getvalue().splitlines()


def test_a_job_of_less_than_three_seconds_shows_nothing():
    assert not lines_of((0, "tracing"), (2.9, "passes", 1, 2))


def test_there_is_a_line_for_each_kind_of_step_and_one_in_ten_seconds():
    lines = lines_of(
        (1, "tracing"),
        (3, "passes", 1, 9),
        (4, "passes", 2, 9),
        (12.9, "passes", 3, 9),
        (13, "passes", 4, 9),
        (14, "functions", 1, 2),
        (15, "passes", 5, 9),
        (24, "passes", 6, 9),
    )
    assert lines == [
        "compiling Net: pass 1 of 9 [3 s]",
        "compiling Net: pass 4 of 9 [13 s]",
        "compiling Net: function 1 of 2 [14 s]",
        "compiling Net: pass 6 of 9 [24 s]",
        "compiling Net: 100% in 24.0 s: tracing 2.0 s, 9 passes 20.0 s, 2 functions 1.0 s",
    ]


def test_times_say_where_the_code_of_functions_is_from():
    with job("compiling Net") as times:
        begin("functions", 1, 3)
        for origin in ("disk", "compiler", "disk"):
            code_comes_from(origin)
        begin("compiler")
    found = re.sub(r"\d+\.\d s", "0.1 s", times())
    assert found == "0.1 s: 3 functions 0.1 s (2 from disk, 1 from the compiler), compiler 0.1 s"


def test_a_job_within_another_one_is_a_part_of_it():
    clock, stream = Clock(), io.StringIO()
    with watched_by(lambda: Watcher(clock, stream, None)), job("comparing Net", then="calls"):
        clock.now = 4
        begin("calls", 1, 2)
        with job("compiling Net") as inner:
            begin("tracing")
            clock.now = 6
        clock.now = 9
    assert inner() == "2.0 s: tracing 2.0 s"
    assert stream.getvalue().splitlines() == [
        "comparing Net: call 1 of 2 [4 s]",
        "comparing Net: tracing [4 s]",
        "comparing Net: 100% in 9.0 s: 2 calls 3.0 s, tracing 2.0 s",
    ]


def test_a_job_that_fails_does_not_end_with_a_hundred_per_cent():
    def interrupted():
        with job("compiling Net"):
            begin("passes", 3, 4)
            raise KeyboardInterrupt

    with shown() as seen, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all("pass 3 of 4" in text for text in seen.texts.values())
    assert not any("100%" in text for text in seen.texts.values())


def test_a_step_that_stands_still_shows_that_it_runs_and_its_thread_ends():
    before, stream = threading.enumerate(), io.StringIO()
    with watched_by(lambda: Watcher(seconds_pass(), stream, 0.01)), job("compiling Net"):
        begin("compiler")
        end = time.monotonic() + 120
        while stream.getvalue().count("compiler") < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert threading.enumerate() == before
    assert re.search(r"(compiling Net: compiler \[\d+ s\]\n){3}", stream.getvalue())


def test_jobs_of_several_threads_do_not_mix_their_lines():
    class Slow(io.StringIO):
        """Lets other threads write within a line."""

        def write(self, text):
            for part in re.findall("[^ ]+ ?|\n", text):
                time.sleep(0)
                super().write(part)

    stream, words = Slow(), ["first", "second", "third"]

    def run(word):
        with watched_by(lambda: Watcher(seconds_pass(11), stream, 0.001)), job(word):
            for number in range(1, 50):
                begin("passes", number, 50)

    threads = [threading.Thread(target=run, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert {line.partition(":")[0] for line in lines} == set(words)
    whole = r"\w+: (pass \d+ of 50 \[\d+ s\]|\[\d+ s\]|100% in .*)"
    assert all(re.fullmatch(whole, line) for line in lines)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_within_a_job_shows_nothing_and_goes_on(tmp_path):
    stream = (tmp_path / "shown").open("w")
    with stream, watched_by(lambda: Watcher(seconds_pass(), stream, 0.001)), job("compiling Net"):
        begin("tracing")
        for _ in range(5):
            if not (child := os.fork()):
                begin("passes", 1, 2)
                with job("compiling another one"):
                    begin("functions", 1, 2)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    text = (tmp_path / "shown").read_text()
    assert "tracing" in text
    assert "pass" not in text
    assert "function" not in text


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), Broken(), object()])
def test_a_stream_that_takes_nothing_fails_no_job(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with watched_by(lambda: Watcher(seconds_pass(), None, None)), job("compiling Net") as times:
        begin("tracing")
    assert "tracing" in times()


def test_a_terminal_that_closes_fails_no_job():
    with shown() as seen, job("compiling Net") as times:
        begin("tracing")
        seen.outputs["wide"].stream.close()
        begin("passes", 1, 2)
    assert "2 passes" in times()
    assert "pass 1 of 2" in seen.texts["file"]


def test_stderr_may_change_while_a_job_runs(monkeypatch):
    first, second = io.StringIO(), io.StringIO()
    with watched_by(lambda: Watcher(seconds_pass(), None, None)):
        monkeypatch.setattr(sys, "stderr", first)
        with job("compiling Net"):
            begin("tracing")
            monkeypatch.setattr(sys, "stderr", second)
            begin("passes", 1, 2)
    assert "tracing" in first.getvalue()
    assert second.getvalue().startswith("compiling Net: pass 1 of 2")


def test_the_bar_of_poptorch_is_there_from_the_beginning_and_a_line_in_a_file_at_the_end():
    texts = []
    for output in (Output(130), Output(None)):
        with watched_by(lambda stream=output.stream: Watcher(Clock(), stream, None)):
            run_popart(None)
        texts.append(output.close())
    assert texts[0].startswith("\rGraph compilation:   0%|")
    assert re.fullmatch(r"Graph compilation: 100% in 0.0 s: tracing 0.0 s, .*\n", texts[1])


def test_the_log_has_a_line_for_each_compilation(caplog):
    with caplog.at_level(logging.INFO, "ipu_dynamo.progress"):
        compile_inference(nn.Linear(2, 2), Options(engine="eager")).compile(torch.ones(1, 2))
    (line,) = caplog.messages
    assert re.fullmatch(r"compiled Linear in \d.* s: tracing .* passes .*, 1 function .* s", line)


def test_an_explanation_has_the_times():
    step = compile_inference(nn.Linear(2, 2), Options(engine="eager"))
    step.compile(torch.ones(1, 2))
    assert re.search(r"\ncompiled in \d+\.\d s: tracing .*, 1 function ", step.explain().details)
