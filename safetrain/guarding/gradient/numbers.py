"""P207, P208 and P210 from sparse readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report
from safetrain.guarding.coverage import Held
from safetrain.guarding.gradient.sampling import is_plain, is_sample
from safetrain.guarding.gradient.watch import Watch
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.state import RunState


_MOST_MEASURED = 128
_MOST_COMPARED = 48
"""Parameters whose gradients are measured, and whose values are compared, on one sampled step."""


class NumbersGuard(Callback):
    """P207, P208 and P210: zero, vanishing or exploding gradients and updates that change nothing.

    Takes device readings at the steps of `is_sample` (a handful of `_foreach` calls) and reads them as numbers one
    sample later, when they are long done.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report, watch: Watch) -> None:
        self._report, self._watch = report, watch
        self._waiting: list[tuple[int, list[str], Tensor]] = []
        self._zero: dict[str, list[int]] = {}
        self._history: list[dict[str, float]] = []
        self._before: list[tuple[Held, Tensor, float]] = []
        self._updates: list[tuple[int, list[tuple[str, float, str]], Tensor]] = []
        self._still: dict[str, list[int]] = {}
        self._inert: set[int] | None = None
        """Parameters without any effect, by id; looked for once something does not move."""
        self._ask_cause: dict[str, list[int]] = {}
        self._asking = False
        self._turn = 0
        self._causes: dict[str, rules.ZeroCause] = {}
        self._told: set[str] = set()
        self._peak_rate = 0.0
        self._skipped = 0

    def on_backward_start(self, state: RunState) -> None:
        if self._still and self._inert is None and state.micro_loss is not None:
            self._inert = rules.biases_before_norm(state.micro_loss)
        if self._asking and state.micro_loss is not None:
            by_name = {h.name: t for h in self._watch.coverage.trained if (t := h.tensor) is not None}
            wanted = {n: by_name[n] for n in self._ask_cause if n in by_name}
            for name, cause in rules.zero_gradient_causes(state.micro_loss, wanted).items():
                known = self._causes.get(name)
                if known is None or (known.text, known.meant) != (cause.text, cause.meant):
                    self._causes[name] = cause

    def on_backward_end(self, state: RunState) -> None:
        if not is_sample(state.step + 1):
            return
        self._turn += 1
        stepping = state.stepping or tuple(state.optimizers)
        coverage = self._watch.coverage
        chosen = [
            (h, t, t.grad)
            for h in coverage.trained
            if (t := h.tensor) is not None and is_plain(t) and t.grad is not None and is_plain(t.grad)
            and coverage.owner.get(id(t)) in stepping
        ]  # fmt: skip
        if state.current_step > 64 and len(chosen) > _MOST_MEASURED:
            # Large models are measured in turns, so that the cost of a step does not grow with them.
            start = self._turn * _MOST_MEASURED % len(chosen)
            chosen = [*chosen[start:], *chosen[:start]][:_MOST_MEASURED]
        self._measure(state, chosen)

    def _measure(self, state: RunState, chosen: list[tuple[Held, Tensor, Tensor]]) -> None:
        """Largest absolute value of each gradient, and a slice of each parameter to compare after the step."""
        rates = {id(p): g["lr"] for o in state.optimizers.values() for g in o.param_groups for p in g["params"]}
        by_device: dict[torch.device, list[tuple[Held, Tensor, Tensor]]] = {}
        for held, tensor, grad in chosen:
            by_device.setdefault(grad.device, []).append((held, tensor, grad))
        with torch.no_grad():
            for entries in by_device.values():
                largest = _largest([g for _, _, g in entries])
                self._waiting.append((state.current_step, [h.name for h, _, _ in entries], largest))
                every = -(-len(entries) // _MOST_COMPARED)
                for held, tensor, _ in entries[self._turn % every :: every]:
                    rate = rates.get(id(tensor), 1.0)
                    self._before.append(
                        (held, tensor.reshape(-1)[:256].clone(), rate if isinstance(rate, (int, float)) else 1.0)
                    )

    def on_step_end(self, state: RunState) -> None:
        if self._before:
            self._compare(state)
        if self._asking:
            if self._watch.finished is not None:
                for cause in self._causes.values():
                    cause.line = cause.line or self._watch.finished.line_of_node(cause.node)
            self._asking = False
            self._tell_zero(state)
        if is_sample(state.step) or state.is_logging_step:
            self._read(state)

    def on_fit_end(self, state: RunState) -> None:
        self._before.clear()
        self._read(state, everything=True)
        if self._ask_cause:
            self._tell_zero(state)

    def _compare(self, state: RunState) -> None:
        before, self._before = self._before, []
        if state.skipped_steps > self._skipped:
            self._skipped = state.skipped_steps
            return
        by_device: dict[torch.device, list[tuple[Held, Tensor, Tensor, float]]] = {}
        for held, old, rate in before:
            tensor = held.tensor
            if tensor is not None:
                now = tensor.detach().reshape(-1)[:256]
                if now.shape == old.shape and now.device == old.device and now.dtype == old.dtype:
                    by_device.setdefault(old.device, []).append((held, old, now, rate))
        with torch.no_grad():
            for entries in by_device.values():
                changed = torch.stack([torch.ne(now, old).any() for _, old, now, _ in entries])
                facts = [(h.name, rate, str(old.dtype).removeprefix("torch.")) for h, old, _, rate in entries]
                self._updates.append((state.step, facts, changed))

    # ------------------------------------------------------------------ reading, one sample later

    def _read(self, state: RunState, *, everything: bool = False) -> None:
        keep = 0 if everything else 1
        ready, self._waiting = self._split(self._waiting, state.step, keep)
        look: dict[str, float] = {}
        for step, names, norms in ready:
            look.update(zip(names, norms.tolist(), strict=True))  # the host sync of a sampled step
            for name in names:
                if look[name] == 0.0:
                    self._zero.setdefault(name, []).append(step)
                else:
                    self._zero.pop(name, None)
                    self._ask_cause.pop(name, None)
        if look:
            self._history = [*self._history[-7:], look]
            self._judge_scale(state)
        updates, self._updates = self._split(self._updates, state.step, keep)
        for step, facts, changed in updates:
            self._judge_updates(
                state, step, facts, changed.tolist(), look or (self._history[-1] if self._history else {})
            )
        suspects = {n: s for n, s in self._zero.items() if len(s) >= 2 and n not in self._told}
        if suspects and {n: len(s) for n, s in suspects.items()} != {n: len(s) for n, s in self._ask_cause.items()}:
            self._ask_cause = {n: list(s) for n, s in suspects.items()}
            self._asking = True
            state.request_samples(1)
            if any(len(s) <= 3 for s in suspects.values()):
                self._watch.request_look(state)

    @staticmethod
    def _split(items: list[Any], step: int, keep: int) -> tuple[list[Any], list[Any]]:
        ready = [item for item in items if item[0] <= step - keep]
        return ready, [item for item in items if item[0] > step - keep]

    def _judge_scale(self, state: RunState) -> None:
        eps = [g.get("eps") for o in state.optimizers.values() for g in o.param_groups]
        adam = all("betas" in g for o in state.optimizers.values() for g in o.param_groups)
        smallest = min((e for e in eps if isinstance(e, float)), default=None) if adam else None
        for finding in rules.find_gradient_scale(self._history, eps=smallest):
            if finding.cause not in self._told:
                self._told.add(finding.cause or "")
                self._report.add(finding, step=max(1, state.step))

    def _tell_zero(self, state: RunState) -> None:
        """Proved causes at once; without one, only after eight looks at zero over at least sixty steps."""
        suspects = {n: s for n, s in self._ask_cause.items() if n not in self._told}
        ready = [
            n
            for n, s in suspects.items()
            if (c := self._causes.get(n)) is not None and not c.meant and ((c.proved and len(s) >= 3) or len(s) >= 8)
        ]
        ready += [n for n, s in suspects.items() if n not in self._causes and len(s) >= 8 and s[-1] - s[0] >= 60]
        if not ready:
            return
        self._told.update(ready)
        weights = [h.name for h in self._watch.coverage.trained if (t := h.tensor) is not None and t.dim() >= 2]
        first = min(suspects[n][0] for n in ready)
        for finding in rules.find_zero_grads(ready, self._causes, steps=state.step - first + 1, weights=weights):
            finding.first_step = first
            self._report.add(finding, step=max(1, state.step))

    def _judge_updates(
        self,
        state: RunState,
        step: int,
        facts: list[tuple[str, float, str]],
        changed: list[bool],
        grads: Mapping[str, float],
    ) -> None:
        self._peak_rate = max(self._peak_rate, *(rate for _, rate, _ in facts))
        typical = sorted(grads.values())[len(grads) // 2] if grads else 0.0
        for (name, rate, dtype), moved in zip(facts, changed, strict=True):
            # Near the end of a schedule small updates are meant.
            late = rules.VANISHED * self._peak_rate < rate < 0.01 * self._peak_rate
            # A bias before a normalisation has a gradient of rounding errors, and no update by right.
            noise = dtype == "float32" and rate and grads.get(name, 0.0) < 1e-4 * typical
            if moved or late or noise or not 0.0 < grads.get(name, 0.0) < float("inf"):
                self._still.pop(name, None)
            else:
                self._still.setdefault(name, []).append(step)
        zero_rate = all(rate <= rules.VANISHED * self._peak_rate for _, rate, _ in facts)
        still = [
            n for n, steps in self._still.items()
            if n not in self._told and len(steps) >= 3 and steps[-1] - steps[0] >= 6
        ]  # fmt: skip
        if self._inert and still:
            inert = {h.name for h in self._watch.coverage.trained if id(h.tensor) in self._inert}
            still = [n for n in still if n not in inert]
        if not still:
            return
        rates = {name: rate for name, rate, _ in facts}
        dtype = next((d for name, _, d in facts if name == still[0]), "float32")
        self._told.update(still)
        first = min(self._still[n][0] for n in still)
        for finding in rules.find_no_updates(
            still,
            steps=step - first + 1,
            rates=rates,
            dtype=dtype,
            all_groups=zero_rate,
            peak_rate=self._peak_rate,
        ):
            finding.first_step = first
            self._report.add(finding, step=max(1, state.step))


def _largest(grads: list[Tensor]) -> Tensor:
    """Largest absolute entry of each, on their device: NaN where one is. Float32, shape [len(grads)]."""
    if grads[0].is_cpu and not any(g.is_complex() for g in grads):  # twenty times as fast there as the infinity norm
        least, most = zip(*(g.aminmax() for g in grads), strict=True)
        return torch.maximum(-torch.stack([x.float() for x in least]), torch.stack([x.float() for x in most]))
    return torch.stack([n.float() for n in torch._foreach_norm(grads, float("inf"))])
