"""Check that compiling finds the vector instructions that PyTorch itself would choose."""

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from ipu_dynamo.runtime.torch_private_inductor import compile_artifact, vector_sets_tried

pytestmark = pytest.mark.inductor
CAPABILITY = "ATEN_CPU_CAPABILITY"


@pytest.fixture(autouse=True)
def without_setting(monkeypatch):
    monkeypatch.delenv(CAPABILITY, raising=False)


def test_the_same_set_is_chosen():
    with vector_sets_tried():
        chosen = cpu_vec_isa.pick_vec_isa()
    assert chosen == cpu_vec_isa.pick_vec_isa()


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_set_that_the_user_names_is_chosen(monkeypatch, capability):
    with vector_sets_tried():
        cpu_vec_isa.pick_vec_isa()
    monkeypatch.setenv(CAPABILITY, capability)
    with vector_sets_tried():
        chosen = cpu_vec_isa.pick_vec_isa()
    assert chosen == cpu_vec_isa.pick_vec_isa()


def test_the_set_of_the_width_in_the_settings_is_chosen():
    with config.patch({"cpp.simdlen": 256}):
        with vector_sets_tried():
            chosen = cpu_vec_isa.pick_vec_isa()
        assert chosen == cpu_vec_isa.pick_vec_isa()


def test_pytorch_is_as_before_when_compiling_fails():
    before = cpu_vec_isa.valid_vec_isa_list

    def fail(x):
        raise ZeroDivisionError

    graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    graph.graph.output((graph.graph.call_function(fail, (graph.graph.placeholder("x"),)),))
    graph.recompile()
    with pytest.raises(ZeroDivisionError):
        compile_artifact(graph, [torch.ones(3)], {})
    assert cpu_vec_isa.valid_vec_isa_list is before
