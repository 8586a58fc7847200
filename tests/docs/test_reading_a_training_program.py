"""Answer questions about a program from its text alone, and check the answers with its data."""

import re

import pytest

from ipu_dynamo.program import AllReduce, Call, Repeat, Store, Update
from tests.docs.guide import FOLDER


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program of the page, on the engine that compiles nothing."""
    page = (FOLDER / "reading_a_training_program.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    code = code.replace("options = Options(", "options = Options('eager', ")
    file = tmp_path_factory.mktemp("page") / "page.py"
    file.write_text(code, encoding="utf-8")  # printed programs quote its lines
    names = {"__name__": "page"}
    exec(compile(code, str(file), "exec"), names)
    return names["step"].program


@pytest.fixture(scope="module")
def text(program):
    return str(program)


@pytest.fixture(scope="module")
def short(program):
    return program.short()


def test_which_ipu_holds_a_variable(program, text):
    for variable in program.variables:
        (line,) = re.findall(rf"^  \w+ %{re.escape(variable.name)}: .*$", text, re.MULTILINE)
        assert int(re.search(r"ipu(\d+)", line)[1]) == variable.ipu
        assert ("off chip" in line) == variable.off_chip


def test_what_is_stored_off_chip_and_how_much_of_it_moves(program, short):
    count = sum(v.off_chip for v in program.variables)
    assert re.search(rf"off chip: .* in {count} variables \({count} states\)", short)
    written = sum(map(int, re.findall(r"^ +store .*: (\d+) bytes in all", short, re.MULTILINE)))
    stores = [i for i in program.walk() if isinstance(i, Store)]
    assert written == sum(store.type.nbytes for store in stores)
    stored = int(re.search(r"streaming memory: (\d+) bytes stored", short)[1])
    assert stored == written * 2 * 2 == program.traffic.stored  # device iterations, replicas


def test_how_many_micro_batches_are_in_flight(program, short):
    kept = re.findall(r"stage (\d) on ipu\d keeps (\d) micro-batch", short)
    assert [(int(stage), int(n)) for stage, n in kept] == [(0, 7), (1, 5), (2, 3), (3, 1)]
    assert [stash.copies for stash in program.stash] == [7, 5, 3, 1]


def test_how_many_bytes_go_between_two_ipus(program, short):
    (total,) = re.findall(r"^  ipu1 -> ipu2: (\d+) bytes in a call", short, re.MULTILINE)
    copies = re.findall(r"copy .*, (\d+) bytes  ipu1 -> ipu2", short)
    assert sum(map(int, copies)) * 8 * 2 * 2 == int(total)
    sent = [c.type.nbytes for c in program.copies if (c.src, c.dst) == (1, 2)]
    assert sum(sent) == sum(map(int, copies))


def test_what_is_computed_again(program, text, short):
    stages = re.findall(r"stage (\d) on ipu\d computes \d+ operators again", short)
    assert stages == ["0", "1", "2"]
    listings = {part.partition("(")[0]: part for part in text.split("\nfunction @")[1:]}
    again = {name for name, listing in listings.items() if "# again: " in listing}
    assert again == {"backward0", "backward2"}  # stage 1 calls that of stage 2
    assert all(function.repetitions for function in program.functions if function.name in again)


def test_which_line_of_the_model_is_an_instruction(program, text):
    body = text.partition("\nbody\n")[2]
    for call in (i for i in program.walk() if isinstance(i, Call)):
        lines = [x for x in body.splitlines() if f"call @{call.function}(" in x]
        (line,) = [x for x in lines if f"  on ipu{call.ipu}  #" in x]
        assert line.endswith(f"# {call.source}")
    assert "in forward: return self.norm2(" in next(
        x for x in text.splitlines() if "aten.gelu_backward(" in x
    )


def test_when_a_gradient_is_reduced_and_its_weight_updated(program, text):
    """In each device iteration, behind the loop over micro-batches; first the sum, then the use."""
    lines = text.partition("\nbody\n")[2].splitlines()
    places = {
        word: next(i for i, x in enumerate(lines) if word in x and "classify.weight..grad" in x)
        for word in ("all_reduce sum over replicas", "update group 0")
    }
    loop = next(i for i, x in enumerate(lines) if "over micro-batches" in x)
    indent = len(lines[loop]) - len(lines[loop].lstrip())
    assert lines[0] == "  repeat 2 over device iterations"
    assert loop < places["all_reduce sum over replicas"] < places["update group 0"]
    assert all(lines[i][:indent].isspace() and lines[i][indent] != " " for i in places.values())
    (outer,) = program.body
    assert isinstance(outer, Repeat)
    kinds = [type(i) for i in outer.body if isinstance(i, Repeat | AllReduce | Update)]
    assert kinds == [Repeat, *[AllReduce, Update] * 4]
    assert " / 16, clear " in lines[places["update group 0"]]
