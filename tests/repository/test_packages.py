"""Check that pyproject.toml says what the folders hold."""

import tomllib
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest

import poptorch

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
HOMES = {  # folders at the root, and the names that they are imported by
    "ipu_dynamo": "ipu_dynamo",
    "passes": "ipu_dynamo.passes",
    "runtime": "ipu_dynamo.runtime",
    "popart": "popart",
    "popdist": "popdist",
    "poptorch": "poptorch",
}


PAGES = "ipu_dynamo.guide"  # pages of docs/ that are data of the package; no module is there


def packages_in_folders() -> dict[str, str]:
    """Map the import name of each folder that holds an `__init__.py` to that folder."""
    found = {}
    for home, name in HOMES.items():
        for init in (ROOT / home).glob("**/__init__.py"):
            folder = init.parent.relative_to(ROOT)
            found[".".join([name, *folder.parts[1:]])] = folder.as_posix()
    return found


def test_every_folder_with_an_init_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted([*packages_in_folders(), PAGES])


def test_pages_that_commands_print_are_package_data():
    folder = ROOT / SETUPTOOLS["package-dir"][PAGES]
    assert (folder / "errors.md").is_file()
    assert SETUPTOOLS["package-data"][PAGES] == ["errors.md"]


def test_every_package_maps_to_its_folder():
    mapping = SETUPTOOLS["package-dir"]
    for package, folder in packages_in_folders().items():
        assert mapping.get(package, package.replace(".", "/")) == folder


def test_no_module_lies_outside_a_package():
    folders = set(packages_in_folders().values())
    modules = {module for home in HOMES for module in (ROOT / home).glob("**/*.py")}
    orphans = {str(m) for m in modules if m.parent.relative_to(ROOT).as_posix() not in folders}
    assert not orphans


def test_every_other_file_of_a_package_is_package_data():
    data = SETUPTOOLS["package-data"]
    listed = {
        file
        for package, folder in packages_in_folders().items()
        for pattern in ("*.py", *data["*"], *data.get(package, ()))
        for file in (ROOT / folder).glob(pattern)
    }
    files = {file for home in HOMES for file in (ROOT / home).rglob("*") if file.is_file()}
    assert not {str(file) for file in files - listed if "__pycache__" not in file.parts}


@pytest.mark.parametrize("home", HOMES)
def test_every_home_is_marked_as_typed(home):
    assert (ROOT / home / "py.typed").exists()


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_the_links_are_relative(name):
    assert (ROOT / "ipu_dynamo" / name).readlink() == Path("..", name)


def test_the_distribution_that_only_names_a_version_names_the_facades():
    file = ROOT / "packaging" / "poptorch" / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))
    assert project["project"]["name"] == "poptorch"
    assert project["project"]["version"] == poptorch.__version__
    assert project["tool"]["setuptools"]["packages"] == []
    assert {found.version for found in distributions(name="poptorch")} <= {poptorch.__version__}


def test_horovod_is_a_distribution_of_its_own():
    file = ROOT / "packaging" / "horovod_compat" / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))
    assert project["project"]["version"] == PROJECT["project"]["version"]
    assert project["tool"]["setuptools"]["packages"] == ["horovod"]
    assert "horovod" not in SETUPTOOLS["packages"]


def test_the_installed_entry_point_is_the_backend():
    points = set(entry_points(group="torch_dynamo_backends", name="ipu"))
    if not points:
        pytest.skip("ipu_dynamo is not installed; the tests run from the checkout")
    (point,) = points
    assert point.value == "ipu_dynamo.torch_compile.backend:ipu"
    assert callable(point.load())
