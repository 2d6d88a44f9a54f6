"""`safetrain.watch` on a loop of one's own."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from graph_programs import batches, make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import safetrain


def train(keep: list[Tensor], leak: bool, **settings: object) -> safetrain.watch:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with safetrain.watch(model, optimizer, **settings) as w:  # type: ignore[arg-type]
        for x, y in batches("mlp", 6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            keep.append(loss if leak else loss.detach())
            w.step()
    assert not w.trouble, w.trouble[0]
    return w


def test_a_leak_is_shown_when_it_is_found() -> None:
    stream, kept = io.StringIO(), []
    w = train(kept, True, stream=stream, rules=["G"])
    (finding,) = w.findings
    assert finding.code == "G101" and finding.first_step <= 4
    shown = stream.getvalue()
    assert "warning G101 graph-retained" in shown
    assert "keep.append(loss if leak else loss.detach())" in shown
    assert "^^^" in shown


def test_a_clean_loop_is_silent() -> None:
    stream = io.StringIO()
    assert not train([], False, stream=stream).findings
    assert stream.getvalue() == ""


def test_strict_raises_in_the_step_that_found_it() -> None:
    with pytest.raises(safetrain.GuardError, match="G101"):
        train([], True, strict=True, stream=None, rules=["G101"])


def test_the_loop_is_as_before_afterwards() -> None:
    backward = torch.Tensor.backward, torch.autograd.backward, torch.nn.Module.__call__
    train([], False, stream=None)
    assert backward == (torch.Tensor.backward, torch.autograd.backward, torch.nn.Module.__call__)


def test_a_sample_drawn_in_inference_mode_after_the_first_step_breaks_nothing() -> None:
    """What records the first step ends with it; taken off inside inference mode it would break the next operation."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(32, 9))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    samples, modes = [], []
    with safetrain.watch(stream=None) as w:
        for _ in range(6):
            tokens = torch.randint(0, 9, (4, 4))
            tokens[torch.rand(tokens.shape) < 0.2] = 0
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens[:, 0]).backward()
            modes.append(_get_current_dispatch_mode())
            optimizer.step()
            with torch.inference_mode():
                samples.append(model(tokens))
    assert len(samples) == 6
    assert modes[0] is not None and modes[1:] == [None] * 5
    assert w.findings == [] and w.trouble == []
