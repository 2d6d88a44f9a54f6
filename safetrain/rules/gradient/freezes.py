"""P212: freezes that freeze nothing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from safetrain.findings import Finding
from safetrain.path_look import written
from safetrain.reading import find_attribute_assignment, find_freeze_of_state_dict, user_files
from safetrain.rules.gradient.catalogue import (
    FREEZE_INEFFECTIVE,
    listed,
)

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
    """P212: `module.requires_grad = False` and its like, where the parameters still train.

    `had_gradient`: ids of parameters that got one; without it `requires_grad` alone decides. `lines`: look for the
    statement in the user's source. A class of the user's own
    that sets such an attribute in its own code and freezes accordingly is not reported, as then nothing trains.
    """
    findings: list[Finding] = []
    for name, module in model.named_modules():
        for word in _FREEZE_WORDS.keys() & vars(module).keys():
            if vars(module)[word] is not False or _own_setting(module, word):
                continue
            prefix = f"{name}." if name else ""
            params = {prefix + n: p for n, p in module.named_parameters()}
            findings += _still_trains(name or type(module).__name__, name, word, params, had_gradient, lines)
    for name, p in model.named_parameters():
        for word in (_FREEZE_WORDS.keys() - {"requires_grad"}) & vars(p).keys():
            if vars(p)[word] is False:
                findings += _still_trains(name, "", word, {name: p}, had_gradient, lines)
    return findings


def _still_trains(
    label: str, module: str, word: str, params: Mapping[str, Tensor], had_gradient: set[int] | None, lines: bool
) -> list[Finding]:
    live = [n for n, p in params.items() if p.requires_grad and (had_gradient is None or id(p) in had_gradient)]
    if not live:
        return []
    source = None
    if lines:
        source = find_attribute_assignment(word, label.rsplit(".", 1)[-1]) or find_attribute_assignment(word)
    what = f"{label}.{word} = False"
    return [
        FREEZE_INEFFECTIVE.finding(
            f"`{what}` froze nothing: `{word}` {_FREEZE_WORDS[word]}, and {listed(live)} still trains.",
            source=source,
            params=live,
            module=module or None,
            cause=f"`{word}` {_FREEZE_WORDS[word]}",
            fix=f"{label}.requires_grad_(False)" if module else "p.requires_grad_(False)",
        )
    ]


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
