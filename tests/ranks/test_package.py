"""What is shipped: the configs inside the wheel, and all that a checkout needs inside the sdist."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import lightning_cp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(sources: Path, folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def files_in(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_wheel_has_every_module_and_config(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configs = {f"lightning_cp/{name}" for name in files_in("configs")}
    assert "lightning_cp/configs/train.yaml" in configs
    assert names == files_in("lightning_cp") | files_in("hydra_plugins") | configs


@pytest.mark.nightly
def test_hydra_finds_the_plugins_of_a_wheel(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-m", "lightning_cp.train", "--info", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "FreshProcessLauncher" in done.stdout
    assert f"file://{tmp_path}/lightning_cp/configs/search_path" in done.stdout


@pytest.mark.nightly
def test_the_main_job_of_a_wheel_finds_its_configs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    ring = tmp_path / "lightning_cp" / "configs" / "strategy" / "ring.yaml"
    ring.write_text(ring.read_text().replace("mode: ring", "mode: of the wheel"))
    command = [sys.executable, "-m", "lightning_cp.train", "--cfg", "job", "strategy=ring"]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # first on the path of -m
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "mode: of the wheel" in done.stdout


def test_the_sdist_is_a_checkout(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = "lightning_cp hydra_plugins configs benchmarks tests examples docs .ci"
    for folder in folders.split():
        assert files_in(folder) <= names
    at_root = (
        "README.md LICENSE CHANGELOG.md CONTRIBUTING.md SECURITY.md Makefile mkdocs.yml constraints.txt "
        "constraints-oldest.txt pyproject.toml"
    )
    assert set(at_root.split()) <= names


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    wheels = [*built.glob("*.whl"), *build(sources, tmp_path / "dist", "-t", "wheel").glob("*.whl")]
    first, second = (contents(wheel) for wheel in wheels)
    assert first == second
    assert f"lightning_cp-{lightning_cp.__version__}.dist-info/METADATA" in first


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def imported() -> set[str]:
    """Top-level names of everything that the package imports, and that does not belong to Python."""
    pattern = re.compile(r"^\s*(?:from|import) ([a-zA-Z_]\w*)", re.MULTILINE)
    found: set[str] = set()
    for path in [*(ROOT / "lightning_cp").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]:
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        found |= set(pattern.findall(code))
    return found - set(sys.stdlib_module_names) - {"lightning_cp", "hydra_plugins"}


def test_the_oldest_versions_are_those_that_are_declared() -> None:
    """`make test-oldest` installs them; what has no newer floor comes from constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
        if "==" in line
    )
    declared = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    for name, oldest in re.findall(r"^(.+?)>=([\w.]+)", "\n".join(declared), re.MULTILINE):
        assert pins[name] == oldest or pins[name].startswith(f"{oldest}."), name


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        one
        for name, some in project["optional-dependencies"].items()
        if name != "dev"
        for one in some
    ]
    declared = {re.split(r"[<>=]", one)[0] for one in [*project["dependencies"], *extras]}
    homes = {**packages_distributions(), "lightning": ["lightning"]}
    normal = {name.lower().replace("-", "_") for name in declared}
    for name in imported():
        names = {home.lower().replace("-", "_") for home in homes.get(name, [name])}
        assert names & normal, f"{name} is imported, but {names} is not among the dependencies"
