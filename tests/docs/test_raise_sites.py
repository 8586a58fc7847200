"""Check that a recorded run tells the raise statements that it reached from the others."""

import re

import pytest

from ipu_dynamo import IpuError, Options
from poptorch.errors import Error
from tests import raise_record
from tests.docs import errors
from tests.docs.errors import sites, unreached
from tests.raise_record import ROOT, RaiseRecord


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record in a folder of its own, which watches no longer after the test."""
    for module in (raise_record, errors):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    for kind in (IpuError, Error):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    return RaiseRecord()


def test_a_recorded_run_has_the_statements_that_raised(record):
    with pytest.raises(IpuError):
        Options(device_iteration=4)
    with pytest.raises(IpuError):
        Options(replicas=0)
    record.pytest_unconfigure()
    reached = {*sites()} - {*unreached()}
    assert {(site.file, site.text.partition("(")[0]) for site in reached} == {
        ("ipu_dynamo/options/checks.py", "raise OptionError")
    }
    assert len(reached) == 2


def test_each_statement_is_listed_with_its_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["errors"])
    assert errors.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 500
    for line in lines[::50]:
        file, number, text = re.fullmatch(r"(\S+):(\d+): (raise .*)", line).groups()
        source = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert source.split("(")[0].strip() == text.split("(")[0]


def test_without_a_record_it_says_how_to_make_one(record, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["errors", "--coverage"])
    assert errors.main() == 2
    assert "--record-raises" in capsys.readouterr().err
