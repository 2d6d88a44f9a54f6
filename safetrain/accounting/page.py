"""The memory of a step as one HTML page that needs nothing else: timeline by owner, activations, biggest tensors."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

from safetrain.accounting.ownership import OWNERS, StepMemory, place
from safetrain.accounting.report import cause, check
from safetrain.graph import format_bytes

_COLOURS = dict(
    zip(
        OWNERS,
        ("#4269d0", "#6cc5b0", "#9498a0", "#a463f2", "#3ca951", "#efb118", "#ff725c", "#97bbf5"),
        strict=True,
    )
)
_WIDTH, _HEIGHT = 960, 320
_TOP = 16
"""Room above the highest point, for the label of the peak."""
_LETTER = 7
"""Width of a letter of a label."""
_MAX_POINTS = 320
_BIGGEST = 30
_BARS = 24

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8886; --soft: #8882; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1.05rem; margin-top: 2.2rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--soft); }}
th:first-child, td:first-child, td.text, th.text {{ text-align: left; }}
td.text {{ overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; }}
.swatch {{ display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }}
.bar {{ display: grid; grid-template-columns: minmax(8rem, 22rem) 1fr 6rem; gap: .6rem; align-items: center; }}
.bar.wide {{ grid-template-columns: minmax(8rem, 36rem) 1fr 6rem; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }}
.note {{ opacity: .7; font-size: .9em; margin: .3rem 0; }}
.bar span:first-child {{ overflow-wrap: anywhere; }} .bar span:last-child {{ text-align: right; }}
.bar i {{ display: block; height: .8em; border-radius: 2px; background: #ff725c; }}
code {{ font-size: .9em; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: currentColor; font-size: 12px; }}
svg text.on {{ paint-order: stroke; stroke: Canvas; stroke-width: 3px; stroke-linejoin: round; }}
#at {{ min-height: 1.5em; font-variant-numeric: tabular-nums; }}
</style>
<h1>{title}</h1>
<p>{cause}</p>
<p>{check}</p>
<h2>Timeline of the step, stacked by owner</h2>
<svg id="time" viewBox="0 0 {width} {full}" role="img" aria-label="bytes of tensors over the step, stacked by owner">
{chart}
<line id="cursor" y1="0" y2="{height}" stroke="currentColor" visibility="hidden"/>
</svg>
<p class="note">From left to right: each time that a tensor is made or freed, not seconds.</p>
<div class="legend">{legend}</div>
<div id="at"></div>
<h2>Bytes by owner</h2>
<div class="scroll">{owners}</div>
<h2>Activations by module, at the end of forward</h2>
{modules}
<h2>Activations by line</h2>
{lines}
<h2>Biggest tensors at the peak</h2>
<div class="scroll">{biggest}</div>
<script>
const points = {points};
const svg = document.getElementById("time"), cursor = document.getElementById("cursor");
svg.addEventListener("pointermove", event => {{
  const box = svg.getBoundingClientRect();
  const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  const point = points[Math.round(share * (points.length - 1))];
  cursor.setAttribute("x1", share * {width}); cursor.setAttribute("x2", share * {width});
  cursor.setAttribute("visibility", "visible");
  document.getElementById("at").textContent = point;
}});
</script>
</html>
"""


def page(memory: StepMemory, title: str) -> str:
    """The whole page."""
    moments = _moments(memory)
    columns = [memory.owners_at(clock) for clock in moments]
    return _PAGE.format(
        title=html.escape(title),
        cause=html.escape(cause(memory)),
        check=html.escape(check(memory)),
        width=_WIDTH,
        height=_HEIGHT,
        full=_HEIGHT + 24,
        chart=_chart(memory, moments, columns),
        legend=_legend(columns),
        owners=_owner_table(memory),
        modules=_bars(memory.activations_by("module")),
        lines=_bars(memory.activations_by("line"), "bar wide"),
        biggest=_biggest_table(memory),
        points=json.dumps([_in_words(memory, clock, column) for clock, column in zip(moments, columns, strict=True)]),
    )


def _moments(memory: StepMemory) -> list[int]:
    """Clocks to draw: the fullest of each stretch, so that no peak is lost, the peak and the ends among them."""
    change: dict[int, int] = {}
    for block in memory.blocks:
        change[block.born] = change.get(block.born, 0) + block.num_bytes
        if block.died is not None:
            change[block.died] = change.get(block.died, 0) - block.num_bytes
    total, totals = 0, []
    for clock in range(memory.clock + 1):
        total += change.get(clock, 0)
        totals.append(total)
    stretch = max(1, len(totals) // _MAX_POINTS)
    fullest = {
        max(range(i, min(i + stretch, len(totals))), key=totals.__getitem__) for i in range(0, len(totals), stretch)
    }
    return sorted(fullest | {0, memory.clock, memory.peak_clock})


def _chart(memory: StepMemory, moments: Sequence[int], columns: Sequence[Mapping[str, int]]) -> str:
    top = max(memory.peak_bytes, 1) * _HEIGHT / (_HEIGHT - _TOP)
    xs = [_x(clock, memory) for clock in moments]
    shapes = []
    floor = [0.0] * len(moments)
    for owner in OWNERS:
        ceiling = [low + column[owner] for low, column in zip(floor, columns, strict=True)]
        edge = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        points = " ".join(f"{x:.1f},{_HEIGHT * (1 - value / top):.1f}" for x, value in edge)
        shapes.append(f'<polygon points="{points}" fill="{_COLOURS[owner]}"><title>{owner}</title></polygon>')
        floor = ceiling
    shapes += _scale(top)
    shapes += _phases(memory)
    peak = _x(memory.peak_clock, memory)
    anchor = "end" if peak > _WIDTH / 2 else "start"
    shapes.append(f'<line x1="{peak:.1f}" x2="{peak:.1f}" y1="0" y2="{_HEIGHT}" stroke="currentColor"/>')
    label = f"peak {format_bytes(memory.peak_bytes)}"
    shapes.append(
        f'<text class="on" x="{peak + (-6 if anchor == "end" else 6):.1f}" y="13" text-anchor="{anchor}">{label}</text>'
    )
    return "\n".join(shapes)


def _scale(top: float) -> list[str]:
    """Lines at round numbers of bytes, three to seven of them."""
    step = 10.0 ** math.floor(math.log10(top / 2))
    step *= next(factor for factor in (1, 2, 5) if top / (step * factor) <= 7)
    shapes = []
    for i in range(1, int(top / step) + 1):
        y = _HEIGHT * (1 - i * step / top)
        shapes.append(f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        shapes.append(f'<text class="on" x="4" y="{y - 3:.1f}">{format_bytes(i * step)}</text>')
    return shapes


def _phases(memory: StepMemory) -> list[str]:
    """The end of each phase, with its name in the middle of it where there is room."""
    shapes, start = [], 0.0
    for name, clock in memory.phases.items():
        end = _x(clock, memory)
        shapes.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{_HEIGHT}" stroke="var(--line)"/>')
        fits = end - start > _LETTER * len(name)
        x, anchor = ((start + end) / 2, "middle") if fits else (end - 4, "end")
        shapes.append(f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{name}</text>')
        start = end
    return shapes


def _legend(columns: Sequence[Mapping[str, int]]) -> str:
    """The owners that occur, the uppermost in the chart first."""
    return "".join(
        f"<span>{_swatch(owner)}{owner}</span>"
        for owner in reversed(OWNERS)
        if any(column[owner] for column in columns)
    )


def _swatch(owner: str) -> str:
    return f'<span class="swatch" style="background:{_COLOURS[owner]}"></span>'


def _x(clock: int, memory: StepMemory) -> float:
    return _WIDTH * clock / max(1, memory.clock)


def _in_words(memory: StepMemory, clock: int, column: Mapping[str, int]) -> str:
    owners = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in column.items() if size)
    return f"{memory.phase_of(clock)}: {format_bytes(sum(column.values()))} ({owners})"


def _owner_table(memory: StepMemory) -> str:
    moments = {"start": 0, **{f"after {n}": clock for n, clock in memory.phases.items()}, "peak": memory.peak_clock}
    columns = [memory.owners_at(clock) for clock in moments.values()]
    rows = ["<tr><th></th>" + "".join(f"<th>{name}</th>" for name in moments) + "</tr>"]
    for owner in OWNERS:
        cells = "".join(f"<td>{format_bytes(column[owner])}</td>" for column in columns)
        rows.append(f"<tr><td>{_swatch(owner)}{owner}</td>{cells}</tr>")
    totals = "".join(f"<td>{format_bytes(sum(column.values()))}</td>" for column in columns)
    rows.append(f"<tr><td>all tensors</td>{totals}</tr>")
    other = f"<td>{format_bytes(memory.other_bytes)}</td>" + "<td></td>" * (len(columns) - 1)
    rows.append(f"<tr><td>everything else ({html.escape(memory.meter)})</td>{other}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _bars(values: Mapping[str, int], classes: str = "bar") -> str:
    if not values:
        return "<p>None.</p>"
    most = max(values.values())
    bars = [
        f'<div class="{classes}"><span><code>{html.escape(name)}</code></span>'
        f'<i style="width:{100 * size / most:.1f}%"></i><span>{format_bytes(size)}</span></div>'
        for name, size in list(values.items())[:_BARS]
    ]
    rest = len(values) - _BARS
    return "\n".join(bars) + (f"<p>and {rest} smaller ones</p>" if rest > 0 else "")


def _biggest_table(memory: StepMemory) -> str:
    heads = ("size", "owner", "shape", "made by", "module", "line or holder")
    rows = [
        "<tr>" + "".join(f'<th class="{"text" if i > 1 else ""}">{head}</th>' for i, head in enumerate(heads)) + "</tr>"
    ]
    for block in memory.alive_at(memory.peak_clock)[:_BIGGEST]:
        shape = f"{list(block.shape)} {block.dtype.removeprefix('torch.')}"
        where = block.holder or place(block.source)
        texts = (shape, block.op or "before the step", block.module, where)
        rows.append(
            f"<tr><td>{format_bytes(block.num_bytes)}</td><td>{block.owner}</td>"
            + "".join(f'<td class="text">{html.escape(text)}</td>' for text in texts)
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"
