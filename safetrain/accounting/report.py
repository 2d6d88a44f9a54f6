"""The memory of a step as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from safetrain.accounting.ownership import OWNERS, Block, StepMemory, place
from safetrain.graph import format_bytes

_ROWS = 8


def table(memory: StepMemory) -> str:
    """Bytes by owner at each phase and at the peak, the peak's cause, activations by module, the biggest tensors."""
    parts = [
        f"memory of step {memory.step} on {memory.device}",
        _owners(memory),
        cause(memory),
        check(memory),
        _ranking("activations by module, at the end of forward", memory.activations_by("module")),
        _ranking("activations by line", memory.activations_by("line")),
        _biggest(memory),
    ]
    return "\n\n".join(part for part in parts if part)


def cause(memory: StepMemory) -> str:
    """What made the peak, in a sentence."""
    told = f"peak: {format_bytes(memory.peak_bytes)} of tensors, in {memory.phase_of(memory.peak_clock)}"
    block = memory.peak_block
    if block is None:
        return f"{told}, at its start"
    return f"{told}, when {block.op} made {format_bytes(block.num_bytes)}{_where(block)}"


def check(memory: StepMemory) -> str:
    """How well the owners add up to the meter, in a sentence."""
    grown = memory.accounted_growth()
    step = "" if grown is None else f"; of what the step itself added, tensors are {grown:.1%}"
    return (
        f"the meter ({memory.meter}) read {format_bytes(memory.used_at_peak)} there, and the owners add up to "
        f"{memory.accounted:.1%} of it{step}"
    )


def _where(block: Block) -> str:
    module = f" in {block.module}" if block.module else ""
    line = place(block.source)
    return f"{module} ({line})" if line else module


def _owners(memory: StepMemory) -> str:
    moments = {
        "start": 0,
        **{f"after {name}": clock for name, clock in memory.phases.items()},
        "peak": memory.peak_clock,
    }
    columns = [memory.owners_at(clock) for clock in moments.values()]
    width = max(map(len, moments)) + 2
    lines = [f"{'':16}" + "".join(name.rjust(width) for name in moments)]
    for owner in OWNERS:
        if any(column[owner] for column in columns):
            lines.append(f"{owner:16}" + "".join(format_bytes(column[owner]).rjust(width) for column in columns))
    lines.append(f"{'all tensors':16}" + "".join(format_bytes(sum(c.values())).rjust(width) for c in columns))
    lines.append(f"{'everything else':16}" + format_bytes(memory.other_bytes).rjust(width))
    return "\n".join(lines)


def _ranking(title: str, values: Mapping[str, int]) -> str:
    if not values:
        return ""
    lines = [f"{format_bytes(size):>10}  {name}" for name, size in list(values.items())[:_ROWS]]
    rest = sum(list(values.values())[_ROWS:])
    return "\n".join([title, *lines, *([f"{format_bytes(rest):>10}  in {len(values) - _ROWS} more"] if rest else [])])


def _biggest(memory: StepMemory) -> str:
    lines = ["biggest tensors at the peak"]
    for block in memory.alive_at(memory.peak_clock)[:_ROWS]:
        lines.append(f"{format_bytes(block.num_bytes):>10}  {describe_block(block)}")
    return "\n".join(lines)


def describe_block(block: Block) -> str:
    """`activations [64, 32, 8, 8] of conv1 (digits.py:58: …)`."""
    what = f"{block.owner} {list(block.shape)} {block.dtype.removeprefix('torch.')}"
    if block.holder:
        return f"{what}, {block.holder}"
    return what + _where(block)
