"""Builds the wheel, installs it into an environment without the source tree, and runs the quickstart there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from pages import DOCS, ROOT, blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target], cwd=ROOT, check=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs' directory of an environment that has the wheel, and the dependencies installed here."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # A path in a .pth file is searched for packages, but the .pth files in it (the editable install) are not read.
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "qfleet").rglob("*.py")}
    assert modules | {"qfleet/py.typed"} <= names
    strange = {name for name in names - modules if not name.startswith("qfleet-") and name != "qfleet/py.typed"}
    assert strange == set()


def test_the_metadata_is_that_of_the_project(wheel: Path) -> None:
    from qfleet import __version__

    metadata = _metadata(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("qfleet", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == set(PROJECT["requires-python"].split(","))
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    requires = metadata.get_all("Requires-Dist", [])
    assert len([line for line in requires if "extra ==" not in line]) == len(PROJECT["dependencies"])
    assert (ROOT / "README.md").read_text().strip() in str(metadata.get_payload()).strip()


@pytest.mark.slow  # a minute: nothing is compiled yet in a new environment
def test_the_quickstart_runs_where_the_wheel_is_installed(clean: Path, tmp_path: Path) -> None:
    where = _run([clean / "python", "-c", "import qfleet; print(qfleet.__file__)"], clean, tmp_path)
    assert Path(where.strip()).is_relative_to(clean.parent)
    train, play, python = blocks(DOCS / "quickstart.md")[:3]
    first, *_ = train.commands()
    _run([*shlex.split(first), *shlex.split(train.marker.removeprefix("add "))], clean, tmp_path)
    _run(shlex.split(play.commands()[0]), clean, tmp_path)
    _run([clean / "python", "-c", python.text], clean, tmp_path)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def _run(command: list[str | Path], programs: Path, directory: Path) -> str:
    """Run a command in the clean environment: its programs first, nothing of ours on the path; return its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = {**kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    program = str(programs / command[0]) if command[0] == "qfleet" else str(command[0])
    done = subprocess.run(
        [program, *map(str, command[1:])], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
