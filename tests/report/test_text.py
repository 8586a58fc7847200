"""Check the page of text: its size, and that its figures are the prediction's."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.machine.prediction import Reproduce, Unknown
from ipu_dynamo.machine.text import headline, nbytes, prediction_text
from tests.report.predictions import drawn_prediction, empty_prediction


@pytest.mark.parametrize("used", [0.2, 0.9, 3.0])
@pytest.mark.parametrize("ipus", [1, 4, 8, 9, 64])
def test_a_page_is_small_and_ascii(ipus, used):
    many = (Unknown("my.long_operator_name.default", "4 cycles", "model.py:1", 0.01),) * 30
    prediction = replace(
        drawn_prediction(ipus=ipus, used=used, model="Encodér" * 30, line="lange/Datei.py" * 20),
        unknown=many,
        notes=("a note",) * 50,
    )
    lines = prediction_text(prediction).split("\n")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert all(line.isascii() and (line.isprintable() or not line) for line in lines)


def test_the_first_sentence_is_the_verdict():
    fits, tight, large = (drawn_prediction(used=used) for used in (0.5, 0.85, 1.3))
    limit = nbytes(fits.verdict.limit)
    assert headline(fits) == (
        "Encoder on bow-pod4 fits: the fullest tile, on IPU 0, needs at most "
        f"{nbytes(fits.verdict.tile.high)} of its {limit}."
    )
    assert headline(tight).startswith("Encoder on bow-pod4 is tight: ")
    tile, ipus = large.verdict.tile, len(large.ipus)
    assert f"holds {limit} and needs {nbytes(tile.low)} to {nbytes(tile.high)}" in headline(large)
    small = sum(ipu.memory.profile.fullest.low > ipu.memory.tile_limit for ipu in large.ipus)
    assert headline(large).endswith(f"; {small} of {ipus} IPUs are too small.")
    assert small
    for prediction in (fits, tight, large):
        text = prediction_text(prediction)
        assert text.replace("\n", " ").startswith(headline(prediction))


def test_every_ipu_of_a_few_has_a_line_with_its_bytes_and_cycles():
    prediction = drawn_prediction(ipus=8)
    lines = prediction_text(prediction).split("\n")
    for number, ipu in enumerate(prediction.ipus):
        (line,) = [line for line in lines if line.startswith(f"IPU {number} ")]
        total = ipu.memory.total
        assert f"{nbytes(total.low)} to {nbytes(total.high)}" in line
        assert f"{ipu.cycles.busy:,}" in line
        share = total.central / ipu.memory.limit
        assert line.count("#") == pytest.approx(30 * share, abs=0.5)
        assert "weights" in line


def test_of_many_ipus_the_three_fullest_and_slowest_are_named():
    prediction = drawn_prediction(ipus=64, rows=2)
    ipus = list(prediction.ipus)
    for number in (40, 50, 60):
        slow = replace(ipus[number].cycles, update=number * 10**9)
        ipus[number] = replace(ipus[number], cycles=slow)
    lines = prediction_text(replace(prediction, ipus=tuple(ipus))).split("\n")
    named = [int(line.split()[1]) for line in lines if line.startswith("IPU ")]
    assert named == [0, 1, 2, 40, 50, 60]
    assert any(line.startswith("the other 58 IPUs: ") for line in lines)


def test_the_ten_costliest_rows_come_with_their_lines():
    prediction = drawn_prediction(rows=30)
    text = prediction_text(prediction).split("\n")
    begin = text.index("share of operators' cycles, runs in a step, pass, operator, line") + 1
    costs = sorted(prediction.operators, key=lambda row: -row.cycles.total)
    total = sum(row.cycles.total for row in costs)
    for line, row in zip(text[begin : begin + 10], costs, strict=False):
        assert float(line.split()[0]) == pytest.approx(100 * row.cycles.total / total, abs=0.06)
        assert row.operator in line
        assert row.line in line


def test_the_five_largest_tensors_of_the_peak_and_the_command_are_there():
    prediction = drawn_prediction()
    text = prediction_text(prediction)
    tensors = prediction.ipus[prediction.verdict.ipu].memory.peak.tensors
    assert all(f"{nbytes(t.nbytes):>10}  {t.name}" in text for t in tensors[:5])
    assert tensors[5].name not in text
    assert text.endswith("\nreport: ipu-dynamo report encoder.txt --machine bow-pod4")


def test_a_prediction_of_python_is_reported_in_python():
    prediction = replace(drawn_prediction(), model="", reproduce=Reproduce("", (), ()))
    text = prediction_text(prediction)
    assert text.startswith("The program on bow-pod4 fits: ")
    assert text.endswith('\nreport: ipu_dynamo.write_report(prediction, "report.html")')


def test_shares_by_mark_and_without_a_formula_are_there():
    text = prediction_text(drawn_prediction())
    assert "50.0 % read, 20.0 % derived, 30.0 % fitted" in text
    assert "without a formula: 1.0 % of the cycles: my.op.default 1.0 %" in text
    assert "every operator has a formula" in prediction_text(
        replace(drawn_prediction(), unknown=())
    )


@given(st.integers(0, 2**45))
def test_bytes_are_told_to_three_digits(count):
    number, unit = nbytes(count).split()
    size = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    assert size == pytest.approx(count, rel=0.006)
    assert len(number) <= 4 or unit == "GiB"


def test_a_prediction_of_nothing_has_a_page():
    assert prediction_text(empty_prediction()).startswith("Encoder on bow-pod4 fits: ")
