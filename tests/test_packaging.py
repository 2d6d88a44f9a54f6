"""What a person gets who installs the package instead of cloning the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_has_types_rule_pages_licence_and_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        assert {"safetrain/py.typed", "safetrain/loop.py", "safetrain/callbacks/base.py"} <= names
        pages = {page.name for page in (REPOSITORY / "docs" / "rules").glob("*.md")}
        assert {f"safetrain/rule_pages/{page}" for page in pages} <= names
        assert f"{info}/licenses/LICENSE" in names
        assert "safetrain.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        assert metadata["Requires-Python"] == ">=3.10"
        assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


def test_what_the_package_imports_is_what_it_asks_for() -> None:
    """A module that only the tests' environment has would fail for everyone else."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    asked = text[text.index("dependencies = [") : text.index("]", text.index("dependencies = ["))]
    provided = {"yaml": "pyyaml"}
    imported: set[str] = set()
    for path in (REPOSITORY / "safetrain").rglob("*.py"):
        if path.parent.name == "integrations":
            continue  # each imports the trainer that it is for, when that is there
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"safetrain", "pydantic_core"}  # the latter comes with pydantic
    assert [name for name in sorted(outside) if f'"{provided.get(name, name)}' not in asked] == []
