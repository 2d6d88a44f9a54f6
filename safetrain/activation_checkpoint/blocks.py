"""The blocks of a model: what is worth checkpointing as a whole."""

from __future__ import annotations

from collections import Counter

from torch import nn

from safetrain.modules import has_forward, outermost

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of `model` by name, in model order; empty where there are none.

    A block is a module with modules inside, two or more of whose class stand side by side: in a `ModuleList`,
    `Sequential` or `ModuleDict`; where there are no such, as attributes of one module. Of nested ones the outermost.
    """
    return _repeated(model, _CONTAINERS) or _repeated(model, nn.Module)


def _repeated(model: nn.Module, parents: type[nn.Module] | tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    found: set[int] = set()
    for parent in model.modules():
        if isinstance(parent, parents):
            blocks = [child for child in parent.children() if _is_block(child)]
            kinds = Counter(type(block) for block in blocks)
            found.update(id(block) for block in blocks if kinds[type(block)] > 1)
    return outermost({name: module for name, module in model.named_modules() if name and id(module) in found})


def _is_block(module: nn.Module) -> bool:
    return has_forward(module) and not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None
