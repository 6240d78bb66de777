"""The project keeps what its documents say: tree, API description, extension points, names of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Service

PACKAGES = ("app", "ingest", "retrieval", "serving", "eval")


def _tree(readme: str) -> set[str]:
    """The paths that the README's tree names; indentation makes the folders."""
    block = readme.split("    .\n", 1)[1].split("\n\n", 1)[0]
    paths: set[str] = set()
    folders: list[str] = []
    for line in block.splitlines():
        indent, name = re.match(r"^ {4}( *)(\S+)", line).groups()  # type: ignore[union-attr]
        depth = len(indent) // 2 - 1
        folders = folders[:depth]
        paths.add("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def _on_disk(root: Path) -> set[str]:
    """Tracked and new files, as the tree shows them: every module of a package, and one level of all else."""
    paths: set[str] = set()
    shown = (name for name in _listed(root) if (root / name).exists() and "/." not in f"/{name}")
    for name in shown:
        parts = name.split("/")
        if len(parts) == 1 or (parts[0] in PACKAGES and len(parts) == 2):
            if parts[-1] != "__init__.py":
                paths.add(name)
        else:
            paths.add("/".join(parts[:2]) + ("/" if len(parts) > 2 else ""))
        if len(parts) > 1:
            paths.add(parts[0] + "/")
    return paths


def _listed(root: Path) -> list[str]:
    """What git has or would take: nothing else tells the project's own files from what tools have made."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip(
            "needs git and a clone of the repository; an unpacked archive does not tell which files are its own"
        )
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_readme_shows_the_tree_as_it_is(root: Path) -> None:
    assert _tree((root / "README.md").read_text()) == _on_disk(root)


def test_no_other_distribution_owns_our_names() -> None:
    owners = metadata.packages_distributions()
    for package in (*PACKAGES, "tests"):
        assert set(owners.get(package, [])) <= {"foreword"}, package


def test_extension_points_are_registered_and_load() -> None:
    entries = {(e.group, e.name): e for e in metadata.distribution("foreword").entry_points}
    assert ("console_scripts", "foreword") in entries
    for entry in entries.values():
        assert callable(entry.load())


async def test_the_stored_api_description_is_the_real_one(service: Service, root: Path) -> None:
    stored: dict[str, Any] = json.loads((root / "docs" / "openapi.json").read_text())
    real = (await service.http.get("/openapi.json")).json()
    assert stored == real, "store the new one: curl -s $URL/openapi.json | python -m json.tool > docs/openapi.json"


def test_every_call_is_in_the_api_document(root: Path) -> None:
    stored: dict[str, Any] = json.loads((root / "docs" / "openapi.json").read_text())
    document = (root / "docs" / "api.md").read_text()
    for path, methods in stored["paths"].items():
        for method in methods:
            name = path.replace("{number}", "{n}")
            assert f"`{method.upper()} {name}`" in document, (method, path)


def test_version_and_changelog_agree(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## \[{re.escape(version)}\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    for document in [*root.glob("*.md"), *root.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), (document.name, target)


@pytest.mark.parametrize("module", ["app.cli", "app.answer", "serving.vllm_engine", "app.services"])
def test_modules_load_without_the_engine_and_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'vllm', 'torch'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_locked_lists_are_hashed_and_leave_out_what_breaks(root: Path) -> None:
    for name in ("requirements-torch-cpu.txt", "requirements-cpu.txt", "requirements-gpu.txt", "requirements-dev.txt"):
        blocks = re.split(r"\n(?=[a-z])", (root / name).read_text().strip())
        for block in blocks:
            if "==" in block:
                assert "--hash=sha256:" in block, block[:60]
        pinned = {block.split("==")[0].split("\n")[-1] for block in blocks}
        assert not pinned & {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "zh-core-web-sm"}


_VENV = ".venv/.made"
_FAILING = """#!/bin/sh
mkdir -p .venv/bin
ln -s {python} .venv/bin/python
echo "no ensurepip here" >&2
exit {code}
"""


def _make_venv(root: Path, folder: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--silent", "--file", str(root / "Makefile"), _VENV, f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [0, 1], ids=["a .venv without pip of its own", "creating fails"])
def test_a_virtual_environment_that_cannot_be_made_is_not_kept(root: Path, tmp_path: Path, code: int) -> None:
    python = tmp_path / "python"
    # Linked without its pyvenv.cfg, it is the interpreter that it links to, with the pip of that one.
    python.write_text(_FAILING.format(python=Path(sys.executable).resolve(), code=code))
    python.chmod(0o755)
    made = _make_venv(root, tmp_path, python)
    assert made.returncode != 0
    assert ("no ensurepip here" if code else "no environment of its own") in made.stdout
    assert "make PYTHON=" in made.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_missing_python_is_named(root: Path, tmp_path: Path) -> None:
    made = _make_venv(root, tmp_path, "/nowhere/python")
    assert made.returncode != 0
    assert "/nowhere/python" in made.stdout


def test_half_a_virtual_environment_is_made_anew(root: Path, tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    made = _make_venv(root, tmp_path, Path(sys.executable).resolve())
    assert made.returncode == 0, made.stdout
    prefix = [str(tmp_path / ".venv" / "bin" / "python"), "-c", "import pip, sys; print(sys.prefix)"]
    assert subprocess.run(prefix, capture_output=True, text=True, check=True).stdout.strip() == str(tmp_path / ".venv")
    assert _make_venv(root, tmp_path, "/nowhere/python").stdout == ""
