"""P212: freezes that freeze nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from safetrain.findings import Finding, SourceLine
from safetrain.recording.path_look import written
from safetrain.rules.gradient.catalogue import (
    FREEZE_INEFFECTIVE,
    common_module,
    listed,
)
from safetrain.source.reading import find_attribute_assignment, find_freeze_of_state_dict, user_files

_FREEZE_WORDS = {
    "requires_grad": "is no switch of a module: it only sets an attribute that nobody reads",
    "require_grad": "is misspelt (requires_grad)",
    "requires_grads": "is misspelt (requires_grad)",
    "required_grad": "is misspelt (requires_grad)",
    "requires_gradient": "is misspelt (requires_grad)",
    "requires_grad_": "replaces the method instead of calling it",
    "trainable": "is no attribute that torch reads",
}


def find_ineffective_freezes(
    model: nn.Module, *, had_gradient: set[int] | None = None, lines: bool = True
) -> list[Finding]:
    """P212: `module.requires_grad = False` and its like, where the parameters still train. One finding a statement.

    `had_gradient`: ids of parameters that got one; without it `requires_grad` alone decides. `lines`: look for the
    statement in the user's source. A class of the user's own that sets such an attribute in its own `__init__` is left
    alone.
    """
    places: dict[tuple[str, SourceLine | None], tuple[list[str], dict[str, None]]] = {}
    for label, word, params in _switches(model):
        live = [n for n, p in params.items() if p.requires_grad and (had_gradient is None or id(p) in had_gradient)]
        if not live:
            continue
        source = None
        if lines:
            last = label.rsplit(".", 1)[-1]
            source = find_attribute_assignment(word, last) or find_attribute_assignment(word)
        labels, names = places.setdefault((word, source), ([], {}))
        labels.append(label)
        names.update(dict.fromkeys(live))
    return [_frozen_nothing(word, source, labels, list(names)) for (word, source), (labels, names) in places.items()]


def _switches(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """(owner, attribute, parameters) wherever an attribute that looks like a freeze was set to False."""
    for name, module in model.named_modules():
        for word in _FREEZE_WORDS.keys() & vars(module).keys():
            if vars(module)[word] is False and not _own_setting(module, word):
                prefix = f"{name}." if name else ""
                yield name or type(module).__name__, word, {prefix + n: p for n, p in module.named_parameters()}
    for name, p in model.named_parameters():
        for word in (_FREEZE_WORDS.keys() - {"requires_grad"}) & vars(p).keys():
            if vars(p)[word] is False:
                yield name, word, {name: p}


def _frozen_nothing(word: str, source: SourceLine | None, labels: list[str], names: list[str]) -> Finding:
    what = ", ".join(f"`{label}.{word} = False`" for label in labels[:3])
    what += f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return FREEZE_INEFFECTIVE.finding(
        f"{what} froze nothing: `{word}` {_FREEZE_WORDS[word]}, and {listed(names)} still trains.",
        source=source,
        params=names,
        module=common_module(names),
        cause=f"`{word}` {_FREEZE_WORDS[word]}",
        fix=f"{labels[0]}.requires_grad_(False)",
    )


def _own_setting(module: nn.Module, word: str) -> bool:
    """The module's own class (not torch's) sets the attribute in its `__init__`: it means something there."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch."):
            break
        init = vars(kind).get("__init__")
        code = getattr(init, "__code__", None)
        if code is not None and word in code.co_names:
            return True
    return False


def find_state_dict_freeze(
    model: nn.Module, *, had_gradient: set[int], files: list[str] | None = None
) -> list[Finding]:
    """P212 for `for v in model.state_dict().values(): v.requires_grad = False`, read from the user's source.

    `state_dict` hands out detached tensors, so this can never freeze anything. Judged only when every trainable
    parameter of the model still gets gradients.
    """
    live = [n for n, p in model.named_parameters() if p.requires_grad]
    if not live or any(id(p) not in had_gradient for p in model.parameters() if p.requires_grad):
        return []
    if any(not p.requires_grad for p in model.parameters()):
        return []
    source = find_freeze_of_state_dict(files=files if files is not None else user_files(model))
    if source is None:
        return []
    return [
        FREEZE_INEFFECTIVE.finding(
            f"{written(source)} froze nothing: state_dict() hands out detached copies of the parameters, and "
            f"{listed(live)} still trains.",
            source=source,
            params=live,
            cause="requires_grad was set on what state_dict() returned, not on the parameters",
            fix="for p in model.parameters(): p.requires_grad_(False)",
        )
    ]
