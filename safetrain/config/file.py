"""Reading a config: YAML, `key.sub=value` overrides, and messages that name the key, the fault and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from safetrain.config import Config
from safetrain.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, and a key given twice is an error: else the last would win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused below, with its place
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice; remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, wants a dot and a signed exponent: without this, `lr: 1e-4` is the string "1e-4".
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\.\d+([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises `ConfigError` that names `source` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file, apply `key.sub=value` overrides (values are YAML), and check it.

    A trainer given as a file comes back as an absolute path, so that the config means the same from any folder.

    Raises:
        ConfigError: the file is missing or no valid YAML, a key is unknown, a value is wrong, two settings conflict.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else f" (looked in {path.parent.resolve()})"
        raise ConfigError(f"no config file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}; give a YAML text file") from error
    data = parse_yaml(text, str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: should be a mapping of settings such as `trainer: file.py:Class`, got a {type(data).__name__}"
        )
    for override in overrides:
        apply_override(data, override)
    config = validate(Config, data, str(path))
    return config.model_copy(update={"trainer": _absolute_trainer(config.trainer, path)})


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in the tree. The value is YAML: `null`, `true`, `1e-3`, `[0.9, 0.95]`, `{a: 1}`."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: write it as key.sub=value, e.g. optim.lr=1e-3")
    if key.startswith("-"):
        raise ConfigError(f"override {override!r}: write it without dashes, as {override.lstrip('-')}")
    value = parse_yaml(text, f"override {key}")
    node = data
    for depth, part in enumerate(parts[:-1], start=1):
        below = node.get(part)
        if below is None or isinstance(below, bool) or below == "default":
            below = node[part] = {}  # a switch: setting one of its keys turns it on
        elif not isinstance(below, dict):
            raise ConfigError(
                f"override {key}: {'.'.join(parts[:depth])} is {below!r}, which has no keys; set it as a whole"
            )
        node = below
    node[parts[-1]] = value


def validate(model: type[Model], data: Any, source: str, prefix: str = "") -> Model:
    """An instance of `model` from plain data; all faults at once in one `ConfigError`, each with its full path."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [_describe(model, fault, prefix) for fault in error.errors()]
        raise ConfigError(
            "\n  ".join([f"{source}:", *faults]) if len(faults) > 1 else f"{source}: {faults[0]}"
        ) from error


def dump(config: Config) -> str:
    """The config as YAML with every field, which `load` reads back to the same tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every field below `model`: its dotted path, the section it belongs to, its name there."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", model, name
        section = section_of(field.annotation)
        if section is not None:
            middle = "<name>." if _is_mapping(field.annotation) else ""
            yield from dotted_paths(section, f"{prefix}{name}.{middle}")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation leads to: `Section`, `Section | None`, `dict[str, Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := section_of(arg)) is not None), None)


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _describe(model: type[BaseModel], fault: ErrorDetails, prefix: str) -> str:
    path = prefix + ".".join(str(part) for part in fault["loc"])
    given = fault["input"]
    kind = fault["type"]
    if kind == "extra_forbidden":
        return f"{path}: no such setting{_nearest(model, fault['loc'], prefix)}"
    if kind == "missing":
        return f"{path} is missing{_doc_of(model, fault['loc'])}"
    if kind in ("value_error", "assertion_error"):
        return f"{path}: {fault['ctx']['error']}" if path else str(fault["ctx"]["error"])
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: should hold settings of its own (key: value), got {given!r}"
    wanted = (
        fault["msg"]
        .partition(", unable to parse")[0]
        .removeprefix("Input ")
        .replace("should be a valid", "should be a", 1)
        .replace("a integer", "an integer")
    )
    return f"{path}: {wanted}, got {given!r} ({type(given).__name__}){_doc_of(model, fault['loc'])}"


def _nearest(model: type[BaseModel], loc: tuple[int | str, ...], prefix: str) -> str:
    """`; did you mean …?` from the same section, else from the whole tree, else the section's keys."""
    section = _section_at(model, loc[:-1])
    wrong = str(loc[-1])
    here = list(section.model_fields) if section else []
    parent = prefix + "".join(f"{part}." for part in loc[:-1])
    near = difflib.get_close_matches(wrong, here, n=1)
    if near:
        return f"; did you mean {parent}{near[0]}?"
    elsewhere = {name: path for path, _, name in dotted_paths(model) if "<" not in path}
    near = difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {prefix}{elsewhere[near[0]]}?"
    return f"; {parent.rstrip('.') or 'the config'} takes {', '.join(here) or 'no keys'}"


def _section_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for part in loc:
        field = section.model_fields.get(str(part)) if section else None
        if field is not None:
            section = section_of(field.annotation)
    return section


def _doc_of(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """What the field means, to tell the reader what to write instead."""
    section = _section_at(model, loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section and loc else None
    return f" ({' '.join(field.description.split()).rstrip('.')})" if field is not None and field.description else ""


def _absolute_trainer(trainer: str, config: Path) -> str:
    file, colon, name = trainer.rpartition(":")
    if not colon or not name or not file:
        raise ConfigError(f"{config}: trainer: {trainer!r} should be folder/file.py:Class or package.module:Class")
    if not file.endswith(".py"):
        return trainer
    folders = [Path.cwd(), *config.resolve().parents]
    for folder in folders:
        if (folder / file).is_file():
            return f"{(folder / file).resolve()}:{name}"
    looked = Path(file) if Path(file).is_absolute() else Path.cwd() / file
    near = difflib.get_close_matches(looked.name, [n for n in _names_in(looked.parent) if n.endswith(".py")], n=1)
    hint = (
        f"; did you mean {Path(file).with_name(near[0])}?"
        if near
        else f" (looked from {folders[0]} and from {folders[1]} upward)"
    )
    raise ConfigError(f"{config}: trainer: no file {file}{hint}")


def as_mapping(section: BaseModel, *leave_out: str) -> Mapping[str, Any]:
    """A section's values and its further keys, without some."""
    return {key: value for key, value in section if key not in leave_out}
