"""Check configurations in files and on the Hub: round trips, old forms, and what is no file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import given

import poptorch
from ipu_dynamo.optimum import IPU_CONFIG_NAME, IncompatibleIPUConfigError, IPUConfig
from ipu_dynamo.optimum.values.fields import fields_of
from tests.optimum.test_pod_types import configs

FILES = sorted((Path(__file__).parent / "files").glob("*.json"))
RELEASES = ["0.1.0", "0.2.3", "0.3.0", "0.4.0", "0.5.0", "0.6.1", "0.7.1"]


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("ipu_dynamo")]


@given(configs())
def test_json_is_read_back(config):
    text = config.to_json_string()
    assert IPUConfig.from_dict(json.loads(text)) == config
    assert json.loads(text).keys() == {
        *fields_of(IPUConfig),
        "optimum_version",
        "transformers_version",
    }
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert "model_type" in config.to_json_string(use_diff=False)
    assert "mode" not in config.to_dict()


def test_there_is_a_file_of_each_form():
    assert [file.stem for file in FILES] == RELEASES


@pytest.mark.parametrize("file", FILES, ids=RELEASES)
def test_files_of_every_release_load(file, caplog):
    config = IPUConfig.from_pretrained(file)
    assert bool(said(caplog)) == (file.stem < "0.6")  # what is to be repaired, or ignored
    caplog.clear()
    for inference in (False, True):
        options = config.to_options(for_inference=inference)
        assert isinstance(options, poptorch.Options)
        assert config.to_core_options(for_inference=inference)
    again = IPUConfig.from_dict(config.to_dict())
    assert again == config
    assert not [line for line in said(caplog) if "read as" in line or "ignored" in line]


def test_what_old_files_are_read_as(caplog):
    old = {file.stem: IPUConfig.from_json_file(file) for file in FILES}
    first = old["0.1.0"]
    assert (first.layers_per_ipu, first.ipus_per_replica, first.seed) == ([-1], 4, 42)
    assert (first.executable_cache_dir, first.embedding_serialization_factor) == ("", 1)
    assert first.matmul_proportion == [0.25]
    assert len(first.to_options().toDict()["available_memory_proportion"]) == 4
    assert first.replication_factor == 1  # the last of two
    by_pod = old["0.2.3"]
    assert by_pod.layers_per_ipu["pod16"] == [3, 7, 7, 7]
    assert by_pod.layers_per_ipu["pod4"] == by_pod.layers_per_ipu["default"] == [-1]
    assert by_pod.batch_size_factor(pod_type="pod16") == 64
    assert old["0.3.0"].ipus_per_replica == old["0.3.0"].inference_ipus_per_replica == 4
    assert old["0.4.0"].ipus_per_replica == 2
    assert old["0.5.0"].layers_per_ipu == [-1]
    text = "\n".join(said(caplog))
    for line in (
        "embedding_serialization_factor=0 of an old configuration is read as 1",
        "layers_per_ipu=1 of an old configuration is read as [1]",
        "layers_per_ipu=[1] of an old configuration is read as [-1]",
        "executable_cache_dir=None of an old configuration is read as ''",
        "random_seed=42 of an old configuration is read as seed=42",
        "ipus_per_replica=1 of an old configuration is read as the length of layers_per_ipu",
        "none of an IPUConfig, ignored: async_dataloader=True, weight_decay=0.01",
        "`use_popdist=True` of an IPUConfig is ignored",
        "replication_factor=1",
    ):
        assert line in text


def test_an_older_seed_gives_way_to_the_newer(caplog):
    assert IPUConfig.from_dict({"seed": 1, "random_seed": 2}).seed == 1
    assert "random_seed=2" in caplog.text


def test_keywords_stand_over_the_file_and_are_not_repaired():
    config = IPUConfig.from_dict({"seed": 1, "layers_per_ipu": 1}, seed=2)
    assert (config.seed, config.layers_per_ipu) == (2, [1])
    with pytest.raises(TypeError, match="layers_per_ipu"):
        IPUConfig.from_dict({}, layers_per_ipu=1)
    with pytest.raises(IncompatibleIPUConfigError, match=r"`sed` .given 3.; did you mean seed"):
        IPUConfig.from_dict({}, sed=3)
    config, unused = IPUConfig.from_dict({}, seed=3, sed=4, return_unused_kwargs=True)
    assert (config.seed, unused) == (3, {"sed": 4})
    with pytest.raises(IncompatibleIPUConfigError, match="same number of IPUs"):
        IPUConfig.from_dict({"layers_per_ipu": [1, 2], "ipus_per_replica": 3})


def test_folders(tmp_path):
    config = IPUConfig(layers_per_ipu=[1, 2], seed=3)
    config.save_pretrained(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / IPU_CONFIG_NAME).read_text() == config.to_json_string()
    assert IPUConfig.from_pretrained(tmp_path / "a" / "b") == config
    assert IPUConfig.from_pretrained(tmp_path / "a", subfolder="b") == config
    assert IPUConfig.from_pretrained(str(tmp_path / "a" / "b" / IPU_CONFIG_NAME)) == config
    assert IPUConfig.from_pretrained(tmp_path / "a" / "b", seed=4).seed == 4
    got = IPUConfig.from_pretrained(tmp_path / "a" / "b", x=1, return_unused_kwargs=True)
    assert got == (config, {"x": 1})
    with pytest.raises(AssertionError, match="is a file"):
        config.save_pretrained(tmp_path / "a" / "b" / IPU_CONFIG_NAME)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), ValueError),
        pytest.param(object(), TypeError, id="an object"),
        ({1, 2}, TypeError),
    ],
    ids=str,
)
def test_what_no_file_can_hold_is_named_before_one_is_written(value, kind, tmp_path):
    config = IPUConfig(seed=3, parallelize_kwargs={"a": [value]})
    assert "parallelize_kwargs" in repr(config)
    with pytest.raises(kind, match=r"JSON cannot hold parallelize_kwargs=\{'a': \["):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


DEEP = '{"a": ' * 99 + "{}" + "}" * 99  # nested 100 times


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"matmul_proportion": NaN}', r"ipu_config.json is not JSON: JSON has no NaN"),
        ("\xff", "is not JSON"),
        ("[]", "is a list, not an object"),
        ('{"a": ' + DEEP + "}", "nested deeper than 100"),
        ("[" * 100_000, "is not JSON"),
        ('{"matmul_amp": 0.6, "num_ipus": 2}', "`ipu-saved-model convert`"),
    ],
)
def test_what_is_no_configuration(text, words, tmp_path):
    path = tmp_path / IPU_CONFIG_NAME
    path.write_text(text, encoding="latin-1")
    for name in (path, tmp_path):
        with pytest.raises(OSError, match=words) as error:
            IPUConfig.from_pretrained(name)
        assert str(path) in str(error.value)


def test_nesting_has_a_limit(tmp_path):
    (tmp_path / IPU_CONFIG_NAME).write_text(DEEP)
    assert IPUConfig.from_pretrained(tmp_path) == IPUConfig()


def test_files_that_are_missing(tmp_path):
    for name in (tmp_path, tmp_path / "no.json", str(tmp_path / "none"), "no.json"):
        with pytest.raises(OSError, match=f"{Path(name).name}"):
            IPUConfig.from_pretrained(name)


def test_repositories(tmp_path, monkeypatch):
    IPUConfig(seed=5).save_pretrained(tmp_path)
    calls = []

    def fetch(repo_id, filename, *, token=None, revision=None, subfolder=None):
        calls.append((repo_id, filename, token, revision, subfolder))
        return str(tmp_path / IPU_CONFIG_NAME)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    arguments = {"use_auth_token": "t", "revision": "r", "subfolder": "s", "proxies": None}
    assert IPUConfig.from_pretrained("some/model", **arguments).seed == 5
    assert calls == [("some/model", IPU_CONFIG_NAME, "t", "r", "s")]

    made, sent = [], []
    monkeypatch.setattr(
        huggingface_hub, "create_repo", lambda repo_id, **more: made.append((repo_id, more))
    )

    def upload(*, path_or_fileobj, **more):
        sent.append((json.loads(Path(path_or_fileobj).read_text())["seed"], more))
        return "https://there"

    monkeypatch.setattr(huggingface_hub, "upload_file", upload)
    config = IPUConfig(seed=6)
    assert config.push_to_hub("me/it", token="t", private=True) == "https://there"
    config.save_pretrained(tmp_path / "own", push_to_hub=True, commit_message="Tuned")
    config.save_pretrained(tmp_path / "own", push_to_hub=True, repo_id="me/other")
    assert [name for name, _ in made] == ["me/it", "own", "me/other"]
    assert made[0][1] == {"token": "t", "private": True, "exist_ok": True}
    assert [(seed, more["repo_id"], more["path_in_repo"]) for seed, more in sent] == [
        (6, "me/it", IPU_CONFIG_NAME),
        (6, "own", IPU_CONFIG_NAME),
        (6, "me/other", IPU_CONFIG_NAME),
    ]
    assert [more["commit_message"] for _, more in sent][1] == "Tuned"
    assert sent[0][1]["token"] == "t"


class Gone(Exception):
    """As the library's errors of HTTP, which are no OSError in every version."""


@pytest.mark.parametrize(
    "error", [Gone("404 Repository Not Found"), TimeoutError("no answer"), ValueError("bad id")]
)
def test_a_repository_that_is_missing_is_named_with_the_reason(error, monkeypatch):
    def fail(*args, **more):
        raise error

    for function in ("hf_hub_download", "create_repo"):
        monkeypatch.setattr(huggingface_hub, function, fail)
    for use in (IPUConfig.from_pretrained, IPUConfig().push_to_hub):
        with pytest.raises(OSError, match=f"'none/of-these'.*{error}") as caught:
            use("none/of-these")
        assert caught.value.__cause__ is error


@pytest.mark.slow  # another process imports everything
def test_offline_nothing_waits(tmp_path):
    code = (
        "import time; from ipu_dynamo.optimum import IPUConfig; import huggingface_hub\n"
        "for use in (IPUConfig.from_pretrained, IPUConfig().push_to_hub):\n"
        "    begin = time.perf_counter()\n"
        "    try: use('none/of-these')\n"
        "    except OSError as error: assert 'none/of-these' in str(error)\n"
        "    print(time.perf_counter() - begin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    waits = [float(line) for line in done.stdout.split()]
    assert len(waits) == 2
    assert max(waits) < 5


def test_without_a_network_or_a_library_the_repository_is_named(monkeypatch):
    begin = time.perf_counter()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="'none/of-these'"):
        IPUConfig.from_pretrained("none/of-these")
    with pytest.raises(OSError, match="'none/of-these'"):
        IPUConfig().push_to_hub("none/of-these")
    assert time.perf_counter() - begin < 5
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"'none/of-these'.*'\.\[optimum\]'"):
        IPUConfig.from_pretrained("none/of-these")
