"""Run the examples, and hold them to what they print."""

from examples import digits


def test_digits_are_learnt_as_in_plain_pytorch(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    figures = digits.main(epochs=1)
    assert figures["difference_after_10_updates"] <= 1e-5
    assert figures["agreement"] >= 0.995
    assert figures["accuracy"] >= 0.6  # after one epoch of the twelve that `make run` trains
    printed = capsys.readouterr().out
    assert "program training: 4 stages on 4 IPUs" in printed
    assert f"{figures['accuracy']:.2%}" in printed
