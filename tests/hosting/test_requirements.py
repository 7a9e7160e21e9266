"""What is imported is declared, and what is declared agrees: on a Space one flat file is all there is."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = {"app", "river_core", "tests"}
ON_WISH = {"llama_cpp"}  # a peer that one installs oneself for `bench --peers`


def lines(name: str) -> list[str]:
    """The requirements of a file as they stand there; options, comments and empty lines left out."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "-"))]


def requirements(name: str) -> dict[str, Requirement]:
    found = [Requirement(line.partition(" #")[0]) for line in lines(name)]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def front_matter() -> dict:
    _, text, _ = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(text)


def imports(path: Path) -> set[str]:
    """The packages, other than the standard library and our own, that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OURS


def undeclared(paths: list[Path], *files: str) -> dict[str, str]:
    """Import name to the file that uses it, for whatever the requirements `files` do not name."""
    declared = {name for file in files for name in requirements(file)}
    distributions = packages_distributions()
    return {
        name: str(path.relative_to(ROOT))
        for path in paths
        for name in imports(path) - ON_WISH
        if not declared & {canonicalize_name(distribution) for distribution in distributions.get(name, [name])}
    }


def test_whatever_the_page_and_the_engine_import_is_declared():
    # app/cost.py measures with a browser and app/zerogpu.py runs on ZeroGPU: the first needs a library of the tests, the second one of its own file.
    exceptional = {ROOT / "app/cost.py": "requirements-dev.txt", ROOT / "app/zerogpu.py": "requirements-zerogpu.txt"}
    engine = [*(ROOT / "river_core").rglob("*.py")]
    page = [ROOT / "app.py", *(ROOT / "app").rglob("*.py")]
    assert undeclared([path for path in page + engine if path not in exceptional], "requirements.txt") == {}
    for path, file in exceptional.items():
        assert undeclared([path] if path.exists() else [], "requirements.txt", file) == {}


def test_whatever_the_tests_import_is_declared():
    assert undeclared([*(ROOT / "tests").rglob("*.py")], "requirements.txt", "requirements-dev.txt") == {}


def test_an_import_that_is_not_declared_is_seen(tmp_path):
    """The walk sees imports inside functions and of submodules, and leaves the standard library and relative imports out."""
    path = tmp_path / "some.py"
    path.write_text("import os.path\nfrom . import near\ndef f():\n    import absent.part\n    from other.part import x\n")
    assert imports(path) == {"absent", "other"}


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-zerogpu.txt"])
def test_a_spaces_file_is_flat_and_has_every_line_of_the_engines(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(-r|--requirement|-c|-e|\.)", text, re.MULTILINE), "a Space mounts this one file alone"
    here = lines(file)
    engine = [line for line in lines("requirements-engine.txt") if not line.startswith("torch")]
    assert [line for line in engine if line not in here] == []


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-zerogpu.txt"])
def test_its_pytorch_is_one_that_the_engine_allows(file):
    (pin,) = requirements(file)["torch"].specifier
    assert pin.operator == "==" and requirements("requirements-engine.txt")["torch"].specifier.contains(pin.version)


def test_both_spaces_install_the_same_apart_from_pytorch_and_zerogpus_own_library():
    plain, zero = requirements("requirements.txt"), requirements("requirements-zerogpu.txt")
    assert zero.keys() - plain.keys() == {"spaces"} and plain.keys() <= zero.keys()
    assert {name for name in plain if str(plain[name]) != str(zero[name])} == {"torch"}
    # ZeroGPU's cards need PyTorch's CUDA build, and only these releases are supported there.
    assert "--extra-index-url" not in (ROOT / "requirements-zerogpu.txt").read_text(encoding="utf-8")
    assert str(zero["torch"].specifier) in {"==2.8.0", "==2.9.1", "==2.10.0", "==2.11.0"}


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-zerogpu.txt"])
def test_gradio_is_the_release_that_a_space_is_told(file):
    """A Space installs gradio[mcp,oauth]==sdk_version beside this file: any other pin cannot be resolved."""
    gradio = requirements(file)["gradio"]
    assert str(gradio.specifier) == f"=={front_matter()['sdk_version']}"
    assert gradio.extras <= {"mcp", "oauth"}


def test_the_front_matter_is_what_a_space_reads():
    matter = front_matter()
    assert matter["sdk"] == "gradio" and matter["app_file"] == "app.py" and (ROOT / "app.py").exists()
    assert len(matter["short_description"]) <= 60
    assert matter["header"] in ("mini", "default")
    assert (ROOT / matter["thumbnail"]).is_file()
    assert matter["tags"] and all(re.fullmatch(r"[a-z0-9-]+", tag) for tag in matter["tags"])
    assert re.fullmatch(r"\d+(m|h)", matter["startup_duration_timeout"])
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {matter["colorFrom"], matter["colorTo"]} <= colours
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")).group(1)
    assert [int(part) for part in matter["python_version"].split(".")] >= [int(part) for part in lowest.split(".")]


def test_debian_packages_are_names_and_nothing_else():
    """A Space hands the words of this file to apt-get as they are, comments too."""
    words = (ROOT / "packages.txt").read_text(encoding="utf-8").split()
    assert words and all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", word) for word in words)
    assert "g++" in words  # the compiled layers
