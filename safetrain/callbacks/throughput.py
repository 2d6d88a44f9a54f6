"""How fast the run is: samples, tokens and floating-point operations per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.state import RunState


_log = logging.getLogger("safetrain")


class Throughput(Callback):
    """Adds `throughput/steps_per_s`, `samples_per_s`, `tokens_per_s`, `tflops_per_s` and `mfu` to the row.

    The clock runs from one row to the next, waiting for data included; evaluations, checkpoints, the first step (lazy
    setup) and the step whose operations are counted are left out. List it after `Saving`, so that the removal of old
    checkpoints is left out too.

    Args:
        tokens: tokens of a micro-batch, as a number or a scalar tensor; default: the batch says so by an entry
            `num_tokens`, or by the size of `input_ids`.
        measure_flops: count floating-point operations of one step (the second), matrix products, convolutions and
            attention as `torch.utils.flop_counter` knows them; it knows no fused LSTM, so with one nothing is logged.
            The step itself runs under the counter, so nothing is computed twice and no result changes; it is merely
            slower. A compiled model would have to run that step eagerly, with slightly different numbers, so there
            nothing is counted: give `flops_per_sample`.
        flops_per_sample: what a sample costs, forward and backward, when you know it.
        peak_flops: what the device can do per second; then `mfu`, the share of it in use, is logged. Operations that
            activation checkpointing repeats are counted as done.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], int | Tensor] | None = None,
        measure_flops: bool = True,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value is not None and value <= 0:
                raise ConfigError(f"Throughput: {name}={value} must be positive")
        self._tokens_of = tokens or tokens_in
        self._measure = measure_flops and flops_per_sample is None
        self._given_flops = flops_per_sample
        self._peak_flops = peak_flops
        self.flops_per_sample = flops_per_sample
        """Floating-point operations of a sample, forward and backward, once known."""
        self._counter: _FlopCounter | None = None
        self._since: float | None = None
        self._tokens: int | Tensor | None = None
        self._to_measure = False
        self._restart()

    def on_fit_start(self, state: RunState) -> None:
        """Forget former rates."""
        self._since = None
        self._to_measure = self._measure and self.flops_per_sample is None and not _is_compiled(state.model)
        self._restart()

    def on_step_start(self, state: RunState) -> None:
        """Count the operations of the second step."""
        if self._to_measure and self._since is not None and not torch._C._len_torch_dispatch_stack():
            self._to_measure = False
            self._pause()
            self._counter = _FlopCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_backward_start(self, state: RunState) -> None:
        """Add the tokens of the micro-batch."""
        tokens = self._tokens_of(state.batch)
        if tokens is not None:
            self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def on_step_end(self, state: RunState) -> None:
        """Add the samples of the window."""
        self._last_event = time.perf_counter()
        if self._counter is not None:
            counted, uncounted = self._stop_counting()
            if uncounted:
                _log.info(
                    "throughput: no formula for %s, so operations are not counted; give Throughput(flops_per_sample=…)",
                    ", ".join(sorted(uncounted)),
                )
            elif counted and state.num_samples:
                self.flops_per_sample = counted / state.num_samples
            self._resume()
            return
        if self._since is None:
            self._restart()
            self._since = self._last_event
            return
        self._steps += 1
        self._samples += state.num_samples

    def on_log(self, state: RunState) -> None:
        """Add the rates to a training row; its numbers were read just now, so the device has caught up."""
        if not self._steps or self._since is None or not any(key.startswith("train/") for key in state.row):
            return
        seconds = time.perf_counter() - self._since
        row = state.row
        row["throughput/steps_per_s"] = self._steps / seconds
        if self._samples:
            row["throughput/samples_per_s"] = self._samples / seconds
        if self._tokens is not None:
            row["throughput/tokens_per_s"] = float(self._tokens) / seconds
        if self.flops_per_sample is not None and self._samples:
            flops_per_s = self.flops_per_sample * self._samples / seconds
            row["throughput/tflops_per_s"] = flops_per_s / 1e12
            if self._peak_flops is not None:
                row["throughput/mfu"] = flops_per_s / self._peak_flops
        self._restart()
        self._since = time.perf_counter()

    def on_eval_start(self, state: RunState) -> None:
        """Stop the clock."""
        self._pause()

    def on_eval_end(self, state: RunState) -> None:
        """Let it run again."""
        self._resume()

    def on_checkpoint_saved(self, state: RunState) -> None:
        """Leave the time of writing out."""
        if self._since is not None:
            now = time.perf_counter()
            self._since += now - max(self._last_event, self._since)
            self._last_event = now

    def on_exception(self, state: RunState) -> None:
        """Take the counter away from a step that failed."""
        if self._counter is not None:
            self._stop_counting()

    def _restart(self) -> None:
        self._steps = self._samples = 0
        self._tokens = None
        self._last_event = self._paused_at = time.perf_counter()

    def _pause(self) -> None:
        self._paused_at = time.perf_counter()

    def _resume(self) -> None:
        self._last_event = time.perf_counter()
        if self._since is not None:
            self._since += self._last_event - self._paused_at

    def _stop_counting(self) -> tuple[int, set[str]]:
        """Operations counted, and names of kernels that do much work and could not be."""
        assert self._counter is not None
        counter, self._counter = self._counter, None
        counter.leave()
        return counter.flops, counter.uncounted


# A recurrent layer that runs in one kernel: a count without it would be far too low.
_WITHOUT_FORMULA = frozenset({"aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default", "aten.miopen_rnn.default"})


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates none of it
    """Adds up floating-point operations by PyTorch's own formulas.

    `FlopCounterMode` would also hook every module and gradient to tell modules apart; only the sum is wanted here, and
    a real step is no place for hooks.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imports much that a run without counting can do without

        self._formulas = flop_registry
        self.flops = 0
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        elif str(func) in _WITHOUT_FORMULA:
            self.uncounted.add(str(func))
        return out

    def leave(self) -> None:
        """Leave the stack of modes, from below those that somebody entered since and has not left."""
        from torch.utils._python_dispatch import _pop_mode, _push_mode

        above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


def tokens_in(batch: Any) -> int | Tensor | None:
    """Tokens that a batch says it has: its `num_tokens`, or the size of its `input_ids`; None when it says neither."""
    if not isinstance(batch, dict):
        return None
    tokens = batch.get("num_tokens")
    if tokens is not None:
        return tokens.detach().sum() if isinstance(tokens, Tensor) else int(tokens)
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else None


def _is_compiled(model: nn.Module) -> bool:
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules())
