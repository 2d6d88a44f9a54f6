"""Finding the user's class that a config names, in a file or in an importable module."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from safetrain.errors import ConfigError


def load_object(spec: str, setting: str) -> Any:
    """What `folder/file.py:Name` or `package.module:Name` names. `setting` is the config key that errors name.

    Raises:
        ConfigError: no such file or module, it fails while being imported, or it has no such name.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{setting}: {spec!r} should be folder/file.py:Class or package.module:Class")
    module = _import_file(Path(place), setting) if place.endswith(".py") else _import_module(place, setting)
    try:
        return getattr(module, name)
    except AttributeError:
        classes = [
            n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        near = difflib.get_close_matches(name, classes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its classes are {', '.join(classes) or 'none'}"
        raise ConfigError(f"{setting}: {place} has no class {name}; {hint}") from None


def _import_file(file: Path, setting: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{setting}: no file {file}")
    file = file.resolve()
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    # As `python file.py` does: the file's neighbours can be imported, and worker processes find its classes by name.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = file.stem if known is None else f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}: {file} fails when imported: {_told(error, file)}") from error
    return module


def _import_module(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{setting}: no module {error.name}; check the spelling, or name a file instead: path/to/file.py:Class"
            ) from error
        raise ConfigError(f"{setting}: {name} fails when imported: {error}; install what is missing") from error
    except Exception as error:
        raise ConfigError(f"{setting}: {name} fails when imported: {_told(error, None)}") from error


def _told(error: Exception, file: Path | None) -> str:
    """The error in one line, with the line of `file` where it came up."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == str(file)
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
