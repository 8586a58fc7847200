"""List scripts of independent repositories, with what must hold when each has run.

The name of a check is the claim.
"""

import re

from tests.programs.program import Names, Program, Repository

_STEPS = Repository(
    "tut_for_sen",
    "https://github.com/wunaixin/tut_for_sen.git",
    "8427e9a8bb5e578c17fc82dbd8d7b7f9d5a9fd2b",
)


def the_host_computes_with_the_trained_weights(names: Names, printed: str) -> None:
    losses = [float(text) for text in re.findall(r"^\d+: ([\d.e-]+)", printed, re.MULTILINE)]
    assert len(losses) == 800
    assert losses[-1] < losses[0] / 100
    assert "done" in printed  # behind its own comparison of host and device


def plain_pytorch_goes_on_where_the_device_ended(names: Names, printed: str) -> None:
    on_device = [float(text) for text in re.findall(r"\bloss=([\d.]+)", printed)]
    on_host = [float(text) for text in re.findall(r"\bloss2=([\d.]+)", printed)]
    assert len(on_device) == len(on_host) == 40
    assert abs(on_host[0] - on_device[-1]) <= max(0, on_device[-2] - on_device[-1]) + 1e-4
    assert on_host[-1] <= on_host[0] < on_device[0]


PROGRAMS = (
    Program(
        _STEPS,
        "demo_step2.py",
        the_host_computes_with_the_trained_weights,
        without=("pdb.set_trace",),
    ),
    Program(
        _STEPS,
        "demo_step5c.py",
        plain_pytorch_goes_on_where_the_device_ended,
        without=("pdb.set_trace",),
        sizes={"range(2000)": "range(40)"},
    ),
)
