"""Run the commands that the guide shows for a model of TensorFlow."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from ipu_dynamo.saved_model.conversion.settings.options import NAMES
from tests.saved_model.test_command import run  # noqa: F401  a fixture

pytest.importorskip("google.protobuf")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "saved_model.md"
CONVERTING = PAGE.read_text(encoding="utf-8").partition("## Converting for IPUs\n")[2]
BERT = Path(__file__).parent.parent / "fixtures" / "tf1_bert"


def block(title):
    return re.search(rf"<!-- {title} -->\n```text\n(.*?)```", CONVERTING, re.DOTALL)[1]


def test_a_model_of_tensorflow_is_served_in_five_commands(run, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BERT, "bert")
    Path("config.json").write_text(block("configuration of bert"))
    lines = block("five commands").splitlines()
    assert len(lines) == 5
    printed = []
    for line in lines:
        name, *arguments = shlex.split(line)
        assert name == "ipu-saved-model"
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        printed.append(out)
    places = dict(re.findall(r"^(\S+)  .*?  (host|ipu \d)$", printed[3], re.MULTILINE))
    assert (places["ones"], places["MatMul"], places["MatMul_3"]) == ("host", "ipu 0", "ipu 1")
    assert "float16" in printed[3]
    assert np.load("results/logits.npy").shape == (2, 8)


def test_the_page_lists_every_option():
    listed = re.findall(r"^\| (`--.*?) \|", CONVERTING, re.MULTILINE)
    names = [name for row in listed for name in re.findall(r"`--(\w+)`", row)]
    assert sorted(names) == sorted([*NAMES, "config_file"])
