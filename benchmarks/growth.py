"""Does the guard over memory see slow leaks, and does it leave innocent programs in peace? One child process each.

    python benchmarks/growth.py [--leaks] [--innocents] [NAME …]     # both kinds, all programs, unless said otherwise

A leak must be told within 200 steps (400 where it is of Python's small objects only) by its holder and its line; an
innocent program of 2,000 steps by nothing.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

INNOCENT_STEPS = 2000


def run(name: str, steps: int) -> dict[str, Any]:
    """What a program's run in a fresh process found: `findings`, the steps made, the bytes it grew by a step."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def leak_line(kind: type) -> int:
    """The line of the program that ends with `# leak`."""
    lines, first = inspect.getsourcelines(getattr(kind, "source", kind))
    (found,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# leak")]
    return found


def judge_leak(kind: Any, result: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """`caught`, or what is wrong; and the finding."""
    alarms = [f for f in result["findings"] if f["code"][0] == "M"]
    if not alarms:
        return "MISSED", None
    finding = alarms[0]
    line = (finding["source"] or {}).get("line")
    if kind.holder not in (finding["holder"] or ""):
        return "WRONG HOLDER", finding
    return ("caught" if line == leak_line(kind) else f"WRONG LINE {line}"), finding


def measure_leak(name: str) -> bool:
    """Run a leak and print its row."""
    kind = _programs()[name]
    verdict, finding = judge_leak(kind, run(name, kind.steps))
    told = ""
    if finding is not None:
        rate = finding["growth_bytes_per_step"] or 0
        told = f"{finding['code']} | {finding['severity']} | {finding['first_step']} | {rate / 1000:.1f}"
    print(f"| {name} | {verdict} | {told or ' | | |'} |", flush=True)
    return verdict == "caught"


def measure_innocent(name: str) -> bool:
    """Run an innocent program and print its row."""
    result = run(name, INNOCENT_STEPS)
    alarms = [f"{f['code']}: {f['message']}" for f in result["findings"] if f["severity"] != "note"]
    notes = [f["code"] for f in result["findings"] if f["severity"] == "note"]
    print(f"| {name} | {'; '.join(alarms) or 'silent'} | {', '.join(notes)} | {result['steps']} |", flush=True)
    return not alarms


def child(name: str, steps: int) -> None:
    """Train one program here, and print what the guards found as one line of JSON."""
    import torch

    torch.set_num_threads(1)
    trainer, train, val = _programs()[name].make(steps)
    trainer.fit(train, val)
    findings = [json.loads(f.to_json()) for f in trainer.report.findings]
    print("\n" + json.dumps({"findings": findings, "steps": trainer.state.step}))


def _programs() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    return {**importlib.import_module("growth_leaks").LEAKS, **importlib.import_module("growth_innocents").INNOCENTS}


def main() -> int:
    """Print the tables; 1 when a leak was missed or an innocent program accused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--leaks", action="store_true", help="the leaks only")
    parser.add_argument("--innocents", action="store_true", help="the innocent programs only")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=200, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.steps)
        return 0
    programs = _programs()
    leaks = [n for n, kind in programs.items() if hasattr(kind, "holder") and kind.holder]
    both = args.leaks == args.innocents
    wanted = [name for name in programs if not args.names or name in args.names]
    good: list[bool] = []
    if args.leaks or both:
        print("| leak | verdict | code | severity | step | kB a step |\n|---|---|---|---|---|---|")
        good += [measure_leak(name) for name in wanted if name in leaks]
    if args.innocents or both:
        print("| innocent program | alarms | notes | steps |\n|---|---|---|---|")
        good += [measure_innocent(name) for name in wanted if name not in leaks]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
