"""Run the examples, and hold them to what they print."""

import os
import subprocess
import sys

import pytest

from examples import digits, gpt, huggingface_bert, keras_digits, predict_a_model


def test_digits_are_learnt_as_in_plain_pytorch(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    figures = digits.main(epochs=1)
    assert figures["difference_after_10_updates"] <= 1e-5
    assert figures["agreement"] >= 0.995
    assert figures["accuracy"] >= 0.6  # after one epoch of the twelve that `make run` trains
    printed = capsys.readouterr().out
    assert "program training: 4 stages on 4 IPUs" in printed
    assert f"{figures['accuracy']:.2%}" in printed


def test_bert_learns_on_two_ipus_as_in_plain_pytorch(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    figures = huggingface_bert.main(steps=3)
    assert figures["difference"] <= 1e-3
    assert figures["last"] < figures["first"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["step", "0", "1", "2"]


def test_keras_learns_digits_on_two_ipus_as_plain_keras_does(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    figures = keras_digits.main(epochs=1)
    assert figures["loss_difference"] <= 1e-4
    assert figures["agreement"] >= 0.99
    assert figures["accuracy"] >= 0.8
    printed = capsys.readouterr().out
    assert "program training: 2 stages on 2 IPUs" in printed
    assert f"{figures['accuracy']:.2%}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_digits_have_the_same_bits_on_any_mesh(engine):
    environment = {**os.environ, "IPU_DYNAMO_ENGINE": engine, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    program = ["-m", "examples.digits_ranks", "--epochs", "1"]

    def printed(*command):
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=240
        )
        return run.stdout

    alone = printed(sys.executable, *program)
    assert alone.startswith("losses ")
    assert "output.bias " in alone
    for mesh in ("4x1", "2x2", "1x4") if engine == "eager" else ("2x2",):
        assert printed(*start, *program, "--mesh", mesh) == alone, mesh


def test_a_gpt_learns_on_four_ipus_as_in_plain_pytorch(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    figures = gpt.main(steps=3, width=16, length=16)
    assert figures["difference"] <= 1e-4
    assert figures["last"] < figures["first"]
    assert figures["recomputed_bytes"] < figures["kept_bytes"]
    printed = capsys.readouterr().out
    assert "program training: 4 stages on 4 IPUs" in printed
    assert "operators again, as asked" in printed or "operators again, by default" in printed
    assert f"\n{gpt.PROMPT}" in printed


def test_a_large_model_is_predicted_and_the_fastest_choice_that_fits_is_taken(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    figures = predict_a_model.main(
        [(2, "all"), (4, "all")], words=128, width=32, layers=4, heads=2, length=16
    )
    best, choices = figures["best"], figures["choices"]
    assert best is choices[figures["choice"]]
    fitting = [of for of in choices.values() if of.verdict.word == "fits"]
    assert best.items_per_second == max(of.items_per_second for of in fitting)
    assert best.num_ipus == 4
    assert figures["rows_per_second_here"] > 0
    assert str(best) in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000
