"""Check pipelines of converted programs: results, stages as the file has them, files, refusals."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.options import Options
from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.conversion.convert import convert
from ipu_dynamo.saved_model.conversion.convert_program import convert_program
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import micro_batch_of
from ipu_dynamo.saved_model.conversion.drafts.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.executable.compile_part import compile_part
from ipu_dynamo.saved_model.conversion.executable.compiled_part import border
from ipu_dynamo.saved_model.conversion.pipelines.plan import plan_pipeline
from ipu_dynamo.saved_model.conversion.pipelines.solution_file import read_solution
from ipu_dynamo.saved_model.conversion.settings.options import read_options
from ipu_dynamo.saved_model.exported.node_names import NAME
from tests.saved_model.converting import assert_like, converted, embedded, save_branches

MANUAL = {
    "converter": "manual",
    "manual_pipeline_config": [
        ["middle/0", "left/0"],
        ["left/1", "left/2", "middle/[12]"],
        ["right", "cat"],
        ["res", "view", "transpose"],
    ],
    "device_info": [0, 1, 1, 0],
}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "saved"
    return folder, save_branches(folder)


def draft_of(source, options):
    """A converted draft, and its plan."""
    with load(source)["serving_default"] as signature:
        draft = convert_program(from_exported(signature), options).draft
    return draft, plan_pipeline(draft, options)


def names_by_stage(draft, plan, options):
    """The canonical names in the function of each stage, and the stages' IPUs, without Outline."""
    draft.placement = plan.placement
    shapes = {name: tuple(node.meta["val"].shape) for name, node in draft.inputs.items()}
    micro_batch = micro_batch_of(shapes, options.batch_size)
    compiled = compile_part(draft, border(draft), micro_batch, Options(outline=False), 1)
    functions = {f.name: f for f in compiled.model.program.functions}
    return [
        (
            call.ipu,
            {
                node.meta["custom"][NAME]
                for node in functions[call.function].graph.graph.nodes
                if NAME in (node.meta.get("custom") or {})
            },
        )
        for call in compiled.model.program.calls
    ]


def by_stage(solution):
    return [
        (ipu, {name for name, at in solution.pipeline_mapping.items() if at == stage})
        for stage, ipu in enumerate(solution.device_mapping)
    ]


CONFIGURATIONS = [
    pytest.param(MANUAL, 2, id="manual-2"),
    pytest.param({**MANUAL, "device_info": [3, 1, 2, 0]}, 4, id="manual-4"),
    pytest.param({"converter": "auto", "max_ipu_quantity": 2}, 2, id="auto-2"),
    pytest.param(
        {"converter": "AUTO", "min_ipu_quantity": 4, "priority": "memory"}, 4, id="auto-4"
    ),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("config", "num_ipus"), CONFIGURATIONS)
def test_results_are_the_hosts_and_load_gives_the_same(tmp_path, source, config, num_ipus):
    options = embedded(batch_size=2, num_ipus=num_ipus)
    out = converted(source[0], tmp_path / "out", pipeline_cfg=config, **options)
    for rows in (1, 7, 19):
        assert_like(out, source[1], rows)
    (solution,) = (tmp_path / "solution").iterdir()
    entry = json.loads((tmp_path / "out/cache/application.json").read_text())
    assert entry["pipeline"] == json.loads(solution.read_text())
    assert entry["num_ipus"] == num_ipus
    again = {"converter": "load", "solution_path": str(solution)}
    loaded = converted(source[0], tmp_path / "again", pipeline_cfg=again, **options)
    assert_like(loaded, source[1], 5)
    first, second = (tmp_path / name / "cache/application.ipu_exec" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("config", "num_ipus"), CONFIGURATIONS)
def test_names_in_the_function_of_each_stage_are_those_of_the_solution(source, config, num_ipus):
    options = read_options(embedded(batch_size=2, num_ipus=num_ipus, pipeline_cfg=config))
    draft, plan = draft_of(source[0], options)
    assert names_by_stage(draft, plan, options) == by_stage(plan.solution)


def test_outlined_stages_have_their_number_order_and_ipus(tmp_path, source):
    signature = converted(
        source[0], tmp_path / "out", pipeline_cfg=MANUAL, **embedded(num_ipus=2, batch_size=2)
    )
    signature.warm_up()
    program = signature._runner._executable._model.program
    assert [(call.stage, call.ipu) for call in program.calls] == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_half_precision_runs_in_stages(tmp_path, source):
    options = embedded(num_ipus=2, precision_mode="FP16", pipeline_cfg=MANUAL)
    assert_like(converted(source[0], tmp_path / "out", **options), source[1], 6, within=2e-2)


class Plain(nn.Module):
    """A chain with a view and a constant that a later stage reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        turned = self.first(x).unsqueeze(1)
        more = torch.full((4,), 2.0)
        return {"y": self.second(turned.squeeze(1)) + more}


def test_views_and_constants_run_in_their_stage(tmp_path):
    torch.manual_seed(0)
    rows = {"x": {0: Dim("rows", min=1, max=64)}}
    save(tmp_path / "p", {"serving_default": (Plain().eval(), (torch.randn(4, 4),), rows)})
    config = {
        "converter": "manual",
        "manual_pipeline_config": [["first", "unsqueeze", "full"], ["second", "squeeze", "add"]],
        "device_info": [0, 0],
    }
    options = read_options(embedded(pipeline_cfg=config))
    draft, plan = draft_of(tmp_path / "p", options)
    assert names_by_stage(draft, plan, options) == by_stage(plan.solution)


# --- Costs and profiles --------------------------------------------------------------------------


def test_files_for_the_output_folder_are_in_it(tmp_path, source):
    config = MANUAL | {"solution_dir": "out/solution", "profiling_root_dir": "out"}
    convert(source[0], "out", num_ipus=2, **embedded(pipeline_cfg=config))
    assert_like(load("out")["serving_default"], source[1], 3)
    assert (tmp_path / "out/solution/manual.pipeconfig").is_file()
    assert list((tmp_path / "out").glob("manual_pipeline*/profile.json"))


def test_a_cache_that_cannot_be_written_leaves_no_file_of_the_pipeline(tmp_path, source):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        convert(
            source[0], "out", num_ipus=2, **embedded(str(tmp_path / "file"), pipeline_cfg=MANUAL)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_profile_says_costs_bytes_and_speed(tmp_path, source, capsys):
    config = {**MANUAL, "profiling_root_dir": "profiles"}
    convert(source[0], "out", pipeline_cfg=config, **embedded(num_ipus=2, batch_size=2))
    assert capsys.readouterr().out == "costs: estimated for a Mk2 IPU, not measured\n"
    value = json.loads((tmp_path / "profiles/manual_pipeline-2-b2/profile.json").read_text())
    assert (value["source"], value["cost_unit"], value["num_ipus"]) == ("estimate", "cycles", 2)
    assert value["device_mapping"] == [0, 1, 1, 0]
    linear, activation = value["nodes"]["left/0/0/linear"], value["nodes"]["left/0/1/tanh"]
    # 2 x 8 x 8 multiplications and additions are one cycle, and so are 64 + 64 + 288 bytes
    assert linear == {"stage": 0, "cost": 501, "always_live_bytes": 288, "transient_bytes": 64}
    assert activation == {"stage": 0, "cost": 501, "always_live_bytes": 0, "transient_bytes": 64}
    stages = [0, 0, 0, 0]
    for node in value["nodes"].values():
        stages[node["stage"]] += node["cost"]
    assert value["step"]["cost"] == (4 + 4 - 1) * max(stages)
    seconds = value["step"]["cost"] / 1.325e9
    assert value["step"]["samples_per_second"] == pytest.approx(8 / seconds)
    for ipu, own in enumerate(([0, 3], [1, 2])):
        nodes = [n for n in value["nodes"].values() if n["stage"] in own]
        used = sum(n["always_live_bytes"] for n in nodes)
        used += max(n["transient_bytes"] for n in nodes)
        free = 940_572_672 - used
        assert value["ipus"][ipu] == {"used": used, "free": free, "overflow": 0}


def test_half_costs_less_and_a_large_product_its_operations(tmp_path):
    def cost(**options):
        config = {"converter": "manual", "manual_pipeline_config": [["."]], "device_info": [0]}
        convert("p", tmp_path / str(len(options)), pipeline_cfg=config, **embedded(**options))
        path = "pipeline-profiling/manual_pipeline-1-b512/profile.json"
        return json.loads((tmp_path / path).read_text())["nodes"]["0/linear"]["cost"]

    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval()
    save("p", {"serving_default": (model, (torch.randn(512, 512),))})
    flops = 2 * 512**3
    assert cost() == 500 + -(-flops // 47_104)
    cast = 500 + -(-512 * 512 * (4 + 2) // 35_328)  # of the input, paid by what reads it
    assert cost(precision_mode="FP16") == 500 + -(-flops // 94_208) + cast
    half = {"precision_mode": "FP16", "matmul_partial_type": "half"}
    assert cost(**half) == 500 + -(-flops // 188_416) + cast


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_measured_costs_are_kept_and_a_repetition_searches_nothing(tmp_path, source, capsys):
    config = {"converter": "auto", "ipu_model": False, "solution_dir": "s"}
    convert(source[0], "a", pipeline_cfg=config, **embedded(batch_size=2))
    assert "costs: measured on this computer" in capsys.readouterr().out
    kept = json.loads((tmp_path / "a/conversion_params.json").read_text())
    assert kept["num_ipus"] == 2
    profiles = list((tmp_path / "pipeline-profiling").rglob("profile.json"))
    assert {path.parent.name for path in profiles} == {"auto_pipeline_solver-2-b2-cycle"}
    assert json.loads(profiles[0].read_text())["cost_unit"] == "seconds"
    for path in profiles:
        path.unlink()
    (solution,) = (tmp_path / "s").iterdir()
    assert json.loads(solution.read_text()) == kept["solution"]
    solution.unlink()
    convert(source[0], "b", config_file="a/conversion_params.json")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert not list((tmp_path / "pipeline-profiling").rglob("profile.json"))
    (solution,) = (tmp_path / "s").iterdir()
    assert json.loads(solution.read_text()) == kept["solution"]


def test_estimated_costs_repeat_without_a_kept_solution(tmp_path, source):
    convert(source[0], "a", pipeline_cfg={"converter": "auto"}, **embedded(batch_size=2))
    assert "solution" not in json.loads((tmp_path / "a/conversion_params.json").read_text())
    convert(source[0], "b", config_file="a/conversion_params.json")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_memory_decides_the_number_of_ipus(tmp_path, source):
    whole = sum(p.nbytes for p in source[1].parameters())
    config = {"converter": "auto"}
    convert(source[0], "a", pipeline_cfg=config, memory_per_ipu=whole, **embedded())
    convert(source[0], "b", pipeline_cfg=config, memory_per_ipu=whole // 2, **embedded())
    found = [
        json.loads((tmp_path / name / "ipu_config.json").read_text())["num_ipus"] for name in "ab"
    ]
    assert found == [2, 4]
    with pytest.raises(ValueError, match=r"bytes used and .* bytes free"):
        convert(source[0], "c", pipeline_cfg=config, memory_per_ipu=100, **embedded())
    assert not (tmp_path / "c").exists()


def test_an_overfull_ipu_warns_with_the_model_and_is_refused_by_the_machine(source):
    small = {"memory_per_ipu": 1000, **embedded(num_ipus=2)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(source[0], "a", pipeline_cfg=MANUAL, **small)
    assert any("IPU 0 needs" in str(w.message) for w in caught)
    with pytest.raises(ValueError, match=r"IPU 0 needs \d+ bytes, and has 1000"):
        convert(source[0], "b", pipeline_cfg={**MANUAL, "ipu_model": False}, **small)


# --- Solutions -----------------------------------------------------------------------------------

NODES, OTHERS = ("a", "b", "c"), ("x", "w", "a", "b", "c")


def solution(stages, **more):
    return read_solution({"pipeline_mapping": stages, **more}, "s.json", NODES, OTHERS, 4)


@pytest.mark.parametrize("devices", [{}, {"device_mapping": []}, {"device_maping": [0, 1]}])
def test_devices_may_be_left_out_and_misspelled(devices):
    found = solution({"a": 0, "b": 0, "c": 1, "x": 5, "w": -1}, **devices)
    assert found.to_json() == {
        "device_mapping": [0, 1],
        "pipeline_mapping": {"a": 0, "b": 0, "c": 1},
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "a solution is an object, not a list"),
        ({}, "'pipeline_mapping' is missing"),
        ({"pipeline_mapping": {}, "extra": 1}, "'extra' is no key"),
        ({"pipeline_mapping": {"a": 0, "b": 0}}, "no stage for node 'c'"),
        ({"pipeline_mapping": {"a": 0, "b": -1, "c": 0}}, "no stage for node 'b'"),
        ({"pipeline_mapping": {"a": 0, "b": 0, "c": 0, "d": 0}}, "no nodes 'd' .1 in all"),
        ({"pipeline_mapping": {"a": 0, "b": True, "c": 0}}, "node 'b' has stage True"),
        ({"pipeline_mapping": {"a": 0, "b": -2, "c": 0}}, "node 'b' has stage -2"),
        ({"pipeline_mapping": {"a": 0, "b": 10**9, "c": 0}}, "node 'b' has stage 1000000000"),
        ({"pipeline_mapping": dict.fromkeys("abc", 0), "device_mapping": [0, 1]}, "1 stages"),
        ({"pipeline_mapping": dict.fromkeys("abc", 0), "device_mapping": [4]}, "num_ipus is 4"),
        ({"pipeline_mapping": dict.fromkeys("abc", 0), "device_mapping": ["0"]}, "no list of IPUs"),
        ({"pipeline_mapping": dict.fromkeys("abc", 0), "device_mapping": 0}, "no list of IPUs"),
        (
            {"pipeline_mapping": dict.fromkeys("abc", 0), "device_mapping": [0],
             "device_maping": [1]},
            "'device_mapping' and 'device_maping' are different",
        ),
    ],
)  # fmt: skip
def test_solutions_that_do_not_fit_are_refused(value, problem):
    with pytest.raises(ValueError, match=f"s.json.*{problem}"):
        read_solution(value, "s.json", NODES, OTHERS, 4)


def refused(source, stages, problem, **more):
    with open("s.json", "w") as file:
        json.dump({"pipeline_mapping": stages, **more}, file)
    config = {"converter": "load", "solution_path": "s.json"}
    with pytest.raises(ValueError, match=problem):
        convert(source, "refused", pipeline_cfg=config, **embedded(num_ipus=4))


def test_stages_against_the_data_empty_ones_and_shared_parameters_are_refused(tmp_path, source):
    options = read_options(embedded(num_ipus=4, pipeline_cfg=MANUAL))
    good = dict(draft_of(source[0], options)[1].solution.pipeline_mapping)
    refused(source[0], {**good, "left/0/0/linear": 3}, r"'left/0/1/tanh' \(stage 0\) reads 'left/0")
    refused(
        source[0],
        {n: 2 * k for n, k in good.items()},
        "stage 1 has no nodes",
        device_mapping=[0] * 7,
    )

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(torch.relu(self.linear(x)))

    save("tied", {"serving_default": (Tied().eval(), (torch.randn(4, 4),))})
    stages = {"linear/linear": 0, "relu": 0, "linear/linear_1": 1}
    refused("tied", stages, "parameter 'linear/weight' is read on several IPUs")
    stages_on_one = {"converter": "load", "solution_path": "s.json"}
    with open("s.json", "w") as file:
        json.dump({"pipeline_mapping": stages, "device_mapping": [1, 1]}, file)
    tied = converted("tied", "out", pipeline_cfg=stages_on_one, **embedded(num_ipus=2))
    x = torch.randn(4, 4)
    torch.testing.assert_close(
        tied(x=x)["output_0"], load("tied")["serving_default"](x=x)["output_0"]
    )


def test_a_stage_without_nodes_and_an_ipu_that_is_not_there_are_refused(source):
    lists = [["middle"], ["nothing"], ["left"]]
    config = {**MANUAL, "manual_pipeline_config": lists, "device_info": [0, 1, 1]}
    with pytest.raises(ValueError, match="stage 1 has no nodes"):
        convert(source[0], "out", pipeline_cfg=config, **embedded(num_ipus=2))
    with pytest.raises(ValueError, match=r"device_info.*IPU 1.*num_ipus is 1"):
        convert(source[0], "out", pipeline_cfg=MANUAL, **embedded())


def test_expressions_match_at_the_begin_and_the_last_stage_wins(source):
    config = {
        **MANUAL,
        "manual_pipeline_config": [["/linear"], [".*res", "transpose"], ["transpose"]],
        "device_info": [0, 0, 1],
    }
    options = read_options(embedded(num_ipus=2, pipeline_cfg=config))
    stages = draft_of(source[0], options)[1].solution.pipeline_mapping
    assert stages["res/linear"] == 1
    assert stages["transpose"] == 2
    assert {name for name, stage in stages.items() if stage == 0} >= {"left/0/0/linear", "cat"}


def test_auto_refuses_what_it_is_not_for(tmp_path):
    class Tall(nn.Module):
        def forward(self, x):
            return {"y": x.relu().sigmoid()}

    save("p", {"serving_default": (Tall(), (torch.randn(4),))})
    config = {"converter": "auto", "min_ipu_quantity": 4}
    with pytest.raises(ValueError, match="the program has 2 nodes for stages, fewer than IPUs"):
        convert("p", "out", pipeline_cfg=config, **embedded())
    config = {"converter": "auto", "min_ipu_quantity": 5, "max_ipu_quantity": 7}
    with pytest.raises(ValueError, match="min_ipu_quantity 5 and max_ipu_quantity 7"):
        convert("p", "out", pipeline_cfg=config, **embedded())
