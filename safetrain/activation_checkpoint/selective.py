"""Selective checkpointing: results of matrix products and convolutions are kept, the cheap rest is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from safetrain.errors import ConfigError
from safetrain.graph import storage_key

_KEPT_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "_cudnn_rnn",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
    "_efficient_attention_forward",
)  # fmt: skip
KEPT = frozenset(
    op for name in _KEPT_NAMES if (op := getattr(getattr(torch.ops.aten, name, None), "default", None)) is not None
)
"""Operations whose results are kept: those whose time grows with the product of three sizes."""


def selective_contexts(module_name: str = "a checkpointed module") -> tuple[Any, Any]:
    """What to enter around the first forward of a call, and around its recomputation. For one backward only."""
    return create_selective_checkpoint_contexts(Policy(module_name))  # type: ignore[no-untyped-call, no-any-return]


class Policy:
    """Decides for each operation of one call. Raises `ConfigError` where a kept result is then written over."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name
        self._kept: dict[int, str] = {}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """`MUST_SAVE` or `PREFER_RECOMPUTE`."""
        if op in KEPT and not _draws(op, args, kwargs):
            if not ctx.is_recompute and not torch.compiler.is_compiling():
                made = _outputs(getattr(ctx, "op_output", None))  # older torch does not tell; it finds writes later
                self._kept.update((key, str(op)) for t in made if (key := storage_key(t)) is not None)
            return CheckpointPolicy.MUST_SAVE
        if self._kept and not ctx.is_recompute and op._schema.is_mutable:
            self._refuse_writes(op, args, kwargs)
        # Random operations among them: kept and repeated ones together would draw in another order than the forward.
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _refuse_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in zip(op._schema.arguments, args):  # noqa: B905 (the rest are keywords)
            self._refuse_write(op, argument, value)
        for argument in op._schema.arguments:
            if argument.name in kwargs:
                self._refuse_write(op, argument, kwargs[argument.name])

    def _refuse_write(self, op: Any, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, Tensor):
            return
        made_by = self._kept.get(storage_key(value) or 0)
        if made_by is not None:
            raise ConfigError(
                f"activation_checkpoint.mode: selective keeps the result of {made_by} in {self._module_name}, and "
                f"{op} writes over it; use the operation that is not in place (nn.ReLU(inplace=False)), or "
                "mode: recompute for this module"
            )


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may drop at random does."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _outputs(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _outputs(part)
