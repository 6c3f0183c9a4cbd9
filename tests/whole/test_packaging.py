"""The installed files are those of the tree: the sdist, the wheel, the list of packages, the link and the alias."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml  # of mkdocs

import kfac_fx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files() -> list[str]:
    """Every file of the two floors, under the name that it must have in a wheel."""
    found = []
    for folder, installed in ((ROOT / "passes", "kfac_fx/passes"), (ROOT / "kfac_fx", "kfac_fx")):
        inside = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        own = [path for path in inside if folder.name == "passes" or path.parts[0] != "passes"]  # not through the link
        found += [f"{installed}/{path.as_posix()}" for path in own if "__pycache__" not in path.parts]
    return sorted(found)


def modules() -> list[str]:
    sources = [name.removesuffix(".py") for name in files() if name.endswith(".py")]
    return [name.removesuffix("/__init__").replace("/", ".") for name in sources]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, built offline from a copy of the sources, and the wheel that is built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("distributions")
    for name in ("passes", "kfac_fx"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    """The wheel, unpacked."""
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(distributions / "unpacked")
    return distributions / "unpacked"


def test_the_list_of_packages_is_the_folders() -> None:
    folders = {str(Path(name).parent).replace("/", ".") for name in files() if name.endswith(".py")}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_the_version_is_the_same_everywhere() -> None:
    assert kfac_fx.__version__ == PROJECT["project"]["version"]
    assert f"\n## {kfac_fx.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_tests_the_oldest_torch_that_may_be_installed() -> None:
    (oldest,) = (name.removeprefix("torch>=") for name in PROJECT["project"]["dependencies"] if "torch" in name)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert {step.get("run") for step in workflow["jobs"]["test"]["steps"]} == {None, ".ci/run"}
    first, *_, last = workflow["jobs"]["torch"]["strategy"]["matrix"]["include"]
    assert (first["torch"], last["torch"]) == (f"{oldest}.0", "newest")
    assert first["python"] == PROJECT["project"]["requires-python"].removeprefix(">=")
    for version, wanted in ((first["torch"], f"torch=={oldest}.0"), ("newest", "torch")):
        planned = run("make", "--dry-run", "guards", f"TORCH={version}", cwd=ROOT)
        assert f"--editable . \\\n\t{wanted} numpy" in planned


INDEX = re.compile(r"pypi[.]|pythonhosted[.]|download[.]pytorch|anaconda[.]|npmjs[.]|index[-_]url|find[-_]links", re.I)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_no_file_names_an_index_of_packages() -> None:
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    texts = {name: (ROOT / name).read_bytes().decode(errors="replace") for name in tracked if (ROOT / name).is_file()}
    named = {name: found[0] for name, text in texts.items() if (found := INDEX.search(text))}
    assert named == {}, "pip takes packages from the index that it is set to"


def test_the_wheel_holds_every_file_and_no_other(wheel: Path) -> None:
    packed = sorted(path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file())
    assert [name for name in packed if ".dist-info/" not in name] == files()


WITH_TRITON = ("kfac_fx.optim.padded_kernels",)  # which only torch's builds for CUDA bring


def test_the_wheel_imports_alone(wheel: Path, tmp_path: Path) -> None:
    # -S: without `site`, no editable install of this project can fill in what the wheel lacks.
    others = [path for path in sys.path if "-packages" in path or path.startswith(sys.base_prefix)]
    program = f"""
import importlib, sys
sys.path = [{str(wheel)!r}, *{others!r}]
for name in {[name for name in modules() if name not in WITH_TRITON]!r}:
    place = importlib.import_module(name).__file__
    assert place.startswith({str(wheel)!r}), place
"""
    run(sys.executable, "-I", "-S", "-c", program, cwd=tmp_path)


TRAINING = """
import sys
sys.path.insert(0, "site")
import kfac_fx, torch
assert kfac_fx.__file__.startswith(sys.argv[1]), kfac_fx.__file__
net = kfac_fx.compile(torch.nn.Linear(3, 1), loss="mse")
optimizer = kfac_fx.KFAC(net)
x = torch.randn(8, 3)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    losses.append(torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)))
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0]
print(kfac_fx.__version__)
"""


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.slow)])
def test_a_distribution_installs_into_an_empty_folder_and_trains(
    kind: str, distributions: Path, tmp_path: Path
) -> None:
    (path,) = distributions.glob(kind)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", "site"]
    run(sys.executable, "-m", "pip", "install", *options, path, cwd=tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    assert run(sys.executable, "-P", "train.py", tmp_path / "site", cwd=tmp_path).strip() == kfac_fx.__version__
    assert any((tmp_path / "site" / "bin").iterdir())  # the command


def test_passes_is_one_package_under_both_names() -> None:
    program = f"""
import importlib, passes
for name in {[name for name in modules() if name.startswith("kfac_fx.passes")]!r}:
    one, other = importlib.import_module(name), importlib.import_module(name.removeprefix("kfac_fx."))
    assert one is other, f"{{name}} is a second copy: passes/__init__.py must import it"
"""
    run(sys.executable, "-c", program, cwd=ROOT)


def test_the_link_leads_to_the_compiler() -> None:
    link = ROOT / "kfac_fx" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == "../passes"
