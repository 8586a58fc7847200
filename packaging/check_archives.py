"""Check that the wheels and the sdist in a folder hold the packages, and nothing beside them.

Usage: python packaging/check_archives.py dist
"""

import configparser
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def expected_files() -> dict[str, str]:
    """Map each file that the wheel must hold to its place in the checkout: modules and data."""
    files = {}
    for package in SETUPTOOLS["packages"]:
        inside = package.replace(".", "/")
        folder = SETUPTOOLS["package-dir"].get(package, inside)
        data = SETUPTOOLS["package-data"]
        for pattern in ["*.py", *data["*"], *data.get(package, [])]:
            for source in filter(Path.is_file, sorted((ROOT / folder).glob(pattern))):
                name = source.relative_to(ROOT / folder).as_posix()
                files[f"{inside}/{name}"] = f"{folder}/{name}"
    return files


def check_wheel(path: Path) -> None:
    """Raise SystemExit if the wheel at `path` lacks a file, has one too many, or has no backend."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        entry_points = configparser.ConfigParser(delimiters="=")
        entry_points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    modules = {name for name in names if not name.startswith(f"{info}/")}
    compare(path.name, modules, set(expected_files()))
    groups = PROJECT["project"]["entry-points"] | {"console_scripts": PROJECT["project"]["scripts"]}
    for group, points in groups.items():
        found = dict(entry_points[group]) if group in entry_points else {}
        need(found == points, f"{path.name}: its {group} are {found}, not {points}")
    need(metadata["License-Expression"] == "MIT", f"{path.name}: its licence is not MIT")
    need(f"{info}/licenses/LICENSE" in names, f"{path.name}: the licence's text is missing")


def check_version(path: Path) -> None:
    """Raise SystemExit if the wheel at `path`, which only names a version, holds a file."""
    with zipfile.ZipFile(path) as wheel:
        outside = [name for name in wheel.namelist() if ".dist-info/" not in name]
    need(not outside, f"{path.name}: holds {outside}")


def check_horovod(path: Path) -> None:
    """Raise SystemExit if the wheel at `path` holds something else than our horovod."""
    sources = ROOT / "packaging" / "horovod_compat"
    with zipfile.ZipFile(path) as wheel:
        outside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {file.relative_to(sources).as_posix() for file in sources.glob("horovod/*.py")}
    compare(path.name, outside, expected)


def check_sdist(path: Path) -> None:
    """Raise SystemExit if the sdist at `path` lacks a file, has one twice, or has a link."""
    with tarfile.open(path) as sdist:
        members = [member for member in sdist if not member.isdir()]
    links = [member.name for member in members if not member.isfile()]
    need(not links, f"{path.name}: holds links, which not every system can unpack: {links}")
    names = {member.name.partition("/")[2] for member in members}
    expected = set(expected_files().values())
    homes = {name.partition("/")[0] for name in expected}
    sources = {n for n in names if n.endswith(".py") or n.partition("/")[0] in homes}
    compare(path.name, sources, expected)
    for name in ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"):
        need(name in names, f"{path.name}: {name} is missing")


def compare(archive: str, found: set[str], expected: set[str]) -> None:
    """Raise SystemExit if the two sets differ."""
    need(expected <= found, f"{archive}: missing {sorted(expected - found)}")
    need(found <= expected, f"{archive}: not part of a package: {sorted(found - expected)}")


def need(condition: bool, problem: str) -> None:
    """Raise SystemExit with `problem` unless `condition` holds."""
    if not condition:
        raise SystemExit(problem)


def main(folder: Path) -> None:
    """Check the three wheels and the one sdist in `folder`."""
    (wheel,), (sdist,) = folder.glob("ipu_dynamo-*.whl"), folder.glob("*.tar.gz")
    (version,) = folder.glob("poptorch-*.whl")
    (horovod,) = folder.glob("ipu_dynamo_horovod-*.whl")
    check_wheel(wheel)
    check_sdist(sdist)
    check_version(version)
    check_horovod(horovod)
    print(f"{wheel.name} and {sdist.name}: complete, {len(expected_files())} files each")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
