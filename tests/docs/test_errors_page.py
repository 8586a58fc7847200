"""Check that every kind of error has a section in the guide, and every section an error."""

import ast
import pickle
import re
from pathlib import Path

import pytest
import torch

import poptorch
from ipu_dynamo.errors import CompileError, IpuError, main
from tests.docs.guide import FOLDER

ROOT = FOLDER.parent
PAGE = (FOLDER / "errors.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (\S+)$", PAGE, re.M)
TEXTS = dict(zip(SECTIONS, re.split(r"^## \S+$", PAGE, flags=re.M)[1:], strict=True))
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
RAISED = ("createPoptorchError", "Error", "RecoverableError", "UnrecoverableError")
SOURCES = [
    path
    for folder in ("ipu_dynamo", "passes", "runtime", "poptorch")
    for path in (ROOT / folder).rglob("*.py")
    if "ipu_dynamo/passes" not in path.as_posix() and "ipu_dynamo/runtime" not in path.as_posix()
]


def ids(path: Path) -> set[str]:
    """The ids that the errors of a file have: of classes, and of `id=` where one is raised."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(b) for b in node.bases):
            bodies = [line for line in node.body if isinstance(line, ast.Assign | ast.AnnAssign)]
            for line in bodies:
                target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
                if ast.unparse(target) == "id" and isinstance(line.value, ast.Constant):
                    found.add(line.value.value)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.endswith(("Error", "UnknownClasses")):
                found |= {
                    keyword.value.value
                    for keyword in node.keywords
                    if keyword.arg == "id" and isinstance(keyword.value, ast.Constant)
                }
    return found


def test_every_id_has_a_section_and_every_section_an_id():
    found = {IpuError.id}.union(*(ids(path) for path in SOURCES))
    assert sorted(found) == sorted(SECTIONS)


@pytest.mark.parametrize("id", [id for id in SECTIONS if id != "internal"])
def test_a_section_shows_its_error_or_names_the_test_that_raises_it(id):
    """The programs of the page run in `test_guide.py`, which compares what they print."""
    shown = "".join(re.findall(r"^```\n\n```text\n(.*?)^```$", TEXTS[id], re.M | re.DOTALL))
    named = _NAMED.findall(TEXTS[id])
    assert f"\nerror id {id}: " in shown or named
    for file, name in named:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        assert name in {each.name for each in body if isinstance(each, ast.FunctionDef)}


def test_an_error_leads_to_its_section():
    error = CompileError("a problem", id="value")
    assert error.id == "value"
    assert error.__notes__ == ["error id value: python -m ipu_dynamo.errors value says more"]


@pytest.mark.parametrize("id", SECTIONS)
def test_a_command_prints_the_section_of_an_error(id, capsys):
    assert main([id]) == 0
    page = (FOLDER / "errors.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert printed.startswith(f"## {id}\n\n")
    assert printed.strip() in page
    assert len(re.findall(r"^## \S+$", printed, re.M)) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["valeu"], "did you mean: value?"), (["zzz"], "there are value, types"), ([], "IDs: value,")],
)
def test_the_command_names_the_ids_that_there_are(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_every_error_that_poptorch_raises_names_its_kind():
    without, count = [], 0
    for path in (ROOT / "poptorch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RAISED:
                count += 1
                if not any(keyword.arg == "id" for keyword in node.keywords):
                    without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert count > 100
    assert not without


def test_an_error_of_poptorch_leads_to_its_section():
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(torch.nn.Linear(2, 2), {"deviceIterations": 2})
    assert caught.value.id == "option"
    assert caught.value.__notes__ == [
        "error id option: python -m ipu_dynamo.errors option says more"
    ]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.id, again.__notes__) == (caught.value.id, caught.value.__notes__)


def test_an_error_that_a_program_makes_itself_leads_nowhere():
    error = poptorch.createPoptorchError("mine")
    assert error.id == ""
    assert not hasattr(error, "__notes__")


def test_the_errors_of_poptorch_lead_there_too():
    executor = poptorch.inferenceModel(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(poptorch.Error) as caught:
        executor(torch.ones(2))
    assert caught.value.id == "value"
    assert caught.value.__notes__ == ["error id value: python -m ipu_dynamo.errors value says more"]
    assert "ipu_dynamo.errors" not in caught.value.location
