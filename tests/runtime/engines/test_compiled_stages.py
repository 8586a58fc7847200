"""Check that equal stages are compiled once for all processes, and unequal ones never shared."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from ipu_dynamo import Options, compile_inference
from ipu_dynamo.program import make_function
from ipu_dynamo.runtime.engines import compiled_stages, stage_key
from ipu_dynamo.runtime.engines.stage_key import stage_key as key_of
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF

ROOT = Path(__file__).resolve().parents[3]
aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    compiled_stages.forget()
    yield tmp_path
    compiled_stages.forget()


def model(x):
    return torch.softmax(x, 1) * 3 + x.t().sum()


def origin(function=model, x=X, options=None):
    """Where the code of one program comes from; its numbers are those of eager PyTorch."""
    before = compiled_stages.origins.copy()
    run = compile_inference(function, options or Options("inductor"))
    torch.testing.assert_close(run(x), function(x))
    ((where, times),) = (compiled_stages.origins - before).items()
    assert times == 1
    return where


@pytest.mark.inductor
def test_code_comes_from_memory_then_disk_and_after_damage_from_the_compiler(folder, caplog):
    assert origin() == "compiler"
    assert origin() == "memory"
    torch._dynamo.reset()
    from ipu_dynamo.torch_compile.compile_graph import forget_compiled

    forget_compiled()  # what torch._dynamo.reset() calls for compiled models
    assert origin() == "disk"
    (library,) = (folder / "kernels").iterdir()
    part = library.read_bytes()[:-100]
    library.unlink()  # this process has the old file in its memory
    library.write_bytes(part)
    compiled_stages.forget()
    with caplog.at_level(logging.WARNING, logger="ipu_dynamo"):
        assert origin() == "compiler"
    assert f"{library.name} has changed" in caplog.text
    compiled_stages.forget()
    assert origin() == "disk"


@pytest.mark.inductor
def test_an_artifact_that_does_not_load_is_compiled_again(folder, monkeypatch, caplog):
    assert origin() == "compiler"
    compiled_stages.forget()

    def stale(*_):
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(compiled_stages, "load_artifact", stale)
    assert origin() == "compiler"
    assert "does not load (libgomp.so.1" in caplog.text


@pytest.mark.inductor
def test_several_programs_are_compiled_when_nothing_is_kept(monkeypatch):
    monkeypatch.setenv(CACHE_DIR, OFF)
    compiled_stages.forget()
    for function in (lambda x: x.exp(), lambda x: x.sin(), lambda x: torch.softmax(x * 2, 1)):
        found = compile_inference(function, Options("inductor"))(X)
        torch.testing.assert_close(found, function(X))


@pytest.mark.inductor
def test_nothing_is_kept_on_disk_when_switched_off(folder, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, OFF)
    assert origin() == "compiler"
    compiled_stages.forget()
    assert origin() == "compiler"
    assert list(folder.iterdir()) == []


@pytest.mark.inductor
def test_nothing_is_read_or_kept_where_pytorch_disables_its_caches(folder):
    assert origin() == "compiler"
    kept = sorted(folder.rglob("*"))
    compiled_stages.forget()
    with torch.compiler.config.patch(force_disable_caches=True):
        assert origin() == "compiler"
        compiled_stages.forget()
        assert origin(lambda x: model(x) + 1) == "compiler"
    assert sorted(folder.rglob("*")) == kept


@pytest.mark.inductor
def test_changed_variables_and_views_are_right_from_disk(folder):
    """In-place changes and results that alias inputs are done around the generated code."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count += x.sum(0)
            return x.t(), self.count * 2

    results = []
    for _ in range(2):
        compiled_stages.forget()
        counting = Counting()
        run = compile_inference(counting, Options("inductor"))
        results.append([run(X), run(X), counting.count])
    assert compiled_stages.origins["disk"] >= 1
    assert_same_bits(results[0], results[1])
    torch.testing.assert_close(results[1][2], 2 * X.sum(0))


def function_of(f, *tensors):
    run = compile_inference(f, Options("eager"))
    run.compile(*tensors)
    (function,) = run.program.functions
    return function


def test_key_knows_graph_layout_settings_threads_and_versions(monkeypatch):
    function = function_of(model, X)
    keys = {key_of(function, {"cpp.threads": 1})}
    assert keys == {key_of(function_of(lambda x: model(x), X), {"cpp.threads": 1})}

    def add(other=function, settings=None):
        count = len(keys)
        keys.add(key_of(other, settings or {"cpp.threads": 1}))
        assert len(keys) == count + 1

    add(function_of(lambda x: model(x) + 1, X))
    add(function_of(model, X[:1]))
    add(function_of(model, X.double()))
    add(settings={"cpp.threads": 2})
    add(settings={"cpp.threads": 1, "fallback_random": True})
    add(settings={"cpp.threads": None})
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        add()
    torch.use_deterministic_algorithms(True)
    add()
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(stage_key, "__version__", "another")
    stage_key.this_machine.cache_clear()
    add()
    monkeypatch.setattr(stage_key, "find_compiler", lambda: sys.executable)
    stage_key.this_machine.cache_clear()
    add()
    monkeypatch.undo()
    stage_key.this_machine.cache_clear()


def test_key_knows_strides():
    def keyed(x):
        graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.relu.default(x),))
        for node in graph.graph.nodes:
            node.meta["val"] = x
        return key_of(make_function("f", graph), {})

    assert keyed(torch.ones(2, 2)) != keyed(torch.ones(2, 2).t())
    assert keyed(torch.ones(2, 2)) == keyed(torch.zeros(2, 2))


def test_a_graph_with_an_operator_of_others_has_no_key():
    with torch.library._scoped_library("stages_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        twice = torch.ops.stages_test.twice.default
        graph = torch.fx.symbolic_trace(lambda x: (twice(x),))
        for node in graph.graph.nodes:
            node.meta["val"] = X
        assert key_of(make_function("f", graph), {}) is None


@pytest.mark.slow
@pytest.mark.inductor
def test_processes_share_code_and_may_start_together(tmp_path):
    program = (
        "import torch, ipu_dynamo\n"
        "run = ipu_dynamo.compile_inference(lambda x: x.softmax(0) * 2, {'engine': 'inductor'})\n"
        "torch.testing.assert_close(run(torch.ones(4)), torch.full((4,), 0.5))\n"
        "from ipu_dynamo.runtime.engines.compiled_stages import origins\n"
        "print(dict(origins))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    environment |= {CACHE_DIR: str(tmp_path / "stages"), "PYTHONPATH": str(ROOT)}

    def start():
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def answer(process):
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        return printed.strip()

    together = [start(), start()]
    assert {answer(process) for process in together} <= {"{'compiler': 1}", "{'disk': 1}"}
    assert answer(start()) == "{'disk': 1}"


class NegateResults(CustomGraphPass):
    """A pass of a user's, which changes what is computed so that a test sees whether it ran."""

    def __init__(self, name):
        self.name = name

    def __call__(self, graph):
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            nodes = output.args[0]
            output.args = (tuple(graph.call_function(aten.neg.default, (n,)) for n in nodes),)
            for negated, node in zip(output.args[0], nodes, strict=True):
                negated.meta = dict(node.meta)

    def uuid(self):
        return self.name


@pytest.mark.few(1)
@pytest.mark.inductor
@pytest.mark.parametrize("name", [b"negates", None])
def test_code_made_with_a_pass_of_the_users_is_not_served_without_it(folder, name):
    def computed():
        compiled_stages.forget()
        return compile_inference(model, Options("inductor", check_compiled="off"))(X)

    plain = model(X)
    torch.testing.assert_close(computed(), plain)
    with torch._inductor.config.patch(post_grad_custom_post_pass=NegateResults(name)):
        torch.testing.assert_close(computed(), -plain)
        torch.testing.assert_close(computed(), -plain)
    torch.testing.assert_close(computed(), plain)


def test_keys_name_a_users_passes_or_are_none(folder):
    function = compile_inference(model, Options("eager"))
    function(X)
    (stage,) = function.program.functions
    keys = [key_of(stage, {})]
    for custom in (NegateResults(b"a"), NegateResults(b"b"), [NegateResults(b"a")]):
        with torch._inductor.config.patch(post_grad_custom_pre_pass=custom):
            keys.append(key_of(stage, {}))
    assert None not in keys
    assert len(set(keys)) == 3
    for unnamed in (NegateResults(None), lambda graph: None):
        with torch._inductor.config.patch(joint_custom_post_pass=unnamed):
            assert key_of(stage, {}) is None


def test_kernels_of_other_threads_are_not_noted(monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    from ipu_dynamo.runtime.engines.private.promised_kernels import kernels_promised

    def kernel(compiler, argtypes, source):
        return source

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", kernel)
    compiler = AsyncCompile()
    with kernels_promised() as noted:
        made = [compiler.cpp_pybinding([], "ours")]
        other = threading.Thread(target=lambda: made.append(compiler.cpp_pybinding([], "theirs")))
        other.start()
        other.join()
    assert made == ["ours", "theirs"]
    assert [*noted.values()] == ["ours"]
    assert AsyncCompile.cpp_pybinding is kernel
