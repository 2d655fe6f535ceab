"""What is published: the sdist builds alone, the wheel is whole, and its types are visible to programs that import it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python" / "antiphon"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
#: Compiled as `make package` does, which has compiled the dependencies: this is to be right, not fast.
BUILD = {
    "CARGO_TARGET_DIR": str(TARGET),
    "CARGO_PROFILE_DEV_DEBUG": "none",
    "CARGO_PROFILE_DEV_OPT_LEVEL": "0",
    "MATURIN_PEP517_ARGS": "--profile dev",
}

pytestmark = pytest.mark.skipif(not (ROOT / "Cargo.toml").exists(), reason="needs checkout: there is no Cargo.toml")


def run(*command: "str | Path", cwd: Path | None = None) -> str:
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    environment = {**os.environ, **BUILD, "PATH": path}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it from an sdist, beside which nothing of the checkout lies."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "maturin", "sdist", "--out", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    sources = TARGET / "sdist"
    shutil.rmtree(sources, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(sources, filter="data")
    for file in sources.rglob("*"):  # their date is that of the release, and cargo compiles what is newer than its output
        file.touch()
    (unpacked,) = sources.iterdir()
    options = "--quiet --disable-pip-version-check --no-build-isolation --no-deps --no-index --no-cache-dir".split()
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, unpacked, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder / "bin" / "python"


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    sources = {str(file.relative_to(PYTHON.parent)) for file in PYTHON.rglob("*") if file.suffix in (".py", ".pyi", ".typed")}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert sources - held == set() and "antiphon/_core.abi3.so" in held
    assert any(name.endswith("/licenses/LICENSE") for name in held)
    assert re.fullmatch(r"antiphon-.*-cp310-abi3-(many)?linux.*\.whl", wheel.name)


def test_what_a_registry_shows_is_there_and_leads_nowhere_else(wheel: Path) -> None:
    found = metadata(wheel)
    one = ["Name", "Version", "Summary", "Keywords", "License-Expression", "Requires-Python", "Description-Content-Type"]
    assert [name for name in one if not found[name]] == []
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    page = found.get_payload()
    assert isinstance(page, str) and page.strip().startswith("# Antiphon")
    links = re.findall(r"\]\(([^)]*)\)", page)  # of files in a repository, which a registry does not have
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_crate_says_what_a_registry_shows() -> None:
    packages = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1", cwd=ROOT))["packages"]
    published = [package for package in packages if package["publish"] != []]
    assert {package["name"] for package in packages} - {package["name"] for package in published} == {
        "antiphon-emulator",
        "antiphon-python",
        "antiphon-sass",
        "antiphon-testing",
    }
    for package in published:
        said = ["description", "documentation", "keywords", "categories", "license", "readme", "rust_version"]
        assert [name for name in said if not package[name]] == [], package["name"]
        assert package["documentation"] == f"https://docs.rs/{package['name']}"
        assert len(package["keywords"]) <= 5 and all(len(word) <= 20 for word in package["keywords"])


def test_the_pages_agree() -> None:
    page, front, changes = ((ROOT / name).read_text() for name in ("crates/README.md", "README.md", "CHANGELOG.md"))
    programs = re.findall(r"```.*?```", page, re.DOTALL)
    assert len(programs) == 2 and all(program in front for program in programs)
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version in changes


def test_the_wheel_works_where_there_is_nothing_else(installed: Path, tmp_path: Path) -> None:
    program = """
import antiphon
with antiphon.init(rank=0, world_size=1, path="world") as comm:
    print(antiphon.__version__, bytes(comm.all_reduce(b"x", out=bytearray(1))))
"""
    version = run(installed, "-m", "antiphon", "--version", cwd=tmp_path).split()[-1]
    assert run(installed, "-c", program, cwd=tmp_path) == f"{version} b'x'\n"


PROGRAM = """
import antiphon
from antiphon import ReduceOp
from antiphon.comm import Mapping
from antiphon.compat import install
from antiphon.language import AllGather, CollectiveProgram

comm = antiphon.init(rank=0, world_size=1, path="world")
total: bytearray = comm.all_reduce(bytearray(8), "max")
total = comm.all_reduce(bytearray(8), ReduceOp.MAX)
name: str = "max"
total = antiphon.all_reduce(total, ReduceOp(name))
handle: antiphon.Pending[bytearray] = comm.start_all_reduce(total)
total = handle.wait()
total = comm.all_reduce(total, "MEAN")
normed: bytearray = comm.all_reduce_rms_norm(total).norm
lost: type[RuntimeError] = antiphon.PeerLostError
"""

#: A line, and what mypy says of it.
WRONG = {
    "comm.all_reduced(bytearray(8))": 'has no attribute "all_reduced"',
    "comm.all_reduce(8)": "Value of type variable",
    "comm.all_reduce(total, 'summ')": 'has incompatible type "Literal[\'summ\']"',
    "comm.all_reduce(total, algorithm='one')": 'has incompatible type "Literal[\'one\']"',
    "antiphon.all_reduce(total, 'summ')": 'has incompatible type "Literal[\'summ\']"',
    "antiphon.init(rank='0')": 'Argument "rank" to "init"',
}


def check_types(installed: Path, folder: Path, program: str) -> "tuple[int, str]":
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", "--python-executable", installed]
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    result = subprocess.run([*command, "program.py"], cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_types_reach_programs_outside(installed: Path, tmp_path: Path) -> None:
    status, said = check_types(installed, tmp_path, PROGRAM)
    assert status == 0, said
    status, said = check_types(installed, tmp_path, PROGRAM + "\n".join(WRONG) + "\n")
    lines = [line for line in said.splitlines() if ": error: " in line]
    assert status == 1 and len(lines) == len(WRONG), said
    for line, text in zip(lines, WRONG.values()):
        assert text in line
