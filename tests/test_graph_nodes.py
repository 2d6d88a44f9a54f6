"""Graphs that are kept through their nodes, with no tensor: the holder and the line, and what only looks like it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_programs import Keep, batches, make_model, of_graphs, train, watched
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from safetrain import Trainer
from safetrain.callbacks import Callback
from safetrain.findings import Finding
from safetrain.state import RunState


def found_in(keep: Keep, *, kind: str = "mlp", steps: int = 8, accumulate: int = 1) -> list[Finding]:
    with watched() as report:
        train(kind, keep, steps=steps, accumulate=accumulate)
    return of_graphs(report, notes=False)


# ---------------------------------------------------------------------- nodes that are kept


def nodes_of_losses(kept: list[Any]) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(loss.grad_fn)

    return keep


def nodes_of_outputs(kept: list[Any]) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(out.grad_fn)

    return keep


def edges(kept: list[Any]) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(get_gradient_edge(out))

    return keep


class Drawing:
    """What a drawer of graphs gathers before it writes them down."""

    def __init__(self, loss: Tensor) -> None:
        self.nodes: dict[Any, str] = {}
        self.visit(loss.grad_fn)

    def visit(self, node: Any) -> None:
        if node is not None and node not in self.nodes:
            self.nodes[node] = node.name()
            for following, _ in node.next_functions:
                self.visit(following)


def drawings(kept: list[Any]) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(Drawing(loss))

    return keep


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def nodes_of_functions(kept: list[Any]) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(Doubled.apply(out).grad_fn)

    return keep


@pytest.mark.parametrize("kind", ["mlp", "transformer", "rnn"])
@pytest.mark.parametrize("way", [nodes_of_losses, nodes_of_outputs, edges, drawings, nodes_of_functions])
def test_kept_nodes_are_told_with_their_holder_and_line(way: Callable[[list[Any]], Keep], kind: str) -> None:
    kept: list[Any] = []
    (finding,) = found_in(way(kept), kind=kind)
    assert finding.code == "G101"
    assert "`kept`" in (finding.holder or "")
    assert finding.source is not None and finding.source.text.startswith("kept.append(")
    assert "through their nodes" in finding.message
    assert "detach" not in (finding.fix or "")


def test_an_output_that_no_backward_went_through_pins_its_activations() -> None:
    kept: list[Any] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        wide = model.body(torch.randn(512, 6)).sigmoid().pow(2)
        kept.append((wide.sum() + 0.0 * out.sum()).grad_fn)

    (finding,) = found_in(keep)
    assert "of activations" in finding.message
    assert (finding.pinned_bytes or 0) > 3 * 512 * 8 * 4


def test_one_that_begins_after_many_steps() -> None:
    kept: list[Any] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        seen.append(0)
        if len(seen) > 70:
            kept.append(out.grad_fn)

    seen: list[int] = []
    (finding,) = found_in(keep, steps=140)
    assert "`kept`" in (finding.holder or "")


class OfTrainer(Trainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[Any] = []

    def training_step(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.keep(loss)
        return loss

    def keep(self, loss: Tensor) -> None:
        self.kept.append(loss.grad_fn)


class OnlyTheLast(OfTrainer):
    def keep(self, loss: Tensor) -> None:
        self.kept = [loss.grad_fn]


def fit(kind: type[OfTrainer], **options: Any) -> list[Finding]:
    model = make_model("mlp")
    trainer = kind(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=8, **options)
    trainer.fit(list(batches("mlp", 8 * options.get("accumulate", 1))))
    return trainer.report.findings


@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_a_trainer_too(accumulate: int) -> None:
    (finding,) = fit(OfTrainer, accumulate=accumulate)
    assert finding.code == "G101"
    assert ".kept" in (finding.holder or "")
    assert finding.source is not None and finding.source.text == "self.kept.append(loss.grad_fn)"


def test_of_each_step_only_the_last_in_a_trainer() -> None:
    assert fit(OnlyTheLast) == []


class KeepsNodes(Callback):
    """Keeps what the newest loss was made by."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []

    def on_backward_start(self, state: RunState) -> None:
        assert state.micro_loss is not None
        self.nodes.append(state.micro_loss.grad_fn)


def test_on_a_callback() -> None:
    class Plain(OfTrainer):
        def keep(self, loss: Tensor) -> None: ...

    (finding,) = fit(Plain, callbacks=[KeepsNodes()])
    assert finding.code == "G101"
    assert finding.source is not None and finding.source.text == "self.nodes.append(state.micro_loss.grad_fn)"


# ---------------------------------------------------------------------- what only looks like it


def names_of_nodes() -> Keep:
    kept: list[str] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(loss.grad_fn.name())  # type: ignore[union-attr]

    return keep


def the_newest_two() -> Keep:
    pair: list[Any] = [None, None]

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        pair[:] = [pair[1], loss.grad_fn]

    return keep


def a_short_deque() -> Keep:
    recent: deque[Any] = deque(maxlen=6)

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        recent.append(loss.grad_fn)

    return keep


def cleared_in_time() -> Keep:
    window: list[Any] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        window.append(get_gradient_edge(out))
        if len(window) > 6:
            window.clear()

    return keep


def where_gradients_of_parameters_arrive() -> Keep:
    """Kept by many who hook a parameter's gradient: it belongs to no step."""
    arrivals: list[Any] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        for p in model.parameters():
            arrivals.append(get_gradient_edge(p))
            arrivals.append(p.view_as(p).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

    return keep


def handles_of_hooks_on_nodes() -> Keep:
    handles: list[Any] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        handles.append(out.grad_fn.register_hook(lambda inputs, outputs: None))  # type: ignore[union-attr]

    return keep


def a_drawing_that_is_written_down() -> Keep:
    pages: list[str] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        pages.append(" ".join(type(node).__name__ for node in Drawing(loss).nodes))

    return keep


def the_best_one() -> Keep:
    best: dict[str, Any] = {"loss": float("inf")}

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), node=loss.grad_fn)

    return keep


@pytest.mark.parametrize(
    "program",
    [
        names_of_nodes,
        the_newest_two,
        a_short_deque,
        cleared_in_time,
        where_gradients_of_parameters_arrive,
        handles_of_hooks_on_nodes,
        a_drawing_that_is_written_down,
        the_best_one,
    ],
)
def test_what_keeps_no_graph_of_each_step_is_not_accused(program: Callable[[], Keep]) -> None:
    assert found_in(program(), steps=24) == []


def test_no_graph_is_left_by_the_marks_themselves() -> None:
    """A network with a residual branch, in accumulation windows: its trunk is marked, and nothing is kept."""
    assert found_in(lambda loss, out, model: None, kind="transformer", steps=80, accumulate=2) == []
