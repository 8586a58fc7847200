"""Check the data of IPUs and systems: names, sizes, marks, and what users change."""

import copy
import pickle
from dataclasses import replace

import pytest

from ipu_dynamo import operator_cost
from ipu_dynamo.errors import OptionError
from ipu_dynamo.machine import Figure, System, machines
from ipu_dynamo.machine.figure import MARKS, least_certain
from ipu_dynamo.machine.ipu import BOW, C600, MK1, MK2
from ipu_dynamo.machine.system import system_of

PUBLISHED = [  # TFLOP/s
    (MK1, "16.16", 124.5),
    (MK1, "32", 31.1),
    (MK2, "16.16", 249.7),
    (MK2, "32", 62.4),
    (BOW, "16.16", 348.6),
    (BOW, "32", 87.1),
    (C600, "16.16", 280),
    (C600, "8", 560),
]


@pytest.mark.parametrize(("ipu", "kind", "teraflops"), PUBLISHED)
def test_tiles_rates_and_clock_give_the_published_peak(ipu, kind, teraflops):
    peak = 2 * ipu.kind(kind).macs * ipu.tiles * ipu.clock / 1e12
    assert peak == pytest.approx(teraflops, rel=0.01)


def test_every_number_has_a_source_and_a_mark():
    for system in machines.values():
        for name, figure in system.figures():
            assert figure.mark in MARKS, name
            assert figure.source, name


@pytest.mark.parametrize(
    ("name", "ipus", "ipu"),
    [("m2000", 4, "Mk2"), ("pod64", 64, "Mk2"), ("bow-2000", 4, "Bow"), ("bow-pod256", 256, "Bow")],
)
def test_a_system_has_the_ipus_that_its_name_says(name, ipus, ipu):
    system = system_of(name)
    assert (system.ipus, system.ipu.name) == (ipus, ipu)
    system.check(ipus)
    with pytest.raises(OptionError, match=rf"needs {ipus + 1} IPUs.* has {ipus}\b"):
        system.check(ipus + 1)


@pytest.mark.parametrize("name", ["mk1", "mk2", "bow", "c600"])
def test_a_machine_without_a_size_has_as_many_ipus_as_a_program_needs(name):
    system_of(name).check(10**6)


def test_a_machine_is_named_or_given():
    system = System("two", BOW, ipus=2)
    assert system_of(system) is system
    assert system_of(BOW).ipu is BOW
    with pytest.raises(OptionError, match=r"no machine is named 'bw'.*bow"):
        system_of("bw")


def test_a_number_of_the_user_is_a_guess_and_changes_the_cost():
    shapes = ["f16[512,512]", "f16[512,512]"]
    wider = replace(BOW, exchange_bytes=8.0)
    usual, other = (operator_cost("aten.mm.default", shapes, ipu) for ipu in (BOW, wider))
    assert other.exchange < usual.exchange
    assert (usual.marks["exchange"], other.marks["exchange"]) == ("fitted", "M")
    assert dict(wider.figures())["exchange_bytes"].mark == "M"


def test_a_figure_calculates_and_is_copied_with_its_source():
    figure = Figure(3, "cycles", "D", "a page")
    assert figure * 2 == 6
    for twin in (copy.deepcopy(figure), pickle.loads(pickle.dumps(figure))):
        assert (twin, twin.unit, twin.mark, twin.source) == (3, "cycles", "D", "a page")
    assert least_certain(["D", "M", "F"]) == "M"
