"""A forecast and a plan in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from safetrain.accounting.ownership import OWNERS, place
from safetrain.graph import format_bytes
from safetrain.planner.forecast import PHASES, Forecast
from safetrain.planner.search import Option
from safetrain.planner.switches import Switch

_WIDTH = 46


def table(found: Forecast) -> str:
    """Bytes by owner at the highest moment of each phase, and what makes the peak."""
    phases = [phase for phase in PHASES if phase in found.peaks]
    columns = [found.owners(phase) for phase in phases]
    lines = [f"{'':16}" + "".join(phase.rjust(12) for phase in phases)]
    for owner in OWNERS:
        if any(column[owner] for column in columns):
            lines.append(f"{owner:16}" + "".join(format_bytes(column[owner]).rjust(12) for column in columns))
    lines.append(f"{'all tensors':16}" + "".join(format_bytes(sum(c.values())).rjust(12) for c in columns))
    return "\n".join([*lines, "", peak(found)])


def peak(found: Forecast) -> str:
    """What makes the peak, in a sentence."""
    phase = max(found.peaks, key=lambda name: found.peaks[name][0])
    block = found.memory.peak_block
    told = f"peak: {format_bytes(found.peak_bytes)} in {phase}"
    if block is None:
        return told
    where = " ".join(part for part in (block.module and f"in {block.module}", _line(block.source)) if part)
    return f"{told}, when {block.op} makes {format_bytes(block.num_bytes)} {where}".rstrip()


def _line(source: Any) -> str:
    return f"({place(source)})" if source is not None else ""


def header() -> str:
    """Above rows of options."""
    return f"{'one setting changed':{_WIDTH}}{'peak':>10}{'saved':>8}{'time':>8}  {'FLOPs':>6}"


def row(option: Option, base: Forecast) -> str:
    """One option against the step as it is."""
    saved = 1 - option.peak_bytes / base.peak_bytes
    name = " + ".join(switch.text for switch in option.switches)
    told = f"{name:{_WIDTH}}{format_bytes(option.peak_bytes):>10}{saved:>8.0%}{option.slowdown - 1:>+8.0%}"
    return f"{told}  {option.extra_flops:>+6.0%}" + (f"  {option.changes}" if option.changes else "")


def line(option: Option) -> str:
    """One option as a sentence."""
    name = " + ".join(switch.text for switch in option.switches)
    told = f"{name}  → {format_bytes(option.peak_bytes)}, estimated time {option.slowdown - 1:+.0%} a step"
    return told + (f" ({option.changes})" if option.changes else "")


def lines(switches: Sequence[Switch]) -> str:
    """The switches as a piece of a config."""
    tree: dict[str, Any] = {}
    for switch in switches:
        for key, value in switch.settings.items():
            *sections, last = key.split(".")
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False).rstrip()
