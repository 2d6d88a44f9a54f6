"""The catalogue entries of family P, and how its findings name parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.findings import rule

GRAD_NONE = rule("P201", "grad-none", "warning", "a trainable parameter got no gradient")
NOT_IN_OPTIMIZER = rule("P202", "not-in-optimizer", "warning", "a trainable parameter is in no optimizer")
FROZEN_IN_OPTIMIZER = rule("P203", "frozen-in-optimizer", "note", "the optimizer holds a parameter that cannot train")
STALE_IN_OPTIMIZER = rule(
    "P204", "stale-in-optimizer", "warning", "the optimizer holds tensors that are not the model's"
)
DUPLICATE = rule("P205", "duplicate-param", "warning", "a parameter is in two groups or two optimizers")
ZERO_GRAD = rule("P207", "zero-grad", "warning", "a gradient is exactly zero for many steps")
NO_UPDATE = rule("P208", "no-update", "warning", "a parameter had a gradient and did not change")
STALE_GRAD = rule("P209", "stale-grad", "warning", "gradients of an earlier step were added to this one's")
GRADIENT_SCALE = rule("P210", "gradient-scale", "note", "exploding or vanishing gradients, by layer")
FREEZE_INEFFECTIVE = rule(
    "P212", "freeze-ineffective", "warning", "a freeze had no effect and the parameters still train"
)
DROPPED_GRAD = rule("P213", "dropped-grad", "warning", "gradients were cleared before any step had used them")
CONSTANT_TERM = rule("G109", "constant-term", "note", "a term of the loss came from parameters but carries no graph")


def as_mapping(optimizers: Optimizer | Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
    return optimizers if isinstance(optimizers, Mapping) else {"optimizer": optimizers}


def entries(optimizers: Optimizer | Mapping[str, Optimizer]) -> Iterable[tuple[str, Tensor]]:
    for name, opt in as_mapping(optimizers).items():
        for group in opt.param_groups:
            for p in group["params"]:
                yield name, p


def listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def common_module(names: Sequence[str]) -> str | None:
    """The innermost module that holds all of these parameters, None at the top."""
    parts = [n.split(".")[:-1] for n in names]
    common = parts[0] if parts else []
    for other in parts[1:]:
        same = 0
        while same < min(len(common), len(other)) and common[same] == other[same]:
            same += 1
        common = common[:same]
    return ".".join(common) or None


def by_module(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """Names grouped by the outermost module all of whose trainable parameters are among them ("" for the model)."""
    wanted, groups, done = set(names), dict[str, list[str]](), set[str]()
    for prefix, module in model.named_modules():
        inside = [f"{prefix}.{n}" if prefix else n for n, p in module.named_parameters() if p.requires_grad]
        if inside and prefix and all(n in wanted for n in inside) and not any(n in done for n in inside):
            groups[prefix] = inside
            done.update(inside)
    rest = [n for n in names if n not in done]
    for n in rest:
        groups.setdefault(n.rpartition(".")[0], []).append(n)
    return groups


def module_at(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return model
