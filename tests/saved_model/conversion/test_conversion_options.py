"""Check which options a conversion takes, alone, together, and from a file."""

import json

import pytest

from ipu_dynamo.saved_model.conversion.settings.combinations import check_combinations
from ipu_dynamo.saved_model.conversion.settings.config_file import read_request
from ipu_dynamo.saved_model.conversion.settings.options import (
    NAMES,
    ConversionOptions,
    read_options,
)
from tests.saved_model.test_command import run  # noqa: F401  a fixture

EXECUTABLE = {"embedded_runtime_exec_cachedir": "exec", "runtime_api_timeout_us": 5000}
EMBEDDED = {"embedded_runtime_save_config": EXECUTABLE, "int64_to_int32_conversion": True}
GELU = {"nodes": ["a"], "node_as_gelu_input": ["b"], "node_use_gelu_output": ["c"]}
MANUAL = {"converter": "manual", "manual_pipeline_config": [["a"], ["b"]], "device_info": [0, 1]}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_ipus": 0}, ValueError, ["num_ipus", "0"]),
        ({"num_ipus": 2.0}, ValueError, ["num_ipus", "2.0"]),
        ({"num_ipus": True}, ValueError, ["num_ipus", "True"]),
        ({"batch_per_step": "3"}, TypeError, ["batch_per_step", "'3'"]),
        ({"batch_per_step": True}, TypeError, ["batch_per_step"]),
        ({"batch_per_step": -1}, ValueError, ["batch_per_step", "-1"]),
        ({"batch_size": 0}, ValueError, ["batch_size", "0"]),
        ({"batch_size": 1 << 31}, ValueError, ["batch_size", "2147483647"]),  # no index says more
        ({"matmul_amp": 1.5}, ValueError, ["matmul_amp", "1.5"]),
        ({"conv_amp": -0.1}, ValueError, ["conv_amp", "-0.1"]),
        ({"conv_amp": float("nan")}, ValueError, ["conv_amp"]),
        ({"matmul_partial_type": "fp16"}, ValueError, ["matmul_partial_type", "fp16"]),
        ({"precision_mode": "fp16"}, ValueError, ["precision_mode", "fp16", "FP16"]),
        ({"excluded_nodes": "a"}, TypeError, ["excluded_nodes", "list"]),
        ({"excluded_nodes": [1]}, TypeError, ["excluded_nodes", "list"]),
        ({"excluded_nodes": ["a("]}, ValueError, ["excluded_nodes", "a("]),
        ({"precision_conversion_excluded_nodes": {}}, TypeError, ["excluded_nodes", "list"]),
        ({"remove_excluded_nodes": 1}, ValueError, ["remove_excluded_nodes", "1"]),
        ({"no_ipu_placement": "yes"}, ValueError, ["no_ipu_placement", "yes"]),
        ({"manual_sharding": "a"}, TypeError, ["manual_sharding", "must be a list"]),
        ({"manual_sharding": ["a"]}, TypeError, ["must only contain lists of strings"]),
        ({"manual_sharding": [[1]]}, TypeError, ["must only contain lists of strings"]),
        ({"manual_sharding": [["*"]]}, ValueError, ["manual_sharding", "*"]),
        ({"gelu_replacement": []}, ValueError, ["nodes", "node_as_gelu_input"]),
        ({"gelu_replacement": {"nodes": []}}, ValueError, ["node_use_gelu_output"]),
        ({"gelu_replacement": {**GELU, "nodes": "a"}}, ValueError, ["nodes", "no list"]),
        ({"gelu_replacement": {**GELU, "more": []}}, ValueError, ["node_use_gelu_output"]),
        ({"embedded_runtime_save_config": "x"}, TypeError, ["embedded_runtime_save_config"]),
        ({"embedded_runtime_save_config": {}}, ValueError, ["embedded_runtime_exec_cachedir"]),
        (
            {"embedded_runtime_save_config": {"embedded_runtime_exec_cachedir": "x"}},
            ValueError,
            ["runtime_api_timeout_us"],
        ),
        (
            {"embedded_runtime_save_config": {**EXECUTABLE, "runtime_api_timeout_us": 0}},
            ValueError,
            ["runtime_api_timeout_us", "0"],
        ),
        ({"pipeline_cfg": []}, TypeError, ["pipeline_cfg"]),
        ({"pipeline_cfg": {}}, ValueError, ["converter"]),
        ({"pipeline_cfg": {"converter": "find"}}, ValueError, ["converter", "find"]),
        ({"pipeline_cfg": {"converter": "load"}}, ValueError, ["solution_path"]),
        (
            {"pipeline_cfg": {"converter": "auto", "solution_path": "x"}},
            ValueError,
            ["solution_path", "auto"],
        ),
        (
            {"pipeline_cfg": {"converter": "auto", "min_ipu_quantity": 4, "max_ipu_quantity": 2}},
            ValueError,
            ["4", "2"],
        ),
        ({"pipeline_cfg": {**MANUAL, "device_info": [0]}}, ValueError, ["2 stages", "1 IPUs"]),
        ({"pipeline_cfg": {**MANUAL, "device_info": [0, -1]}}, ValueError, ["device_info", "-1"]),
        ({"pipeline_cfg": {**MANUAL, "manual_pipeline_config": ["a"]}}, TypeError, ["lists"]),
        ({"pipeline_cfg": {**MANUAL, "priority": "cycle"}}, ValueError, ["priority"]),
        ({"nodes": []}, ValueError, ["nodes"]),
    ],
)
def test_wrong_values_are_refused(options, error, words):
    with pytest.raises(error) as caught:
        read_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"pipeline_cfg": {"converter": "auto"}},
            ["pipeline_cfg", "embedded_runtime_save_config"],
        ),
        (
            {"embedded_runtime_save_config": EXECUTABLE},
            ["embedded_runtime_save_config", "int64_to_int32_conversion"],
        ),
        (
            {**EMBEDDED, "merge_subgraphs": True},
            ["embedded_runtime_save_config", "merge_subgraphs", "drop merge_subgraphs"],
        ),
        (
            {**EMBEDDED, "no_ipu_placement": True},
            ["embedded_runtime_save_config", "no_ipu_placement", "no node is placed on an IPU"],
        ),
        (
            {"manual_sharding": [["a"]], "no_ipu_placement": True},
            ["manual_sharding", "no_ipu_placement", "no node is placed on an IPU"],
        ),
        ({"manual_sharding": [["a"]], "num_ipus": 2}, ["1", "2", "should be equal"]),
        ({"manual_sharding": [["a"], []]}, ["manual_sharding", "num_ipus", "should be equal"]),
        (
            {**EMBEDDED, "pipeline_cfg": {**MANUAL, "device_info": [0, 3]}, "num_ipus": 2},
            ["device_info", "num_ipus", "3", "2"],
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, words):
    with pytest.raises(ValueError, match=r".") as caught:
        check_combinations(read_options(options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_stages_go_before_shards():
    options = {**EMBEDDED, "pipeline_cfg": {"converter": "auto"}, "manual_sharding": [["a"]]}
    with pytest.warns(UserWarning, match="manual_sharding has no effect beside pipeline_cfg"):
        check_combinations(read_options(options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remove_excluded_nodes": True},
        {"remove_excluded_nodes": True, "no_ipu_placement": True},
        {"precision_conversion_excluded_nodes": ["add"]},
        {"batch_size": 4, "batch_per_step": 2, "num_ipus": 8},
        {"manual_sharding": [], "no_ipu_placement": True},
        {"merge_subgraphs": True, "remove_excluded_nodes": True, "excluded_nodes": ["a"]},
        {**EMBEDDED, "manual_sharding": [["a"], ["b"]], "num_ipus": 2},
        {**EMBEDDED, "pipeline_cfg": {"converter": "AUTO"}, "num_ipus": 3},
        {**EMBEDDED, "gelu_replacement": GELU, "precision_mode": "FP16", "excluded_nodes": ["b"]},
    ],
)
def test_options_that_go_together_pass(options):
    check_combinations(read_options(options))


def test_defaults_are_written_and_read_again():
    options = read_options(
        {
            **EMBEDDED, "pipeline_cfg": MANUAL, "gelu_replacement": {"gelu_replacement": GELU},
            "manual_sharding": [["a"], []], "num_ipus": 2, "precision_mode": "FP16",
        }
    )  # fmt: skip
    assert read_options(json.loads(json.dumps(options.to_json()))) == options
    assert read_options(ConversionOptions().to_json()) == ConversionOptions()
    assert options.pipeline_cfg.profiling_enable  # the default of `manual`
    assert set(options.to_json()) == set(NAMES)


def config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    return tmp_path / "config.json"


def test_the_command_line_goes_before_the_file(tmp_path):
    path = config(
        tmp_path,
        """{ // a comment
            "num_ipus": 2, "matmul_amp": 0.5, /* another */ "merge_subgraphs": true,
            "precision_mode": null, "sha256": "0", "md5sum": "1"
        }""",
    )
    options = read_request({"num_ipus": 4, "conv_amp": None}, path).options
    assert options == ConversionOptions(num_ipus=4, matmul_amp=0.5, merge_subgraphs=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["object", "list"]),
        ("{", ["config.json"]),
        ('{"num_ipus": 1, "num_ipus": 2}', ["num_ipus", "twice"]),
        ('{"ipus": 1}', ["ipus"]),
        ('{"num_ipus": "1"}', ["num_ipus", "'1'"]),
        ('{"batch_per_step": "1"}', ["batch_per_step"]),
        ('{"excluded_nodes": "a"}', ["excluded_nodes"]),
        ('{"manual_sharding": ["a"]}', ["manual_sharding"]),
        ('{"pipeline_cfg": 3}', ["pipeline_cfg"]),
        ('{"merge_subgraphs": 0}', ["merge_subgraphs"]),
        ('{"solution": {}}', ["solution", "pipeline_cfg"]),
        ('{"solution": 3, "pipeline_cfg": {"converter": "auto"}}', ["solution"]),
    ],
)
def test_wrong_files_are_refused_by_key(tmp_path, text, words):
    with pytest.raises(ValueError, match=r".") as caught:
        read_request({}, config(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_request({}, tmp_path / "none.json")


def test_a_pipeline_given_directly_drops_the_solution_of_the_file(tmp_path):
    solution = {"pipeline_mapping": {"a": 0}}
    path = config(
        tmp_path, json.dumps({"solution": solution, "pipeline_cfg": {"converter": "auto"}})
    )
    assert read_request({}, path).solution == solution
    assert read_request({"pipeline_cfg": {"converter": "auto"}}, path).solution is None


def test_help_lists_every_option(run):  # noqa: F811
    _, text, _ = run("convert", "--help")
    names = [*NAMES, "config_file", "dir", "output_dir", "tag_set", "signature_def", "trust"]
    assert all(f"--{name}" in text for name in names)
    for default in ("(default: 0.6)", "(default: float)", "(default: 1)", "(default: 0)"):
        assert default in text


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--num_ipus", "two"),
        ("--gelu_replacement", "{"),
        ("--pipeline_cfg", '{"a": 1, "a": 2}'),
        ("--manual_sharding", "[[a]]"),
        ("--excluded",),
        ("--matmul_amp", "much"),
    ],
)
def test_wrong_usage_ends_with_2(run, tmp_path, arguments):  # noqa: F811
    common = ("--dir", tmp_path / "p", "--output_dir", tmp_path / "o", "--tag_set", "serve")
    method = ("ipu",) if arguments else ()
    status, _, err = run("convert", *common, *method, *arguments)
    assert status == 2
    assert "Traceback" not in err
    assert not (tmp_path / "o").exists()
