"""Sizes as people write them. Imports nothing heavy: configs and the command line read sizes before torch is there."""

from __future__ import annotations

import re

from safetrain.errors import ConfigError

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_LEAST = 1000
"""A size below is one whose unit was forgotten."""


def parse_bytes(size: int | str, setting: str = "size") -> int:
    """`24GB` (powers of 1000), `512 MiB` (powers of 1024) or a number of bytes, as bytes.

    Raises `ConfigError`, naming `setting`, for anything else and for what is not above zero.
    """
    written = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(written[2].upper()) if written else None
    count = int(float(written[1]) * unit) if written and unit else 0
    if isinstance(size, bool) or count <= 0:
        raise ConfigError(f"{setting}: {size!r} is no size; write bytes, or such as 24GB, 512MiB")
    if count < _LEAST:
        raise ConfigError(f"{setting}: {size!r} are {count} bytes, in which nothing runs; write the unit, such as 24GB")
    return count
