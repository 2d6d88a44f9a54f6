"""The programs of `benchmarks/growth.py`: slow leaks are told by holder and line, innocent programs by nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from safetrain import memory

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here")


def load(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package; it finds its neighbours by `sys.path`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


growth = load("growth")
LEAKS: dict[str, Any] = load("growth_leaks").LEAKS
INNOCENTS: dict[str, Any] = load("growth_innocents").INNOCENTS
QUICK_LEAKS = ("Bytes", "CtypesBuffers", "OneLongText", "Exceptions")
QUICK_INNOCENTS = ("ReplayToCap", "Vocabulary")


def each(names: Any) -> Any:
    return pytest.mark.parametrize("name", names)


def check_leak(name: str) -> None:
    verdict, finding = growth.judge_leak(LEAKS[name], growth.run(name, LEAKS[name].steps))
    assert verdict == "caught", finding
    assert finding["growth_bytes_per_step"] > 900
    assert finding["severity"] == ("note" if name in ("Floats", "LoggingHandler", "ArrayOfNumbers") else "warning")


def check_innocent(name: str, steps: int) -> None:
    assert [f for f in growth.run(name, steps)["findings"] if f["severity"] != "note"] == []


def test_there_are_more_than_twenty_of_each() -> None:
    assert len(LEAKS) >= 20 and len(INNOCENTS) >= 20


@each(QUICK_LEAKS)
def test_a_leak_is_told_by_holder_and_line(name: str) -> None:
    check_leak(name)


@pytest.mark.slow
@each(sorted(set(LEAKS) - set(QUICK_LEAKS)))
def test_each_leak_is_told_by_holder_and_line(name: str) -> None:
    check_leak(name)


@each(QUICK_INNOCENTS)
def test_an_innocent_program_of_300_steps_raises_nothing(name: str) -> None:
    check_innocent(name, 300)


@pytest.mark.slow
@each(sorted(INNOCENTS))
def test_an_innocent_program_of_2000_steps_raises_nothing(name: str) -> None:
    check_innocent(name, growth.INNOCENT_STEPS)
