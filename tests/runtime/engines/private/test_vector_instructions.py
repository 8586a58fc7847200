"""Check that the answers about vector instructions are those that a trial would give."""

import threading

import pytest
from torch._inductor import cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecISA

from ipu_dynamo.runtime.engines.private import vector_instructions
from ipu_dynamo.runtime.engines.private.vector_instructions import vector_sets_known

SETS = cpu_vec_isa.supported_vec_isa_list
SAID = {
    "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright": ("gcc", 12, (2, 40)),
    "g++ (GCC) 11.4.1 20230605 (Red Hat 11.4.1-2)\n": ("gcc", 11, (2, 40)),
    "x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.2.0-5) 13.2.0\n": ("gcc", 13, (2, 40)),
    "Debian clang version 14.0.6\nTarget: x86_64": ("clang", 14, (0, 0)),
    "Apple clang version 15.0.0 (clang-1500.3.9.4)\n": None,
    "icpx: another one": None,
}


@pytest.fixture
def tried(monkeypatch):
    """The sets that Inductor tries in the compiler; none of them is known to it."""
    calls = []

    def check_build(isa, code):
        calls.append((isa, code))
        return False

    monkeypatch.setattr(VecISA, "check_build", check_build)
    return calls


def compiler(monkeypatch, answer):
    monkeypatch.setattr(vector_instructions, "_compiler", lambda _: answer)
    monkeypatch.setattr(vector_instructions, "_has_sleef", lambda _: True)


@pytest.mark.parametrize("said", SAID)
def test_a_compiler_is_known_by_what_it_says(monkeypatch, said):
    answers = {"--version": said, "-print-prog-name=as": "as\n"}
    assembler = "GNU assembler (GNU Binutils for Debian) 2.40\n"
    monkeypatch.setattr(
        vector_instructions,
        "compiler_says",
        lambda command, argument: assembler if command == "as" else answers[argument],
    )
    assert vector_instructions._compiler.__wrapped__("c++") == SAID[said]


def test_nothing_is_tried_where_versions_say_it(monkeypatch, tried):
    compiler(monkeypatch, ("gcc", 13, (2, 40)))
    with vector_sets_known():
        assert VecAVX2().check_build(VecISA._avx_code)
        assert VecAMX().check_build(VecAMX._amx_fp16_code)
    assert tried == []


@pytest.mark.parametrize(
    "answer", [None, ("gcc", 9, (2, 40)), ("gcc", 12, (2, 30)), ("clang", 11, (0, 0))]
)
def test_an_old_or_unknown_compiler_is_tried(monkeypatch, tried, answer):
    compiler(monkeypatch, answer)
    with vector_sets_known():
        assert not VecAMX().check_build(VecAMX._amx_code)
    assert len(tried) == 1


def test_other_code_and_other_threads_are_tried(monkeypatch, tried):
    compiler(monkeypatch, ("gcc", 13, (2, 40)))
    with vector_sets_known():
        assert not VecAVX512().check_build("int answer() { return 42; }")
        thread = threading.Thread(target=lambda: VecAVX2().check_build(VecISA._avx_code))
        thread.start()
        thread.join()
    assert len(tried) == 2


@pytest.mark.slow
@pytest.mark.inductor
def test_trials_give_the_same_answers():
    processor = {*cpu_vec_isa.x86_isa_checker()}
    for isa in SETS:
        if {*str(isa).split()} <= processor:
            with vector_sets_known():
                known = isa.check_build(VecISA._avx_code)
            assert known == isa.check_build(VecISA._avx_code)
