"""Order of the tests: those that measure the process's heap run first, while it is small and tidy."""

from __future__ import annotations

import pytest

_HEAP = ("test_memory", "test_ownership", "test_rules_memory", "test_out_of_memory", "test_rules_granularity")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _HEAP)  # a stable sort: the rest keep their order
