"""L508: what torch.compile keeps doing again, and where it gives up."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from safetrain.findings import Finding, SourceLine
from safetrain.rules.loop.catalogue import (
    RECOMPILES,
    line_of,
    text_of,
)
from safetrain.source import USER, grade


@dataclass(slots=True)
class CompileCounts:
    """What torch.compile has done so far."""

    compiled: dict[tuple[str, int, str], int] = field(default_factory=dict)
    """How often each code object was compiled: (file, first line, name)."""
    reasons: dict[tuple[str, int, str], str] = field(default_factory=dict)
    breaks: list[tuple[str, SourceLine | None]] = field(default_factory=list)
    limit_hit: bool = False

    def since(self, before: CompileCounts) -> CompileCounts:
        """What came after `before` was read: the counters are the process's, which may have run other models."""
        compiled = {key: times - before.compiled.get(key, 0) for key, times in self.compiled.items()}
        return CompileCounts(
            compiled={key: times for key, times in compiled.items() if times > 0},
            reasons=self.reasons,
            breaks=self.breaks[len(before.breaks) :],
            limit_hit=self.limit_hit and not before.limit_hit,
        )


def read_compile_counts() -> CompileCounts | None:
    """Read dynamo's own counters; None when nothing was compiled. No import, no host sync."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.counters["frames"].get("total"):
        return None
    counts = CompileCounts()
    for metric in utils.get_compilation_metrics():
        key = (metric.co_filename, metric.co_firstlineno, metric.co_name)
        if key[0] is None or "torch_dynamo_resume" in str(key[2]):
            continue
        counts.compiled[key] = counts.compiled.get(key, 0) + 1
        if getattr(metric, "recompile_reason", None):
            counts.reasons[key] = str(metric.recompile_reason)
    for reason in utils.graph_break_reasons:
        line = next(
            (
                SourceLine(f.filename, f.lineno or 0, f.line or "")
                for f in reversed(reason.user_stack)
                if grade(f.filename) == USER
            ),
            None,
        )
        if line is not None:
            counts.breaks.append((reason.reason, line))
    counts.limit_hit = any(
        "recompile_limit" in str(k) or "cache_size_limit" in str(k) for k in utils.counters["unimplemented"]
    )
    return counts


_SYNCS = (
    "generic_jump",
    "item",
    "tolist",
    "numpy",
    "data-dependent",
    "data dependent",
    "scalar",
    "_local_scalar_dense",
    "bool",
)


def find_compile_trouble(counts: CompileCounts, *, recompiles: int = 5) -> list[Finding]:
    """L508: graph breaks in the user's code (a warning where a number is read from a tensor, else a note), and code
    objects that were compiled more than `recompiles` times, or given up.
    """
    findings = []
    for reason, source in dict.fromkeys(counts.breaks):
        short = reason.strip().splitlines()[0][:160]
        sync = any(word in reason for word in _SYNCS)
        findings.append(
            RECOMPILES.finding(
                f"graph break at {line_of(source)}: {short}. The compiled graph ends here and starts again "
                "after it, in every call" + (", and the device waits for the number." if sync else "."),
                severity="warning" if sync else "note",
                source=text_of(source),
                op="item" if "item" in reason else None,
                cause=f"graph break: {short}",
                fix="return x.detach() and read it outside the compiled code"
                if sync
                else "move it out of the compiled code",
            )
        )
    for (file, line, name), times in counts.compiled.items():
        if times <= recompiles and not counts.limit_hit:
            continue
        if times < 3:
            continue
        reason = counts.reasons.get((file, line, name), "")
        findings.append(
            RECOMPILES.finding(
                f"`{name}` was compiled {times} times"
                + (" and is now run uncompiled" if counts.limit_hit else "")
                + (f"; last reason: {reason.strip().splitlines()[-1][:160]}" if reason.strip() else "")
                + ". Each time costs seconds.",
                source=text_of(SourceLine(file, line)) if grade(file) == USER else None,
                op=name,
                cause=reason.strip()[:300] or "guards fail from call to call",
                fix="torch.compile(dynamic=True), or keep changing shapes and Python values out of the compiled code",
            )
        )
    return findings
