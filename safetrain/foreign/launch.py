"""Run a script or a module inside this process exactly as `python script.py` and `python -m package.module` would.

`__main__`, `sys.argv`, `sys.path[0]`, `__file__`, `__spec__`, pickling of classes in `__main__` and relative imports
are as the script expects. Imports no torch, so what a script sets before its own import still counts.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from safetrain.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """What to run: `code` as the module `main`, with `argv`, and `path0` in front of the import path."""

    code: types.CodeType
    main: types.ModuleType
    argv: list[str]
    path0: str


def script(path: str, args: list[str]) -> Target:
    """A file. Raises `ConfigError` when there is none, `SyntaxError` when it is not Python."""
    if Path(path).is_dir():
        path = os.path.join(path, "__main__.py")
    if not Path(path).is_file():
        raise ConfigError(f"there is no script {path!r} in {os.getcwd()}")
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__file__ = absolute
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
    main.__package__ = None
    main.__dict__.update(__cached__=None, __builtins__=builtins, __spec__=None)
    return Target(code, main, [path, *args], os.path.dirname(os.path.realpath(absolute)))


def module(name: str, args: list[str]) -> Target:
    """A module by its dotted name, a package by its `__main__`. Raises `ConfigError` when there is none."""
    sys.path[0] = os.getcwd()
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ConfigError(f"no module named {name!r} can be run; give a module, or a package with a __main__.py")
    main = types.ModuleType("__main__")
    main.__file__ = spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    main.__dict__.update(__cached__=spec.cached, __builtins__=builtins)
    return Target(code, main, [spec.origin or name, *args], os.getcwd())


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def execute(target: Target) -> None:
    """Run it in place of the present `__main__`. What it raises comes out, `SystemExit` too."""
    sys.argv[:] = target.argv
    sys.path[0] = target.path0
    # Kept in place afterwards: exit handlers and threads of the script still need their globals.
    sys.modules["__main__"] = target.main
    exec(target.code, target.main.__dict__)
