"""Check that what was measured stays, comes back whole, and decides what is called."""

import json

import pytest
import torch

from ipu_dynamo import IpuError
from ipu_dynamo.tune import autotune_cache, matmul_times
from ipu_dynamo.tune import matmul_choice as chosen
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_choice import MATMUL, MatmulChoice, matmul_choice
from ipu_dynamo.tune.matmul_classes import MEASURED, MatmulClass, example_of

MADE_UP = {one: {"torch": 3.0, "onednn": 2.0} for one in MEASURED}
LARGE = MatmulClass("a @ b.t()", "large")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    autotune_cache.forget()
    yield tmp_path
    autotune_cache.forget()


@pytest.fixture
def measurements(monkeypatch):
    """How often there was a measurement, as the length of a list; each gives other figures."""
    done = []

    def measure(one):
        done.append(len(done))
        return {way: seconds + len(done) for way, seconds in MADE_UP[one].items()}

    monkeypatch.setattr(matmul_times, "measure", measure)
    return done


def test_measures_every_class_by_every_library_and_leaves_no_trace():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for one in MEASURED:
        ways = matmul_times.measure(one)
        packable = one.form == "a @ b.t()" and one.size != "batched"
        assert set(ways) == {"torch", "onednn"} | ({"packed"} if packable else set())
        assert all(0 < seconds < 10 for seconds in ways.values())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_device_is_not_measured():
    with torch.device("meta"):
        operands = [operand for one in MEASURED for operand in example_of(one)]
    assert {(operand.device.type, operand.dtype) for operand in operands} == {
        ("cpu", torch.float32)
    }


def test_what_was_measured_stays_for_later_processes(folder, measurements):
    first = matmul_times.matmul_times(LARGE)
    assert matmul_times.matmul_times(LARGE) is first
    autotune_cache.forget()
    assert matmul_times.matmul_times(LARGE) == first
    assert len(measurements) == 1
    (file,) = (folder / "matmuls").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_of_two_processes_the_first_decides(folder, measurements, monkeypatch):
    measure, other = matmul_times.measure, []

    def overtaken(one):
        if not other:  # another process measures and writes meanwhile
            other.append(None)
            other[0] = matmul_times.matmul_times(one)
        return measure(one)

    monkeypatch.setattr(matmul_times, "measure", overtaken)
    found = matmul_times.matmul_times(LARGE)
    assert len(measurements) == 2
    assert [found] == other


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: "",
        lambda text: text.replace("3", "4"),
        lambda text: text.replace("{", "["),
    ],
)
def test_a_damaged_file_is_measured_again(folder, measurements, caplog, damage):
    matmul_times.matmul_times(LARGE)
    (file,) = (folder / "matmuls").iterdir()
    file.write_text(damage(file.read_text()))
    autotune_cache.forget()
    again = matmul_times.matmul_times(LARGE)
    assert "is measured again" in caplog.text
    assert len(measurements) == 2
    autotune_cache.forget()
    assert matmul_times.matmul_times(LARGE) == again


def test_another_machine_or_setting_is_measured_anew(folder, measurements, monkeypatch):
    matmul_times.matmul_times(LARGE)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    matmul_times.matmul_times(LARGE)
    assert len(measurements) == 2
    files = list((folder / "matmuls").iterdir())
    machines = {json.loads(f.read_text().rpartition("}")[0] + "}")["machine"] for f in files}
    assert len(machines) == 2


def test_without_a_folder_nothing_is_measured(measurements, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, OFF)
    monkeypatch.delenv(MATMUL, raising=False)
    assert matmul_choice().way(LARGE) == "torch"
    assert measurements == []


def test_only_classes_that_are_asked_for_are_measured(folder, measurements, monkeypatch):
    monkeypatch.delenv(MATMUL, raising=False)
    assert matmul_choice().way(MatmulClass("a @ b", "tiny")) == "torch"
    assert measurements == []
    assert matmul_choice().way(LARGE) == "onednn"
    assert measurements == [0]
    assert matmul_choice().way(MatmulClass("a @ b", "large")) == "onednn"
    assert matmul_choice().way(LARGE) == "onednn"
    assert measurements == [0, 1]


def test_figures_measure_what_they_do_not_have(folder, measurements, monkeypatch):
    known = {LARGE: {"torch": 1.0, "onednn": 2.0}}
    choice = Figures(None, known).choice()
    assert choice.way(LARGE) == "torch"
    assert measurements == []
    assert choice.way(MatmulClass("a @ b", "large")) == "onednn"
    assert measurements == [0]
    assert Figures(None).choice().way(MatmulClass("a @ b", "large")) == "torch"


@pytest.mark.parametrize(
    ("seconds", "loose", "packable"),
    [
        ({"torch": 1.0, "onednn": 0.96}, "torch", "torch"),
        ({"torch": 1.0, "onednn": 0.94}, "onednn", "onednn"),
        ({"torch": 1.0, "onednn": 0.5, "packed": 0.499}, "onednn", "onednn"),
        ({"torch": 1.0, "onednn": 0.5, "packed": 0.48}, "onednn", "packed"),
        ({"torch": 1.0, "onednn": 2.0, "packed": 0.97}, "torch", "torch"),
        ({"torch": 1.0, "onednn": 2.0, "packed": 0.9}, "torch", "packed"),
    ],
)
def test_the_faster_library_is_chosen_by_a_margin(seconds, loose, packable):
    choice = MatmulChoice(times=(MADE_UP | {LARGE: seconds}).get)
    assert choice.way(LARGE) == loose
    assert choice.way(LARGE, packable=True) == packable
    assert choice.measured(LARGE) == seconds


def test_the_environment_forces_a_library(monkeypatch):
    tiny = MatmulClass("a @ b.t()", "tiny")
    monkeypatch.setenv(MATMUL, "onednn")
    assert matmul_choice().way(tiny) == "onednn"
    assert matmul_choice().way(tiny, packable=True) == "packed"
    assert matmul_choice().way(MatmulClass("a @ b", "tiny"), packable=True) == "onednn"
    monkeypatch.setenv(MATMUL, "torch")
    assert matmul_choice().way(LARGE, packable=True) == "torch"
    monkeypatch.setenv(MATMUL, "mkl")
    with pytest.raises(IpuError, match="IPU_DYNAMO_MATMUL is 'mkl': choose one of auto, torch"):
        matmul_choice()


def test_a_disabled_library_is_not_called(monkeypatch):
    monkeypatch.delenv(MATMUL, raising=False)
    monkeypatch.setattr(chosen, "mkldnn_enabled", lambda: False)
    assert matmul_choice().forced == "torch"
    monkeypatch.setenv(MATMUL, "onednn")
    with pytest.raises(IpuError, match="lacks or has disabled"):
        matmul_choice()


def test_reduced_precision_is_left_to_torch(monkeypatch):
    monkeypatch.delenv(MATMUL, raising=False)
    torch.set_float32_matmul_precision("medium")
    try:
        assert matmul_choice().forced == "torch"
    finally:
        torch.set_float32_matmul_precision("highest")
