"""Check the levels, the lines and the repetitions of the log."""

import logging
import re
import sys

import pytest

import poptorch
from poptorch import _logging


@pytest.fixture(autouse=True)
def quiet_again():
    """Undo what a test did to the loggers."""
    core = logging.getLogger("ipu_dynamo")
    before = poptorch.logger.level, core.level, list(core.handlers)
    yield
    poptorch.logger.setLevel(before[0])
    core.setLevel(before[1])
    core.handlers[:] = before[2]
    _logging.limit_repeats(sys.maxsize)


def test_a_line_has_time_logger_level_and_message(capsys):
    poptorch.logger.warning("watch out: %d", 3)
    pattern = r"\[\d\d:\d\d:\d\d\.\d{3}\] \[poptorch::python\] \[warning\] watch out: 3\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("TRACE", "trace debug info warning error"),
        ("TRACE_ALL", "trace debug info warning error"),
        ("DEBUG", "debug info warning error"),
        ("INFO", "info warning error"),
        ("WARN", "warning error"),
        ("ERR", "error"),
        ("OFF", ""),
        (0, "trace debug info warning error"),
        (1, "debug info warning error"),
        (2, "info warning error"),
        (3, "warning error"),
        (4, "error"),
        (6, ""),
    ],
)
def test_a_level_lets_the_severer_ones_through(capsys, level, written):
    poptorch.setLogLevel(level)
    for logger in (poptorch.logger, logging.getLogger("ipu_dynamo.passes")):
        logger.log(_logging.TRACE, "trace")
        logger.debug("debug")
        logger.info("info")
        logger.warning("warning")
        logger.error("error")
        assert re.findall(r"\] (\w+)$", capsys.readouterr().err, re.M) == written.split()


def test_the_core_can_be_chosen_alone(capsys):
    poptorch.poptorch_core.setPopartLogLevel(1)
    poptorch.logger.debug("ours")
    logging.getLogger("ipu_dynamo").debug("the core's")
    assert re.findall(r"\[debug\] (.+)", capsys.readouterr().err) == ["the core's"]


@pytest.mark.parametrize("level", [5, 7, -1])
def test_a_wrong_integer_is_refused(level):
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(level)


def test_a_wrong_name_is_refused():
    text = "Unknown log level: LOUD. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
    with pytest.raises(ValueError, match=re.escape(text)):
        poptorch.setLogLevel("LOUD")


def test_only_the_compilers_repetitions_are_cut_off(capsys):
    compiler = logging.getLogger("ipu_dynamo.passes")
    for limit in (2, 3):  # a new limit counts anew
        _logging.limit_repeats(limit)
        for number in range(5):
            compiler.warning("again")
            compiler.warning("other %d", number)
            poptorch.logger.warning("ours")
        text = capsys.readouterr().err
        assert [text.count(word) for word in ("again", "other", "ours")] == [limit, 5, 5]
