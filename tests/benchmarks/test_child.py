"""Check the protocol of processes, and what those of other checkouts import."""

import ast
import os

import pytest

from benchmarks.child import ROOT, Child, fresh_child


def test_functions_and_held_objects_answer_from_another_process():
    with fresh_child(WHO="child") as child:
        assert child.call("os:getenv", "WHO") == "child"
        assert child.call("os:getpid") == child.session != os.getpid()
        assert child.call("collections:Counter", "aab") is None
        assert child.call(".get", "a") == 2


def test_what_a_function_prints_is_no_answer():
    with fresh_child() as child:
        assert child.call("builtins:print", "42") is None
        assert child.call("os:system", "echo 43") == 0
        assert child.call("math:factorial", 4) == 24


def test_a_process_that_has_ended_says_why():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"), fresh_child() as child:
        child.call("operator:truediv", 1, 0)


def test_another_checkout_has_its_packages_and_our_benchmarks(tmp_path):
    root = tmp_path / "old"
    for package, text in (("benchmarks", "raise ImportError"), ("ipu_dynamo", "NAME = 'old'")):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(text)
    with Child(tmp_path / "kept", root) as child:
        assert child.call("builtins:eval", "__import__('ipu_dynamo').NAME") == "old"
        path = child.call("builtins:eval", "__import__('benchmarks.child').child.__file__")
        assert os.path.samefile(path, ROOT / "benchmarks" / "child.py")


@pytest.mark.parametrize("name", ["against/runner", "first_call"])
def test_what_runs_in_other_checkouts_imports_public_names_only(name):
    names, seen = [f"benchmarks/{name}"], set()
    while names:
        name = names.pop()
        seen.add(name)
        for node in ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names_here = [alias.name for alias in node.names]
            modules, inner = names_here, names_here
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                inner = [*modules, *(f"{node.module}.{alias}" for alias in names_here)]
            assert not [m for m in modules if m.startswith(("ipu_dynamo.", "poptorch."))], name
            paths = {module.replace(".", "/") for module in inner} - seen
            names += [path for path in paths if (ROOT / f"{path}.py").exists()]
    assert "benchmarks/models" in seen
