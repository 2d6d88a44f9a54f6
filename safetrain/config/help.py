"""What `config --help` and `schema` print: every field of the config with its type, default and docstring."""

from __future__ import annotations

import json
import textwrap
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from safetrain.config import Config
from safetrain.config.file import dotted_paths, section_of


def schema() -> str:
    """The JSON schema of a config file, for editors."""
    return json.dumps(Config.model_json_schema(), indent=2)


def fields_help(model: type[BaseModel] = Config) -> str:
    """Every field below `model`, one paragraph each."""
    lines: list[str] = []
    for path, section, name in dotted_paths(model):
        field = section.model_fields[name]
        lines.append(f"{path}  ({_type(field.annotation)}{_default(field)})")
        lines.append(textwrap.indent(textwrap.fill(" ".join((field.description or "").split()), 100), "    "))
        inner = section_of(field.annotation)
        if inner is not None and inner.model_config.get("extra") == "allow":
            lines.append("    Further keys are arguments of the class that `name` names.")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ", required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ", on" if section_of(field.annotation) is not None and type(None) in get_args(field.annotation) else ""
    return f", default {_as_yaml(value)}"


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _type(annotation: Any) -> str:
    """The type in the words of YAML."""
    if section_of(annotation) is not None and getattr(annotation, "__origin__", None) is not dict:
        return "settings" + (" or null" if type(None) in get_args(annotation) else "")
    names = {int: "whole number", float: "number", bool: "true/false", str: "text", type(None): "null", dict: "mapping"}
    if annotation in names:
        return names[annotation]
    origin, arguments = getattr(annotation, "__origin__", None), get_args(annotation)
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return "one or a list of texts"
    if arguments and all(isinstance(a, str) for a in arguments):
        return " | ".join(arguments)
    if arguments:
        return " or ".join(dict.fromkeys(_type(a) for a in arguments))
    return "path" if getattr(annotation, "__name__", "") == "Path" else str(annotation)
