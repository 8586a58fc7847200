"""Check that programs read back from their text, and that other text is refused by its line."""

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import ipu_dynamo.torch_compile.compile_graph
import ipu_dynamo.whole_step.lowering
from ipu_dynamo.passes.pipeline import run_host_passes
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.testing import assert_same_bits, options_for, placements_of, recipes
from ipu_dynamo.torch_compile.backend import ipu
from tests.program.texts import HOSTILE, damaged, programs, training
from tests.properties.running import draw_placement, outcome


def read_back(program, constants=None):
    """The program that the text of `program` is; every form and every comparison agrees."""
    text = program.text()
    parsed = Program.parse(text, constants)
    assert parsed.text() == text
    assert parsed == program
    assert hash(parsed) == hash(program)
    assert str(parsed) == str(program)
    assert parsed.short() == program.short()
    return parsed


@contextmanager
def through_text():
    """Run every program that is compiled in here as it was read back from its text."""

    def compile_model(*args, **kwargs):
        compiled = plain_model(*args, **kwargs)
        program = read_back(compiled.program, compiled.tensors)
        return replace(compiled, host=run_host_passes(program))

    def lower(*args, **kwargs):
        return read_back(plain_lower(*args, **kwargs))

    plain_model, plain_lower = (
        ipu_dynamo.whole_step.lowering.compile_model,
        ipu_dynamo.torch_compile.compile_graph.lower,
    )
    with (
        patch.object(ipu_dynamo.whole_step.lowering, "compile_model", compile_model),
        patch.object(ipu_dynamo.torch_compile.compile_graph, "lower", lower),
    ):
        yield


@pytest.mark.parametrize("index", range(6))
def test_text_of_every_kind_of_program_reads_back(index):
    program = programs()[index]
    read_back(program)
    assert program.text().isascii()
    for function, parsed in zip(
        program.functions, Program.parse(program.text()).functions, strict=True
    ):
        for node, other in zip(function.graph.graph.nodes, parsed.graph.graph.nodes, strict=True):
            assert node.name == other.name
            value, found = node.meta.get("val"), other.meta["val"]
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (found.dtype, found.shape)
                assert (value.stride(), value.device) == (found.stride(), found.device)
        assert parsed.written == function.written


def test_a_new_process_knows_the_operators_of_programs(tmp_path):
    for number, program in enumerate(programs()):
        (tmp_path / f"{number}.txt").write_text(program.text())
    written = "".join(program.text() for program in programs())
    assert "= ipu.half_partials_matmul.default(" in written
    assert "= ipu.check_floating_point.default(" in written
    code = """
import sys
from pathlib import Path

from ipu_dynamo.program import Program

for path in sorted(Path(sys.argv[1]).iterdir()):
    text = path.read_text()
    assert Program.parse(text).text() == text
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)


@pytest.mark.examples(500)
@pytest.mark.parametrize(
    "engine", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)
@pytest.mark.quick(8)
@given(recipe=recipes(), data=st.data())
def test_drawn_models_run_alike_from_text(engine, recipe, data):
    train = data.draw(st.booleans())
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(engine=engine, training=train, placement=placement))
    options = replace(options, seed=data.draw(st.integers(0, 3)))
    expected = outcome(recipe, placement, options, training=train)
    with through_text():
        found = outcome(recipe, placement, options, training=train)
    assert_same_bits(found, expected)


@pytest.mark.examples(40)
@pytest.mark.quick(5)
@given(recipe=recipes(), data=st.data())
def test_drawn_models_run_alike_from_text_through_torch_compile(recipe, data):
    train = data.draw(st.booleans())
    placement = data.draw(placements_of(recipe.build().names, kinds=("sharded",)))

    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = placement.place(recipe.build()), recipe.data(1)
        options = {"engine": "eager", "strategy": placement.strategy}
        call = torch.compile(model, backend=ipu, options=options)
        with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(train):
            results = call(*inputs)
        if train:
            results["loss"].sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return {"results": results, "buffers": list(model.buffers()), "gradients": gradients}

    expected = run()
    with through_text():
        found = run()
    assert_same_bits(found, expected)


# --- Other text -----------------------------------------------------------------------------------


def refused(text):
    """Whether `text` is refused, with its line; else it is the text of the program that is read."""
    modules = set(sys.modules)
    try:
        program, problem = Program.parse(text), ""
    except ValueError as error:
        program, problem = None, str(error)
    assert set(sys.modules) == modules
    if program is not None:
        assert program.text() == text
        return False
    line = re.match(r"line (\d+): ", problem)
    assert line, f"names no line: {problem}"
    assert 1 <= int(line[1]) <= len(text.split("\n"))
    return True


@given(data=st.data())
def test_damaged_text_is_refused_or_is_the_text_of_what_is_read(data):
    text = data.draw(st.sampled_from(programs())).text()
    for _ in range(8):
        other = data.draw(damaged(text))
        note(other)
        refused(other)


@given(text=st.text() | st.text('()[]{}%=:,. #"\\\n'))
def test_any_text_is_refused(text):
    assert refused(text)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_words_are_refused_in_every_place(hostile):
    for old in ('"norm.weight"', "aten.addmm.default", "%addmm", "f32[4]", "1e-05", "placeholder"):
        text = training().text()
        assert old in text
        changed = text.replace(old, hostile, 1)
        assert refused(changed) or hostile[0] == old[0] == '"'  # another name


def test_nothing_is_run(tmp_path):
    text, target = training().text(), tmp_path / "made"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for old in ("%addmm", "True", "dtype=", "aten.t.default", "0.1", '"a"', "kind="):
        for new in (code, f"({code})", f"{code}=", f'"{code}"', f"{old}, {code}", f"x={code}, "):
            refused(text.replace(old, new, 1))
            refused(text.replace(old, new))
    assert not target.exists()


def test_errors_say_what_is_wrong_and_where():
    text = training().text()
    for old, new, message in (
        ("form 2", "form 1", "line 1: expected 'ipu_dynamo program, form 2'"),
        ("aten.addmm.default", "aten.addmn.default", "no operator aten.addmn.default"),
        ("(%first_bias,", "(%second_bias,", "nothing is called %second_bias before this line"),
        ("ipu=0", "ipu=zero", "zero is not a value"),
        ("ipu=0", "ipu=0.0", "ipu is 0.0, which is not int"),
        ("ipu=0", "cpu=0", "Variable has no field cpu"),
        (", ipu=0", "", "Variable needs ipu"),
        ('"training"', '"learning"', 'kind is "learning", which is not'),
        (
            "Adam(",
            "Adamant(",
            "Adamant cannot stand here; SGD, Adam, RMSprop, LAMB, Traced, HostStep can",
        ),
        ("1e-05", "1e-06", "its graph has the key"),
        ("1e-05", "0.00001", "is written as"),
        ("clear=False", "clear=False, clear=False", "clear is given twice"),
        ('function="step1"', 'function="step2"', "no function is called step2"),
        ("    body", "     body", "indentation"),
        ("    body", "    tail", "Repeat has no part tail"),
        ("\nend\n", "\n", "expected one program, 'end', and nothing more"),
    ):
        assert old in text, old
        with pytest.raises(ValueError, match=r"^line \d+: ") as error:
            Program.parse(text.replace(old, new, 1))
        assert message in str(error.value)


def test_constants_are_compared_by_name_and_values():
    program = training()
    (constant,) = (v for v in program.variables if v.kind == "constant")
    values = torch.tensor([1.0, 2.0, -0.0, 4.0])
    assert constant.digest == digest(values)
    assert Program.parse(program.text(), {constant.name: values, "other": values}) == program
    for wrong in (
        {},
        {"other": values},
        {constant.name: values.abs()},
        {constant.name: values[:1]},
    ):
        with pytest.raises(ValueError, match=rf"line \d+: the constant {constant.name} "):
            Program.parse(program.text(), wrong)


def test_programs_with_other_constants_differ():
    def program(number):
        run = ipu_dynamo.compile_inference(lambda x: x * torch.tensor(number), {"engine": "eager"})
        run.compile(torch.ones(2))
        return run.program

    assert program(1.0) == program(1.0)
    assert program(1.0) != program(2.0)
