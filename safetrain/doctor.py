"""`python -m safetrain doctor script.py args…`: run a training script as itself and report what the guards find.

The script's results, output, arguments and exit code stay its own; the report goes to stderr and to `--json FILE`.
Watching starts when the script has imported torch, so whatever it sets up before that still counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import os
import re
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from safetrain.errors import ConfigError
from safetrain.foreign import launch

if TYPE_CHECKING:
    from safetrain.findings import Finding
    from safetrain.foreign.watching import Watch

_LEVELS = ("note", "warning", "error")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    json: Path | None = None
    steps: int | None = None
    fail_on: str | None = None
    rules: tuple[str, ...] = ()
    quiet: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the script's exit code, or 1 when that was 0 and `--fail-on` was met."""
    options, make_target = _parse(list(sys.argv[1:] if argv is None else argv))
    target = make_target()
    session = Session(options, sys.stderr)
    session.start()
    code, interrupted = session.run(target)
    if interrupted is not None:
        # Python then ends as it does for any script: by the signal, after the exit handlers. It was shown already.
        sys.excepthook = lambda *_: None
        raise interrupted
    return code


def _parse(argv: list[str]) -> tuple[Options, Callable[[], launch.Target]]:
    parser = argparse.ArgumentParser(
        prog="python -m safetrain doctor",
        description="Run a training script as it is, and report the faults of its training.",
        epilog="All after the script is its own. The report goes to stderr; stdout and exit code are the script's.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the findings there, one JSON object a line"
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="stop after N optimizer steps")
    parser.add_argument(
        "--fail-on", choices=_LEVELS, help="exit with 1 when there is a finding of this severity or worse"
    )
    parser.add_argument(
        "--rules",
        type=_rules,
        default=(),
        metavar="CODES",
        help="only these, e.g. G,P201 (a letter takes a family, -G104 leaves one out)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, and no report when nothing was found")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="script.py …", help="the script and its own arguments"
    )
    args = parser.parse_args(argv)
    words = args.module if args.module is not None else args.script
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser.error("which script? python -m safetrain doctor train.py --its --arguments")
    json, quiet = args.json and args.json.absolute(), args.quiet
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # under torchrun each process has a report of its own; only the first one talks
        json, quiet = json and json.with_name(f"{json.stem}.rank{rank}{json.suffix}"), True
    options = Options(json, args.steps, args.fail_on, args.rules, quiet)
    make = launch.module if args.module is not None else launch.script
    return options, lambda: make(words[0], words[1:])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return int(text)


def _rules(text: str) -> tuple[str, ...]:
    words = tuple(word.strip().upper() for word in text.split(",") if word.strip())
    for word in words:
        if not re.fullmatch(r"-?[A-Z]\d{0,3}", word):
            raise argparse.ArgumentTypeError(f"{word!r} is neither a rule such as G101 nor a family such as G")
    return words


class Session:
    """One diagnosis: attaches when torch comes up, reports once however the script ends."""

    def __init__(self, options: Options, stream: TextIO) -> None:
        self.options = options
        self.stream = stream
        self.watch: Watch | None = None
        self._pid = os.getpid()
        self._reported = False
        self._progress: _Progress | None = None
        self._refusal = ""
        self._trouble: list[str] = []
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ before and after the script

    def start(self) -> None:
        """Wait for torch, and be ready for an end that comes without an exception."""
        if self.options.json is not None:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text("", encoding="utf-8")
        if "torch" in sys.modules:
            self._attach()
        else:
            hook = _WhenImported("torch", self._attach)
            sys.meta_path.insert(0, hook)
            self._undo.append(lambda: sys.meta_path.remove(hook) if hook in sys.meta_path else None)
        self._on_exit_without_goodbye()
        self._on_termination()

    def _attach(self) -> None:
        """Runs inside the script's own `import torch`, which must not fail for us."""
        try:
            self._start_watching()
        except ConfigError as error:
            self._refusal = f"safetrain doctor: {error}"
            raise SystemExit(2) from None
        except Exception:
            self._trouble.append(traceback.format_exc())

    def _start_watching(self) -> None:
        from safetrain.foreign.watching import Watch

        self._progress = _Progress(self.stream) if self.stream.isatty() and not self.options.quiet else None
        self.watch = Watch(
            self.options.rules,
            jsonl=self.options.json,
            max_steps=self.options.steps,
            show=None if self.options.quiet else self._announce,
            on_step=self._progress.step if self._progress is not None else None,
            on_trouble=self._trouble.append,
        )

    def _announce(self, finding: Finding) -> None:
        """One line as soon as it is known; the whole of it comes at the end."""
        if finding.severity == "note":
            return
        if self._progress is not None:
            self._progress.erase()
            self._progress.num_findings += 1
        where = f" at {finding.source.file}:{finding.source.line}" if finding.source else ""
        with contextlib.suppress(OSError, ValueError):
            print(
                f"safetrain: step {finding.first_step}: {finding.code} {finding.name}{where}",
                file=self.stream,
                flush=True,
            )

    def _on_exit_without_goodbye(self) -> None:
        """`os._exit` runs no handler at all; workers of the script use it, and must pass."""
        leave = os._exit

        def exit_now(status: int) -> None:
            if os.getpid() == self._pid:
                self.conclude()
            leave(status)

        os._exit = exit_now  # type: ignore[assignment]
        self._undo.append(lambda: setattr(os, "_exit", leave))

    def _on_termination(self) -> None:
        """A scheduler ends jobs with SIGTERM: report, then end by it."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return

        def terminated(number: int, frame: types.FrameType | None) -> None:
            if signal.getsignal(signal.SIGTERM) is not terminated:
                return  # called by a handler of the script's, which knows how to end it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                if os.getpid() == self._pid:
                    self.stream = _past_buffers(self.stream)
                    self._progress = None
                    self.conclude()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, terminated)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        self._undo.append(restore)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=restore)

    def run(self, target: launch.Target) -> tuple[int, BaseException | None]:
        """Run the script and report. Returns its exit code, and the interrupt that ended it, if one did."""
        code, interrupted = 0, None
        try:
            launch.execute(target)
            _join_threads()
        except SystemExit as stop:
            code = _exit_code(stop, self.stream)
        except KeyboardInterrupt as interrupt:
            handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever presses it again wants no report
            self.conclude()
            signal.signal(signal.SIGINT, handler)
            _show_traceback(interrupt)
            interrupted = interrupt
        except BaseException as error:
            if self.watch is not None:
                self.watch.observer.failed(error)
            self.conclude()
            _show_traceback(error)
            code = 1
        if os.getpid() != self._pid:
            return code, interrupted  # a child that came back out of the script by itself
        self.conclude()
        if code == 0 and self._fails():
            code = 1
        return code, interrupted

    def conclude(self) -> None:
        """Write the report, once."""
        if self._reported or os.getpid() != self._pid:
            return
        self._reported = True
        while self._undo:
            self._undo.pop()()
        if self.watch is not None:
            try:
                self.watch.finish()
            except Exception:
                self._trouble.append(traceback.format_exc())
        # Closed by the script, or a signal came in the middle of a write.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):  # the script has closed stderr
            self._print()

    def _fails(self) -> bool:
        if self.options.fail_on is None or self.watch is None:
            return False
        worst = _LEVELS.index(self.options.fail_on)
        return any(_LEVELS.index(finding.severity) >= worst for finding in self.watch.report.findings)

    def _print(self) -> None:
        from safetrain.terminal import Terminal

        if self._progress is not None:
            self._progress.erase()
        if self._refusal or self.watch is None:
            if self._refusal:
                print(self._refusal, file=self.stream)
            elif self._trouble:
                print(
                    f"safetrain: could not start to watch; the script did not notice.\n{self._trouble[0]}",
                    file=self.stream,
                )
            elif not self.options.quiet:
                print("safetrain: the script never imported torch, so there was nothing to watch", file=self.stream)
            return
        findings, steps = self.watch.report.findings, self.watch.observer.state.step
        if findings or not self.options.quiet:
            self.stream.write("\n")
            Terminal(self.stream).summary(findings, num_steps=steps, checked=self.watch.healthy(), full=True)
            if not steps:
                print(
                    "  no optimizer step was seen in this process (processes that it starts are not watched)",
                    file=self.stream,
                )
        for text in self._trouble:
            print(
                f"safetrain: one of its judges failed and was switched off; the script did not notice.\n{text}",
                file=self.stream,
            )
        self.stream.flush()


class _Progress:
    """A line on a terminal that says what is watched, now and then; never while another bar is drawn."""

    def __init__(self, stream: TextIO) -> None:
        self.num_findings = 0
        self._stream = stream
        self._next = time.monotonic() + 1.0
        self._shown = False

    def step(self, num_steps: int) -> None:
        """A step is done."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 2.0
        bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", None)
        if not bars:
            self._shown = True
            self._stream.write(f"\r\x1b[Ksafetrain: watching, step {num_steps}, {self.num_findings} found")
            self._stream.flush()

    def erase(self) -> None:
        """Take the line off."""
        if self._shown:
            self._shown = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls back once when a module has been imported, and is gone from the import path then."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual, with a loader that tells when it is done."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Told(spec.loader, self._then)
        return spec


class _Told(importlib.abc.Loader):
    def __init__(self, inner: Any, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """As the real loader does."""
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        """As the real loader does, whose place in the module's spec is given back first."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._then()


def _join_threads() -> None:
    """Python waits for these before it exits; so does the report."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _past_buffers(stream: TextIO) -> TextIO:
    """The same file without the stream's own buffer: a signal may have come in the middle of a write to that."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):
        return stream
    return open(descriptor, "w", encoding=stream.encoding, errors=stream.errors)


def _exit_code(stop: SystemExit, stream: TextIO) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=stream)
    return 1


def _show_traceback(error: BaseException) -> None:
    """As Python would, through the script's own hook if it set one, without our frames."""
    _strip(error, set())
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # a broken hook must not hide the error
        traceback.print_exc()


def _strip(error: BaseException | None, seen: set[int]) -> None:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_us(error.__traceback__)
        notes = getattr(error, "__notes__", None)
        if notes:  # the report has said it already
            notes[:] = [note for note in notes if not str(note).startswith("safetrain ")]
        _strip(error.__cause__, seen)
        error = error.__context__


def _without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            kept.append(tb)
        tb = tb.tb_next
    chain: types.TracebackType | None = None
    for link in reversed(kept):
        chain = types.TracebackType(chain, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return chain
