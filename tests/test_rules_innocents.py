"""Right programs that look suspicious: not one warning from the rules of gradients, precision and loop order."""

from __future__ import annotations

import random

import pytest
import torch
from innocent_loops import PROGRAMS

from safetrain.foreign.watching import Watch


@pytest.mark.filterwarnings("ignore")  # the programs are users' scripts, whose warnings are theirs
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_innocent_program_is_not_accused(name: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    trouble: list[str] = []
    watch = Watch(("P", "A", "L", "G109"), on_trouble=trouble.append)
    try:
        PROGRAMS[name]()
    finally:
        watch.finish()
    assert not trouble, trouble[0]
    assert [(f.code, f.message) for f in watch.report.findings if f.severity != "note"] == []
