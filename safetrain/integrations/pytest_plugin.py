"""`pytest --safetrain`: run each test under the guards, and fail it when they find something.

`@pytest.mark.safetrain(rules="-G104")` chooses the rules of one test; `@pytest.mark.safetrain(False)` leaves it alone.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    group = parser.getgroup("safetrain")
    group.addoption("--safetrain", action="store_true", help="run each test under safetrain's guards; findings fail it")


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line("markers", "safetrain(watch=True, rules=''): how `--safetrain` watches this test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch the test's own code, fixtures apart. A test that fails by itself keeps its own failure."""
    marker = item.get_closest_marker("safetrain")
    wanted = marker.args[0] if marker is not None and marker.args else True
    if not item.config.getoption("--safetrain") or not wanted:
        return (yield)
    from safetrain.bare_loop import watch
    from safetrain.terminal import format_finding

    rules = str(marker.kwargs.get("rules", "")) if marker is not None else ""
    with watch(rules=[word for word in rules.replace(" ", "").split(",") if word], stream=None) as watched:
        result = yield
    loud = [finding for finding in watched.findings if finding.severity != "note"]
    if loud:
        pytest.fail("safetrain found\n\n" + "".join(format_finding(finding) for finding in loud), pytrace=False)
    return result
