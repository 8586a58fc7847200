"""Check that a trace has all that a step did, and that recording changes nothing."""

import json
import sys
import threading
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import _ExperimentalConfig

import ipu_dynamo
from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.options import OptionError
from ipu_dynamo.profiling import recording
from ipu_dynamo.runtime.execute import call_timeline, timed
from ipu_dynamo.saved.options_json import write_options
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.cache.program_key import of_program
from tests.profiling.strict_reader import read_trace
from tests.ranks.struck import Training

ACCUMULATION, REPLICAS, ITERATIONS = 4, 2, 2
OWN_FILES = {module.__file__ for module in (recording, call_timeline, timed)}
REPLAYED = pytest.param("replayed", marks=pytest.mark.inductor)
SHARDED = pytest.param("sharded", marks=pytest.mark.slow)
FORMS = ["pipelined", SHARDED, "side by side", "fused", REPLAYED, "inference"]
OPTIONS = {
    "pipelined": {
        "strategy": Strategy("pipelined"),
        "gradient_accumulation": ACCUMULATION,
        "replicas": REPLICAS,
        "workers": 2,
    },
    "sharded": {"strategy": Strategy("sharded"), "gradient_accumulation": 2},
    "side by side": {"side_by_side": True, "gradient_accumulation": 4, "workers": 2},
    "fused": {"force": {"FuseStep": True}},
    "replayed": {"engine": "inductor", "check_compiled": "off"},
    "inference": {"strategy": Strategy("pipelined"), "replicas": REPLICAS, "workers": 2},
}


class Net(nn.Module):
    """Two layers, on an IPU each if wanted."""

    def __init__(self, ipus=2):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 2)
        if ipus == 2:
            BeginBlock(self.a, ipu_id=0)
            BeginBlock(self.b, ipu_id=1)

    def forward(self, x):
        out = self.b(torch.tanh(self.a(x)))
        return F.mse_loss(out, x[:, :2]) if self.training else out


def compiled(form, **more):
    """A compiled model, and the rows of a call."""
    options = Options(**{"engine": "eager", "device_iterations": ITERATIONS} | OPTIONS[form] | more)
    alone = form in ("side by side", "fused", "replayed")
    model = Net(ipus=1 if alone else 2)
    rows = 3 * ITERATIONS * options.gradient_accumulation * options.replicas
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    if form == "inference":
        return compile_inference(model.eval(), options), x
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return compile_training(model, optimizer, options), x


def recorded(run, folder):
    """The trace of a function's call."""
    with ipu_dynamo.profile(folder / "trace.json"):
        run()
    return read_trace(folder / "trace.json")


def inside(inner, outer):
    return outer["begin"] <= inner["begin"] <= inner["end"] <= outer["end"]


def tasks_of(schedule):
    """The names of the tasks of a step, each with its IPU and its worker."""
    words = {"forward_backward": "forward and backward"}
    for worker, runs in enumerate(schedule.runs):
        for run in runs:
            of = schedule.passes[run.index]
            direction = words.get(of.direction, of.direction)
            name = f"stage {of.stage} {direction}, micro-batch {run.micro_batch}"
            yield f"{name}, replica {run.replica}", of.ipu, run.replica, worker


@pytest.mark.parametrize("workers", [1, 2])
def test_each_task_of_the_schedule_is_a_span_of_its_worker_within_its_step(workers, tmp_path):
    step, x = compiled("pipelined", workers=workers)
    step(x)
    trace = recorded(lambda: step(x), tmp_path)
    (call,) = trace.of("call")
    steps, passes = trace.of("step"), trace.of("stage pass")
    assert call["args"] == {"complete": True}
    assert len(steps) == ITERATIONS
    assert all(inside(one, call) for one in steps)
    for one in steps:
        own = [span for span in passes if inside(span, one)]
        assert Counter(
            (
                span["name"],
                span["args"]["ipu"],
                span["args"]["replica"],
                int(trace.thread_of(span).removeprefix("worker ")),
            )
            for span in own
        ) == Counter(tasks_of(step.executable.schedule))
        for span in own:
            where = f"IPU {span['args']['ipu']} of replica {span['args']['replica']}"
            assert trace.process_of(span) == where
        for thread in {trace.thread_of(span) for span in own}:
            of = [span for span in own if trace.thread_of(span) == thread]
            assert all(before["end"] <= after["begin"] for before, after in pairwise(of))
    assert len(passes) == ITERATIONS * sum(1 for _ in tasks_of(step.executable.schedule))
    assert "test_recorded_steps.py" in passes[0]["args"]["line"]


def test_copies_transfers_sums_and_updates_are_spans_with_their_bytes(tmp_path):
    step, x = compiled("pipelined")
    step(x)
    trace = recorded(lambda: step(x), tmp_path)
    passes, (call,) = trace.of("stage pass"), trace.of("call")
    moved = Counter()
    for category in ("copy", "host transfer", "replicas"):
        for span in trace.of(category):
            moved[span["name"], span["args"]["bytes"]] += 1
            assert category == "replicas" or any(inside(span, one) for one in passes)
    runs = ITERATIONS * ACCUMULATION * REPLICAS
    values = {name for name, _ in moved if name.startswith("copy")}
    assert len(values) == 2
    assert {nbytes for name, nbytes in moved if name in values} == {3 * 5 * 4}
    assert moved["receive x from the host", 3 * 6 * 4] == 2 * runs  # both stages read it
    assert moved["send 0 to the host", 4] == runs
    sums = [(name, n) for (name, _), n in moved.items() if name.startswith("all_reduce")]
    assert sums == [("all_reduce 2 tensors of replicas", ITERATIONS)] * 2
    updates = trace.of("update")
    parts = 3  # what comes before the first write of a weight, the writes, and clearing
    counts = {"update 2 parameters of group 0": 2 * ITERATIONS * parts}
    assert Counter(span["name"] for span in updates) == counts
    assert {trace.process_of(span) for span in updates} == {
        "IPU 0 of replica 0",
        "IPU 1 of replica 0",
    }
    assert all(inside(span, call) for span in updates)
    assert all("instruction" in span["args"] for span in (*updates, *trace.of("function call")))


def test_memory_is_a_counter_of_variables_and_of_values_in_flight(tmp_path):
    step, x = compiled("pipelined")
    step(x)
    trace = recorded(lambda: step(x), tmp_path)
    of_first = [
        one["args"]
        for one in trace.counters
        if trace.processes[one["pid"]] == "IPU 0 of replica 0" and one["name"].startswith("bytes")
    ]
    weights = (6 * 5 + 5) * 4
    assert {one["parameter"] for one in of_first} == {weights}
    assert {one["accumulator"] for one in of_first} == {weights}
    assert {one["state"] for one in of_first} == {2 * weights + 4}
    row, values = 3 * 4, [one["values"] for one in of_first]
    # what stage 1 returns, and inputs or results of stage 0 of up to three micro-batches
    assert 6 * row + 5 * row <= max(values) <= 3 * (6 * row + 2 * 5 * row)
    assert values[-1] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_followed_memory_is_a_counter_of_each_stage_at_the_tasks_of_the_first_step(
    workers, tmp_path
):
    step, x = compiled("pipelined", workers=workers)
    step(x)
    trace = recorded(lambda: step(x), tmp_path)
    memory = ipu_dynamo.inspect(step).program.host.memory
    passes = trace.of("stage pass")
    passes = [span for span in passes if inside(span, trace.of("step")[0])]
    for stage in (0, 1):
        name = f"stage {stage}, first step, this computer"
        rows = [one for one in trace.counters if one["name"] == name]
        assert {trace.processes[one["pid"]] for one in rows} == {f"IPU {stage} of replica 0"}
        assert max(sum(one["args"].values()) for one in rows) == memory.peak_bytes(stage)
        begins_and_ends = Counter(at for span in passes for at in (span["begin"], span["end"]))
        assert Counter(round(1000 * one["ts"]) for one in rows) == begins_and_ends
        last = max(rows, key=lambda one: one["ts"])["args"]
        assert last["temporaries"] == last["activations"] == 0
        assert last["weights"] == memory.curve(stage)[0]["weights"]


@pytest.mark.parametrize("form", FORMS)
def test_recording_changes_no_bit(form, tmp_path):
    results = []
    for records in (False, True):
        step, x = compiled(form)
        run = [step(x)]
        if records:
            trace = recorded(lambda step=step, run=run, x=x: run.append(step(x)), tmp_path)
        else:
            run.append(step(x))
        run.append(step(x))
        results.append((run, step.model.state_dict()))
    assert_same_bits(*results)
    steps = 1 if form == "inference" else ITERATIONS
    assert len(trace.of("step")) == steps
    assert [span["name"] for span in trace.of("call")] == [f"{step.program.kind} call"]
    fused = form in ("fused", "replayed")
    assert (step.executable.fused is not None) == fused
    tasks = ["stage 0 forward and backward, micro-batch 0, replica 0"] * steps
    if not fused:
        tasks = [name for name, *_ in tasks_of(step.executable.schedule)] * steps
    assert Counter(
        span["name"] for span in trace.of("stage pass") if "adds" not in span["name"]
    ) == Counter(tasks)
    functions = {span["args"]["function"] for span in trace.of("stage pass")}
    assert any("repeated without Python" in name for name in functions) == (form == "replayed")
    # a native library runs the instructions of a replayed step
    assert bool(trace.of("host transfer")) == (form != "replayed")


@pytest.mark.parametrize("form", ["pipelined", "fused", "inference"])
def test_an_option_keeps_the_timeline_of_the_last_call(form, tmp_path):
    (step, x), (plain, _) = compiled(form, record="timeline"), compiled(form)
    timeline = None
    for _ in range(2):
        assert_same_bits(step(x), plain(x))
        timeline = ipu_dynamo.inspect(step).program.host.timeline
        assert len(timeline.spans) == len({one.start for one in timeline.spans}) > 0
    trace = recorded(lambda: step(x), tmp_path)
    assert timeline is step.executable.timeline
    timeline.write(tmp_path / "kept.json")
    kept = read_trace(tmp_path / "kept.json")
    for category in ("call", "step", "stage pass", "copy", "update", "host transfer"):
        count = len(kept.of(category))
        assert count == len(trace.of(category))
        assert count or category in ("copy", "update")
    assert len(kept.counters) == len(trace.counters) > 0
    assert sum(timeline.busy().values()) > 0


def test_the_option_is_in_no_program_and_in_no_file():
    records, plain = Options(record="timeline"), Options()
    assert of_program(records) == of_program(plain)
    assert write_options(records) == write_options(plain)
    with pytest.raises(OptionError, match="option record is 'all'; choose timeline, or None"):
        Options(record="all")


@pytest.mark.parametrize("form", FORMS)
def test_an_unrecorded_call_enters_no_function_of_recordings(form):
    step, x = compiled(form)
    step(x)
    assert entered(lambda: step(x)) == []


def entered(run):
    """The functions of recordings that a call enters, on any thread."""
    names = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename in OWN_FILES:
            names.append(frame.f_code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return names


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_calls_through_torch_compile_are_spans_of_each_graph(micro_batches, tmp_path):
    torch._dynamo.reset()
    options = {"engine": "eager", "micro_batches": micro_batches}
    x = torch.randn(4, 6)

    def gradients(model, compiled):
        model.zero_grad()
        compiled(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = Net()
    model.forward = lambda x: model.b(torch.tanh(model.a(x)))
    compiled = torch.compile(model, backend="ipu", options=options)
    plain = gradients(model, compiled)
    assert entered(lambda: gradients(model, compiled)) == []
    results = []
    trace = recorded(lambda: results.append(gradients(model, compiled)), tmp_path)
    assert_same_bits(results, [plain])
    calls = {span["name"].rpartition(" ")[2] for span in trace.of("call")}
    assert calls == {"forward", "backward"}
    assert all(span["name"].startswith("graph ") for span in trace.of("call"))
    assert {span["name"] for span in trace.of("stage pass")} == {
        f"stage {stage} {direction}, micro-batch {number}, replica 0"
        for stage in (0, 1)
        for direction in ("forward", "backward")
        for number in range(micro_batches)
    }
    assert len(trace.of("copy")) == 2 * micro_batches
    with pytest.raises(RuntimeError):
        recorded(lambda: compiled(torch.randn(4, 7)), tmp_path)


def test_compilation_spans_name_every_pass_and_function(tmp_path):
    step, x = compiled("pipelined")
    trace = recorded(lambda: step.compile(x), tmp_path)
    runs = step.parts.compiled.passes
    assert len(runs) > 50
    assert [(span["name"], span["args"]["level"]) for span in trace.of("pass")] == [
        (run.name, run.level) for run in runs
    ]
    jobs = {span["name"]: span for span in trace.of("job")}
    assert jobs.keys() == {"compiling Net", "tracing"}
    assert all(inside(span, jobs["compiling Net"]) for span in trace.of("pass"))
    functions = [f"@{function.name}" for function in step.program.functions]
    assert [span["name"] for span in trace.of("function")] == functions


@pytest.mark.parametrize(
    "form",
    [
        "pipelined",
        "fused",
        pytest.param("replayed", marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_pytorchs_profiler_has_a_row_for_each_stage_and_direction(form):
    step, x = compiled(form)
    step(x)
    every = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every) as profiler:
        step(x)
    rows = {row.key: row.count for row in profiler.key_averages()}
    assert rows["training call"] == 1
    found = {name: count for name, count in rows.items() if name.startswith("stage ")}
    runs = ITERATIONS * ACCUMULATION * REPLICAS
    if form == "pipelined":
        names = "stage 0 forward", "stage 0 backward", "stage 1 forward and backward"
        assert found == dict.fromkeys(names, runs)
        assert rows["update 2 parameters of group 0"] >= 2 * ITERATIONS
    else:
        repeated = ", repeated without Python" if form == "replayed" else ""
        assert found.keys() == {f"stage 0 forward and backward{repeated}"}


def test_ranks_of_a_process_are_in_its_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(ranks, "share_of", lambda _: transport_here() and transport_here().share)

    def run(_):
        training = Training()
        return training.step(training.rows(0))

    plain, results = run_ranks(1, 2, run), []
    trace = recorded(lambda: results.extend(run_ranks(1, 2, run)), tmp_path)
    assert_same_bits(results, plain)
    assert len(trace.of("call")) == 2
    assert len({span["tid"] for span in trace.of("call")}) == 2
    passes = Counter(trace.process_of(span) for span in trace.of("stage pass"))
    assert len(passes) > 1
    assert len({*passes.values()}) <= 2


def test_a_call_that_fails_is_in_the_trace_without_the_task_that_failed(tmp_path):
    class Breaking(Net):
        def forward(self, x):
            return super().forward(torch.linalg.cholesky(x))

    model = Breaking().eval()
    step = compile_inference(model, Options(engine="eager"))
    good = torch.eye(6)
    step(good)
    with (
        pytest.raises(ipu_dynamo.ExecutionError),
        ipu_dynamo.profile(tmp_path / "trace.json"),
    ):
        step(-good)
    trace = read_trace(tmp_path / "trace.json")
    assert [span["args"] for span in trace.of("call")] == [{"complete": False}]
    assert trace.of("stage pass") == []
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {}
