"""The command line. Importing this file imports neither torch nor pydantic: `--help` answers at once.

A verb is an entry of `VERBS`: a name, one line of help, a function that runs it and returns the exit code, and one that
declares its arguments; or a module whose `main(argv)` reads the words after it itself. Verbs import what they need when
they run.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.errors import CheckpointError, ConfigError, SafetrainError

if TYPE_CHECKING:
    from safetrain.commands.summary import RunNotes
    from safetrain.config import Config
    from safetrain.config.build import Job

EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Done; a check said no, or code of the user's raised; we refused, with one clear message; interrupted.

A run that saved and ended because of a signal answers 128 plus its number, as shells do: 130 for Ctrl-C, too.
"""


@dataclass(frozen=True, slots=True)
class Verb:
    """One word of the command line."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    declare: Callable[[argparse.ArgumentParser], None] | None = None
    takes_overrides: bool = False
    """Whether `key.sub=value` may follow, mixed with the options."""


@dataclass(frozen=True, slots=True)
class ModuleVerb:
    """One word of the command line that a module of its own answers: what follows may be a script's arguments."""

    name: str
    help: str
    module: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = next((verb for verb in VERBS if isinstance(verb, ModuleVerb) and words[:1] == [verb.name]), None)
    if own is not None:
        return _reported(own.name, False, lambda: importlib.import_module(own.module).main(words[1:]))
    parser = _parser()
    args, rest = parser.parse_known_args(words)
    verb: Verb | None = getattr(args, "verb", None)
    if verb is None:
        if rest:
            parser.error(f"no option {rest[0]}")
        parser.print_help()
        return EXIT_OK

    def run(verb: Verb = verb) -> int:
        _take_overrides(args, rest, verb, parser)
        return verb.run(args)

    return _reported(verb.name, args.traceback, run)


def _reported(name: str, show_traceback: bool, run: Callable[[], int]) -> int:
    """The exit code of `run`; an error of ours becomes one message."""
    try:
        return run()
    except SafetrainError as error:
        if show_traceback:
            traceback.print_exc()
        else:
            print(f"safetrain {name}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # `… | head` has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m safetrain",
        description="Train with PyTorch, exactly, and be told which line is wrong.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=18),
    )
    parser.set_defaults(traceback=False)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    for verb in VERBS:
        sub = verbs.add_parser(
            verb.name, help=verb.help, description=verb.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if isinstance(verb, Verb):
            sub.add_argument("--traceback", action="store_true", help="show where an error was raised")
            sub.set_defaults(verb=verb)
            if verb.declare is not None:
                verb.declare(sub)
    return parser


def _take_overrides(args: argparse.Namespace, rest: list[str], verb: Verb, parser: argparse.ArgumentParser) -> None:
    """Overrides may stand before, between and after options, which argparse alone cannot tell apart."""
    for word in rest:
        if not verb.takes_overrides:
            parser.error(f"{verb.name} does not understand {word}")
        if word.startswith("-"):
            key = word.lstrip("-")
            if "=" in key:
                raise ConfigError(f"no option {word}; settings are written without dashes: {key}")
            raise ConfigError(
                f"no option {word}; `python -m safetrain {verb.name} --help` lists them, settings are written "
                "key.sub=value"
            )
        args.overrides.append(word)


# ---------------------------------------------------------------------------------------------- run and resume


def _declare_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a config, e.g. examples/configs/digits.yaml")
    parser.add_argument(
        "overrides",
        metavar="key.sub=value",
        nargs="*",
        default=[],  # without it argparse says that one is required
        help="settings that replace those of the file, e.g. optim.lr=1e-3",
    )


def _declare_run(parser: argparse.ArgumentParser) -> None:
    _declare_config(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="one training window, one evaluation batch, one save and load; leaves nothing behind",
    )


def _run(args: argparse.Namespace) -> int:
    from safetrain.commands import run_dir
    from safetrain.config import file as config_file

    config = config_file.load(args.file, args.overrides)
    if args.dry_run:
        return _dry_run(config)
    folder = run_dir.choose(config, Path(args.file).stem)
    job, notes = _build(config, folder)
    return _fit(job, notes, folder, resume=None)


def _dry_run(config: Config) -> int:
    job, notes = _build(config, None)
    numbers: dict[str, float] = {}
    code = _guarded(job, notes, lambda: numbers.update(job.trainer.dry_run(job.train, job.val)))
    if code == EXIT_OK:
        told = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        print(
            f"dry run: one training window, one evaluation batch, saving and loading went well ({told}); nothing "
            "was kept"
        )
    return code


def _declare_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run; it goes on from its latest checkpoint")
    parser.add_argument(
        "overrides",
        metavar="key.sub=value",
        nargs="*",
        default=[],
        help="settings that change from here on, e.g. loop.max_steps=2000",
    )


def _resume(args: argparse.Namespace) -> int:
    from safetrain.commands import run_dir
    from safetrain.config import file as config_file

    folder = Path(args.run_dir)
    config = config_file.load(run_dir.config_of(folder), args.overrides)
    job, notes = _build(config, folder)
    _check_resumable(folder)
    return _fit(job, notes, folder, resume=folder)


def _check_resumable(folder: Path) -> None:
    from safetrain.checkpoint.files import latest

    try:
        latest(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; start again with `python -m safetrain run {shlex.quote(str(folder / 'config.yaml'))} run_dir=…`"
        ) from error


def _build(config: Config, folder: Path | None) -> tuple[Job, RunNotes]:
    from safetrain.commands.run_dir import Record
    from safetrain.commands.summary import RunNotes
    from safetrain.config.build import build

    notes = RunNotes()
    return build(config, folder, [notes], first=[Record(config)]), notes


def _fit(job: Job, notes: RunNotes, folder: Path, resume: Path | None) -> int:
    trainer = job.trainer
    print(
        f"{'resuming' if resume else 'training'} {type(trainer).__name__} on {trainer.device} in {folder}", flush=True
    )
    code = _guarded(job, notes, lambda: trainer.fit(job.train, job.val, resume=resume))
    if code not in (EXIT_FAILED, EXIT_REFUSED):
        print(notes.summary(trainer.state, trainer.report.findings))
    return code


def _guarded(job: Job, notes: RunNotes, call: Callable[[], object]) -> int:
    """Run it; an error of the user's code is shown with its traceback and then in words."""
    try:
        call()
    except KeyboardInterrupt:
        print(f"\ninterrupted after step {job.trainer.state.step}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SafetrainError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        print(f"\nsafetrain: {notes.failure or f'{type(error).__name__}: {error}'}", file=sys.stderr)
        return EXIT_FAILED
    # A run that a signal ended is saved, but whoever waits for it must not take it as done.
    ended_by = (job.trainer.state.stop_reason or "").removeprefix("signal ")
    return 128 + signal.Signals[ended_by] if ended_by in signal.Signals.__members__ else EXIT_OK


# ---------------------------------------------------------------------------------------------- configs


def _validate(args: argparse.Namespace) -> int:
    from safetrain.config import file as config_file
    from safetrain.config.build import build

    build(config_file.load(args.file, args.overrides))
    print(f"{args.file}: the config is right; model, data, optimizers and listeners can be built")
    return EXIT_OK


def _declare_config_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a config to print as it is resolved; without one, all settings are explained",
    )
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace those of the file")
    parser.format_help = _config_help(parser.format_help)  # type: ignore[method-assign]


def _config_help(usage: Callable[[], str]) -> Callable[[], str]:
    def with_fields() -> str:
        from safetrain.config.help import fields_help

        return f"{usage()}\nsettings:\n\n{fields_help()}\n"

    return with_fields


def _config(args: argparse.Namespace) -> int:
    from safetrain.config import file as config_file
    from safetrain.config.help import fields_help

    print(
        fields_help() if args.file is None else config_file.dump(config_file.load(args.file, args.overrides)).rstrip()
    )
    return EXIT_OK


def _schema(args: argparse.Namespace) -> int:
    from safetrain.config.help import schema

    print(schema())
    return EXIT_OK


# ---------------------------------------------------------------------------------------------- checks and rules


def _declare_verify_resume(parser: argparse.ArgumentParser) -> None:
    _declare_config(parser)
    parser.add_argument(
        "--at", metavar="STEP", type=int, required=True, help="the step after which the run is stopped and resumed"
    )


def _verify_resume(args: argparse.Namespace) -> int:
    from safetrain.commands.verify_resume import verify
    from safetrain.config import file as config_file

    report = verify(config_file.load(args.file, args.overrides), args.at)
    print(report)
    return EXIT_OK if report.exact else EXIT_FAILED


def _declare_memory(parser: argparse.ArgumentParser) -> None:
    _declare_config(parser)
    parser.add_argument(
        "--step", metavar="N", type=int, default=3, help="the step to watch (default 3: all is made by then)"
    )
    parser.add_argument(
        "--html", metavar="FILE", default="memory.html", help="where the page goes (default memory.html)"
    )
    parser.add_argument(
        "--snapshot",
        metavar="FILE",
        nargs="?",
        const="snapshot.pickle",
        help="on CUDA, also write the allocator's history for https://pytorch.org/memory_viz (default snapshot.pickle)",
    )


def _memory(args: argparse.Namespace) -> int:
    from safetrain.accounting.page import page
    from safetrain.accounting.report import table
    from safetrain.commands.memory import measure
    from safetrain.config import file as config_file

    if args.step < 1:
        raise ConfigError(f"--step {args.step}: steps are counted from 1")
    snapshot = Path(args.snapshot) if args.snapshot is not None else None
    memory = measure(config_file.load(args.file, args.overrides), args.step, snapshot)
    print(table(memory))
    try:
        Path(args.html).write_text(page(memory, f"Memory of step {memory.step} of {args.file}"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {args.html}: cannot be written: {error.strerror or error}") from error
    print(f"\nthe same with a timeline: {args.html}")
    if snapshot is not None:
        print(f"what the allocator did, to be dropped on https://pytorch.org/memory_viz: {snapshot}")
    return EXIT_OK


def _declare_plan(parser: argparse.ArgumentParser) -> None:
    _declare_config(parser)
    parser.add_argument("--budget", metavar="SIZE", help="find the fastest settings that fit, e.g. 24GB or 512MiB")


def _plan(args: argparse.Namespace) -> int:
    from safetrain.commands.plan import plan
    from safetrain.config import file as config_file
    from safetrain.sizes import parse_bytes

    budget = None if args.budget is None else parse_bytes(args.budget, "--budget")
    fits = plan(config_file.load(args.file, args.overrides), budget, functools.partial(print, flush=True))
    return EXIT_OK if fits else EXIT_FAILED


def _declare_bisect(parser: argparse.ArgumentParser) -> None:
    _declare_config(parser)
    parser.add_argument(
        "--steps", metavar="K", type=int, default=200, help="steps of each run (default 200); more see slower growth"
    )


def _bisect(args: argparse.Namespace) -> int:
    from safetrain.commands.bisect import bisect
    from safetrain.config import file as config_file

    report = bisect(config_file.load(args.file, args.overrides), args.steps, lambda line: print(line, flush=True))
    print(f"\n{report}")
    return EXIT_FAILED if report.grows else EXIT_OK


def _rules(args: argparse.Namespace) -> int:
    import safetrain.rules  # noqa: F401  (fills the catalogue)
    from safetrain.findings import RULES

    for rule in sorted(RULES.values(), key=lambda rule: rule.code):
        print(f"{rule.code}  {rule.name:<28} {rule.severity:<8} {rule.summary}")
    return EXIT_OK


def _declare_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a rule's code or name, e.g. G101 or graph-retained")


def _explain(args: argparse.Namespace) -> int:
    import safetrain.rules  # noqa: F401  (fills the catalogue)
    from safetrain.findings import RULES

    by_name = {rule.name: rule for rule in RULES.values()}
    rule = RULES.get(args.code.upper()) or by_name.get(args.code.lower())
    if rule is None:
        near = difflib.get_close_matches(args.code.upper(), RULES, n=1) or difflib.get_close_matches(
            args.code.lower(), by_name, n=1
        )
        hint = f"did you mean {near[0]}?" if near else "`python -m safetrain rules` lists them"
        raise ConfigError(f"no rule {args.code}; {hint}")
    page = next((page for folder in _rule_pages() if (page := folder / f"{rule.code}.md").is_file()), None)
    print(
        page.read_text(encoding="utf-8").rstrip()
        if page
        else f"{rule.code} {rule.name} ({rule.severity}): {rule.summary}"
    )
    return EXIT_OK


def _rule_pages() -> list[Path]:
    """Inside an installed package, or in a checkout."""
    package = Path(__file__).parent
    return [package / "rule_pages", package.parent / "docs" / "rules"]


VERBS: tuple[Verb | ModuleVerb, ...] = (
    Verb("run", "train what a config describes", _run, _declare_run, takes_overrides=True),
    Verb("resume", "go on with a run from its latest checkpoint", _resume, _declare_resume, takes_overrides=True),
    Verb(
        "validate",
        "build everything a config names, without training",
        _validate,
        _declare_config,
        takes_overrides=True,
    ),
    Verb(
        "config",
        "explain every setting, or print a config as it is resolved",
        _config,
        _declare_config_verb,
        takes_overrides=True,
    ),
    Verb("schema", "print the JSON schema of configs, for editors", _schema),
    Verb(
        "verify-resume",
        "prove that a run stopped and resumed equals one that was not",
        _verify_resume,
        _declare_verify_resume,
        takes_overrides=True,
    ),
    Verb(
        "memory",
        "show whose the bytes of a training step are: a table, and a page with the timeline",
        _memory,
        _declare_memory,
        takes_overrides=True,
    ),
    Verb(
        "plan",
        "forecast the memory of a training step, and find the settings that fit a budget; nothing is trained",
        _plan,
        _declare_plan,
        takes_overrides=True,
    ),
    Verb(
        "bisect",
        "find the part of a run that makes memory grow, by running it with parts switched off",
        _bisect,
        _declare_bisect,
        takes_overrides=True,
    ),
    ModuleVerb(
        "doctor", "run a training script of yours as it is and report what is wrong with it", "safetrain.doctor"
    ),
    Verb("rules", "list the rules that watch a run", _rules),
    Verb("explain", "explain a rule", _explain, _declare_explain),
)
