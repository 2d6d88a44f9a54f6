"""Parameters that do not train: each fault planted in real small models, with its innocent twin."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import KINDS, Mlp, batch, loud, make, only, train, watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain import Trainer
from safetrain.findings import Report
from safetrain.guarding.coverage import ChangeDetector
from safetrain.guarding.gradient import gradient_guards
from safetrain.recording.path_look import PathLook
from safetrain.rules import gradient as rules


def sgd(params: object, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


# ---------------------------------------------------------------------- P201: where the path is cut


def cut_detach(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.features(x).detach()), y)  # CUT


def cut_data(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.features(x).data), y)  # CUT


def cut_numpy(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    h = torch.from_numpy(m.features(x).detach().numpy())  # CUT
    return F.cross_entropy(m.head(h), y)


def cut_rebuilt(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    h = torch.tensor(m.features(x).tolist())  # CUT
    return F.cross_entropy(m.head(h), y)


def cut_round_to_int(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    h = (m.features(x) > 0).float()  # CUT
    return F.cross_entropy(m.head(h), y)


def cut_no_grad(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():  # CUT
        h = m.features(x)
    return F.cross_entropy(m.head(h), y)


def cut_inference(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        h = m.features(x)
    return F.cross_entropy(m.head(h.clone()), y)


CUTS = [cut_detach, cut_data, cut_numpy, cut_rebuilt, cut_round_to_int, cut_no_grad]


def line_of(function: object) -> int:
    code = function.__code__  # type: ignore[attr-defined]
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    return next(i for i in range(code.co_firstlineno, len(lines) + 1) if "# CUT" in lines[i - 1])


@pytest.mark.parametrize("cut", CUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["mlp", "rnn"])
def test_a_cut_path_is_named_by_its_line(kind: str, cut: object) -> None:
    model = make(kind)
    with watched() as report:
        train(model, steps=8, loss_fn=cut)  # type: ignore[arg-type]
    finding = only(report, "P201")
    assert finding.source is not None and finding.source.line == line_of(cut), finding.message
    assert finding.first_step == 1
    assert set(finding.params) == {n for n, _ in model.named_parameters() if not n.startswith("head")}


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_shows_its_cut_and_none_without_one(kind: str) -> None:
    for cut in (cut_detach, None):
        model = make(kind)
        with watched() as report:
            train(model, steps=6, accumulate=2, n=32, loss_fn=cut)
        if cut is None:
            assert loud(report) == []
        else:
            assert any(name.startswith("body") for name in only(report, "P201").params)


def test_a_forward_under_inference_mode_is_named() -> None:
    model = make("mlp")
    with watched() as report:
        train(model, steps=6, loss_fn=cut_inference)
    assert only(report, "P201").module == "body"


def test_a_module_that_is_never_called_waits_for_the_end_of_the_run() -> None:
    model = make("mlp")
    model.spare = nn.Linear(16, 2)
    with watched() as report:
        train(model, steps=8)
        assert loud(report) == []
    finding = only(report, "P201")
    assert finding.module == "spare" and "never called" in (finding.cause or "")
    assert finding.first_step == 1


def test_a_branch_that_starts_late_or_runs_now_and_then_is_innocent() -> None:
    model = make("mlp")
    model.spare = nn.Linear(16, 3)
    step = 0

    def loss_fn(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        h = m.features(x)
        loss = F.cross_entropy(m.head(h), y)
        return loss + F.cross_entropy(m.spare(h), y) if step > 14 and step % 3 == 0 else loss

    with watched() as report:
        train(model, steps=22, loss_fn=loss_fn)
    assert loud(report) == []


def test_patience_ends_in_a_long_run() -> None:
    model = make("mlp")
    model.spare = nn.Linear(16, 2)
    with watched(patience=12) as report:
        train(model, steps=14)
        assert only(report, "P201").last_step == 12


def test_a_result_that_no_loss_uses_names_the_last_operation() -> None:
    model = make("mlp")
    model.spare = nn.Linear(16, 2)

    def loss_fn(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
        h = m.features(x)
        m.spare(h).sigmoid()
        return F.cross_entropy(m.head(h), y)

    with watched() as report:
        train(model, steps=6, loss_fn=loss_fn)
    finding = only(report, "P201")
    assert finding.op == "sigmoid" and finding.source is not None and "m.spare(h).sigmoid()" in finding.source.text


def test_frozen_parameters_targets_and_moving_averages_are_no_finding() -> None:
    model = make("mlp")
    model.frozen = nn.Linear(6, 3).requires_grad_(False)
    model.target = copy.deepcopy(model.body)  # trainable, held by the optimizer, moved by hand

    def follow(step: int) -> None:
        with torch.no_grad():
            for t, p in zip(model.target.parameters(), model.body.parameters(), strict=True):
                t.lerp_(p, 0.1)

    with watched() as report:
        train(model, steps=8, each=follow)
    assert loud(report) == []


def test_a_reentrant_checkpoint_without_gradient_inputs_is_L506() -> None:
    def loss_fn(m: Mlp, x: Tensor, y: Tensor, reentrant: bool) -> Tensor:
        h = checkpoint(m.body, x, use_reentrant=reentrant)
        return F.cross_entropy(m.head(h), y)

    for reentrant in (True, False):
        with watched() as report, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that no input requires grad, and not where
            train(make("mlp"), steps=6, loss_fn=lambda m, x, y, r=reentrant: loss_fn(m, x, y, r))
        if reentrant:
            finding = only(report, "L506")
            assert finding.source is not None and "checkpoint(m.body" in finding.source.text
        else:
            assert loud(report) == []


def test_a_loss_wrapped_in_a_new_tensor_trains_nothing() -> None:
    model = make("mlp")
    with watched() as report:
        train(model, steps=6, loss_fn=lambda m, x, y: torch.tensor(F.cross_entropy(m(x), y).item(), requires_grad=True))
    finding = only(report, "P201")
    assert finding.op == "item" and len(finding.params) == len(list(model.parameters()))


def test_a_hand_written_function_is_followed_and_its_missing_gradient_told() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)  # type: ignore[attr-defined]
            return x * w

        @staticmethod
        def backward(ctx: object, g: Tensor) -> tuple[Tensor, Tensor | None]:
            x, w = ctx.saved_tensors  # type: ignore[attr-defined]
            return g * w, (g * x).sum(0) if right else None

    for right in (True, False):
        model = make("mlp")
        model.gain = nn.Parameter(torch.ones(16))
        with watched() as report:
            train(
                model, steps=10, loss_fn=lambda m, x, y: F.cross_entropy(m.head(Scale.apply(m.features(x), m.gain)), y)
            )
        if right:
            assert loud(report) == []
        else:
            assert "returned None" in (only(report, "P201").cause or "")


def test_missing_gradients_as_a_function_in_a_bare_loop() -> None:
    model = make("mlp")
    x, y = batch(model)
    look = PathLook(dict(model.named_parameters()))
    look.start()
    loss = cut_data(model, x, y)
    look.loss(loss)
    loss.backward()
    assert look.stop()
    [finding] = rules.find_missing_grads(model, look=look)
    assert finding.op == "data" and finding.source is not None and finding.source.line == line_of(cut_data)
    assert rules.find_missing_grads(model, sgd(model.head.parameters())) == []


# ---------------------------------------------------------------------- G109


@pytest.mark.parametrize(
    ("term", "severity"),
    [
        (lambda m, x, h: (m.head(h).argmax(1) != 0).float().mean(), "warning"),
        (lambda m, x, h: 0.1 * h.pow(2).mean().item(), None),
        (lambda m, x, h: h.pow(2).mean().detach(), "note"),
        (lambda m, x, h: h.pow(2).mean(), None),
        (lambda m, x, h: torch.tensor(0.25), None),
        (lambda m, x, h: x.pow(2).mean(), None),
    ],
    ids=["argmax", "scaled number", "detach", "attached", "constant", "of data only"],
)
def test_constant_terms_of_the_loss(term: object, severity: str | None) -> None:
    model = make("mlp")

    def loss_fn(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
        h = m.features(x)
        return F.cross_entropy(m.head(h), y) + term(m, x, h)  # type: ignore[operator]

    with watched() as report:
        train(model, steps=5, loss_fn=loss_fn)
    assert [f.severity for f in report.findings if f.code == "G109"] == ([severity] if severity else [])


def test_a_gradient_penalty_without_create_graph_is_a_constant() -> None:
    def loss_fn(m: Mlp, x: Tensor, y: Tensor, create: bool) -> Tensor:
        x = x.requires_grad_()
        out = m(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=create, retain_graph=True)
        return F.cross_entropy(out, y) + 0.1 * (g.norm(dim=1) - 1).pow(2).mean()

    for create in (False, True):
        with watched() as report:
            train(make("mlp"), steps=5, loss_fn=lambda m, x, y, c=create: loss_fn(m, x, y, c))
        if create:
            assert loud(report) == []
        else:
            assert only(report, "G109").op == "grad"


# ---------------------------------------------------------------------- P202 to P205, P212


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_left_out_of_the_optimizer(kind: str) -> None:
    model = make(kind)
    with watched() as report:
        train(model, sgd(model.body.parameters()), steps=4)
    assert {f.code for f in report.findings} == {"P202"}
    assert "head" in {f.module for f in report.findings}


def test_unfreezing_needs_the_optimizer_to_know() -> None:
    for told in (False, True):
        model = make("mlp")
        model.body.requires_grad_(False)
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])

        def thaw(
            step: int, model: Mlp = model, optimizer: torch.optim.Optimizer = optimizer, told: bool = told
        ) -> None:
            if step == 4:
                model.body.requires_grad_(True)
                if told:
                    optimizer.add_param_group({"params": list(model.body.parameters())})

        with watched() as report:
            train(model, optimizer, steps=10, each=thaw)
        if told:
            assert loud(report) == []
        else:
            finding = only(report, "P202")
            assert finding.module == "body" and "unfrozen later" in (finding.cause or "") and finding.first_step <= 8


def test_a_replaced_head_leaves_stale_entries_in_the_optimizer() -> None:
    model = make("mlp")
    optimizer = sgd(model.parameters())
    model.head = nn.Linear(16, 3)
    with watched() as report:
        train(model, optimizer, steps=4)
    finding = only(report, "P204")
    assert finding.params == ["head.weight", "head.bias"]


def test_attacking_an_input_and_training_several_models_are_innocent() -> None:
    model = make("mlp").eval()
    noise = torch.zeros(8, 6, requires_grad=True)
    optimizer = sgd([noise])
    with watched() as report:
        train(model, optimizer, steps=5, loss_fn=lambda m, x, y: -F.cross_entropy(m(x + noise), y))
    assert loud(report) == []

    gen, critic = nn.Linear(3, 6), make("mlp")
    opt_g, opt_c = sgd(gen.parameters()), sgd(critic.parameters())
    with watched() as report:
        for _ in range(8):
            x, y = batch(critic)
            fake = gen(torch.randn(8, 3))
            opt_c.zero_grad()
            (F.cross_entropy(critic(x), y) + critic(fake.detach()).pow(2).mean()).backward()
            opt_c.step()
            opt_g.zero_grad()
            (-critic(fake).pow(2).mean()).backward()
            opt_g.step()
    assert loud(report) == []


def test_modules_in_a_plain_list_are_not_registered() -> None:
    class Stack(Mlp):
        def __init__(self, registered: bool) -> None:
            super().__init__()
            layers = [nn.Linear(16, 16) for _ in range(2)]
            self.layers = nn.ModuleList(layers) if registered else layers

        def features(self, x: Tensor) -> Tensor:
            h = self.body(x)
            for layer in self.layers:
                h = h + layer(h).tanh()
            return h

    for registered in (False, True):
        torch.manual_seed(0)
        with watched() as report:
            train(Stack(registered), steps=5)
        if registered:
            assert loud(report) == []
        else:
            finding = only(report, "P202")
            assert finding.module == "layers" and "not registered" in (finding.cause or "")


def test_frozen_in_the_optimizer_is_a_note_until_it_moves() -> None:
    model = make("mlp")
    model.body.requires_grad_(False)
    with watched() as report:
        train(model, steps=5)
    assert [(f.code, f.severity) for f in report.findings] == [("P203", "note")]

    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def freeze(step: int) -> None:
        if step == 1:
            model.head.requires_grad_(False)  # its .grad stays, and Adam's momentum goes on

    with watched() as report:
        for step in range(40):
            x, y = batch(model)
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            freeze(step)
    finding = only(report, "P203")
    assert finding.module == "head"


def test_a_parameter_twice() -> None:
    model = make("mlp")
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = sgd([*model.parameters(), model.head.weight])
    with watched() as report:
        train(model, optimizer, steps=3)
    assert only(report, "P205").params == ["head.weight"]

    model = make("mlp")
    first, second = sgd(model.parameters()), sgd(model.head.parameters())
    with watched() as report:
        for _ in range(5):
            x, y = batch(model)
            first.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()
    assert set(only(report, "P205").params) == {"head.weight", "head.bias"}

    model = make("mlp")  # each on its own loss: legitimate
    first, second = sgd(model.parameters()), sgd(model.head.parameters())
    with watched() as report:
        for _ in range(5):
            for optimizer in (first, second):
                x, y = batch(model)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert loud(report) == []


def test_a_freeze_that_freezes_nothing() -> None:
    def by_attribute(m: Mlp) -> None:
        m.head.requires_grad = False

    def by_typo(m: Mlp) -> None:
        for p in m.head.parameters():
            p.require_grad = False

    def properly(m: Mlp) -> None:
        m.head.requires_grad_(False)

    for freeze in (by_attribute, by_typo, properly):
        model = make("mlp")
        freeze(model)
        with watched() as report:
            train(model, steps=3)
        if freeze is properly:
            assert loud(report) == []
        else:
            codes = {f.code for f in report.findings}
            assert codes == {"P212"}
            assert all(f.source is not None and "False" in f.source.text for f in report.findings)


@pytest.mark.parametrize(("factor", "told"), [(0.4, True), (0.98, False)])
def test_a_learning_rate_that_has_vanished(factor: float, told: bool) -> None:
    model = make("mlp")
    optimizer = sgd(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
    with watched() as report:
        train(model, optimizer, steps=200, each=lambda step: schedule.step())
    if told:
        finding = only(report, "P208")
        assert "its learning rate has fallen to" in finding.message and "from 0.04" in finding.message  # seen in step 2
    else:
        assert loud(report) == []


@pytest.mark.parametrize(
    "call", ["freeze(model)", "pass", "freeze_well(model)", "if FLAG: freeze(model)", "freeze(model) if FLAG else None"]
)
def test_a_freeze_of_what_state_dict_returned(call: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def freeze(model):\n"
        "    for value in model.state_dict().values():\n"
        "        value.requires_grad = False\n"
        "def freeze_well(model):\n"
        "    for value in model.parameters():\n"
        "        value.requires_grad = False\n"
        "def main(model):\n"
        f"    {call}\n"
        "if __name__ == '__main__':\n"
        "    main(None)\n",
        encoding="utf-8",
    )
    model = make("mlp")
    had = {id(p) for p in model.parameters()}
    found = rules.find_state_dict_freeze(model, had_gradient=had, files=[str(script)])
    assert [f.source.line for f in found if f.source is not None] == ([3] if call == "freeze(model)" else [])


def test_a_class_with_a_setting_of_that_name_is_left_alone() -> None:
    class Embedding(nn.Module):
        def __init__(self, requires_grad: bool) -> None:
            super().__init__()
            self.requires_grad = requires_grad
            self.table = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    model = nn.Sequential(Embedding(False), make("mlp"))
    model.inputs = Mlp.inputs
    with watched() as report:
        train(model, steps=3)
    assert loud(report) == []


# ---------------------------------------------------------------------- P207, P208, P209, P210


def test_gradients_through_round_are_zero() -> None:
    def loss_fn(m: Mlp, x: Tensor, y: Tensor, straight: bool) -> Tensor:
        h = m.features(x)
        q = torch.round(h)  # CUT
        return F.cross_entropy(m.head(h + (q - h).detach() if straight else q), y)

    for straight in (False, True):
        with watched() as report:
            train(make("mlp"), steps=16, loss_fn=lambda m, x, y, s=straight: loss_fn(m, x, y, s))
        if straight:
            assert loud(report) == []
        else:
            finding = only(report, "P207")
            assert finding.op == "round" and finding.source is not None and "# CUT" in finding.source.text
            assert finding.first_step == 2


def test_zero_gradients_that_are_mathematics_or_patience_are_no_warning() -> None:
    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(6, 16)
            self.gate = nn.Parameter(torch.zeros(()))

        def features(self, x: Tensor) -> Tensor:
            return self.body(x) + self.gate * self.branch(x)

    torch.manual_seed(0)
    with watched() as report:
        train(Gated(), steps=20)
    assert loud(report) == []


def test_a_learning_rate_of_zero_and_weights_too_coarse_for_their_updates() -> None:
    model = make("mlp")
    with watched() as report:
        train(model, sgd(model.parameters(), lr=0.0), steps=20)
    assert "learning rate 0" in (only(report, "P208").cause or "")

    model = make("mlp").to(torch.bfloat16)

    def coarse(m: Mlp, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x.bfloat16()).float(), y)

    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    with watched() as report:
        train(model, sgd(model.parameters(), lr=1e-5), steps=20, loss_fn=coarse)
    assert "bfloat16" in (only(report, "P208").cause or "")


@pytest.mark.parametrize("clears", ["before", "after"])
def test_gradients_of_the_other_turn_are_added_when_cleared_after_the_step(clears: str) -> None:
    """A critic that is cleared right after its own step goes into the next one with gradients of the actor's loss."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 1), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_actor, of_critic = sgd(actor.parameters()), sgd(critic.parameters())
    with watched() as report:
        for _ in range(40):
            s, a = torch.randn(8, 3), torch.randn(8, 1)
            if clears == "before":
                of_critic.zero_grad()
            (critic(torch.cat([s, a], 1)) - s[:, :1]).pow(2).mean().backward()
            of_critic.step()
            if clears == "after":
                of_critic.zero_grad()
            of_actor.zero_grad()
            (-critic(torch.cat([s, actor(s)], 1)).mean()).backward()
            of_actor.step()
    assert loud(report) == (["P209"] if clears == "after" else [])


@pytest.mark.parametrize("what", ["output", "hinge", "squared hinge"])
def test_an_output_that_is_off_is_told_from_a_hinge_that_is_met(what: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.constant_(net[2].bias, -4.0)
    x = torch.randn(16, 6)
    off = torch.relu(net(x))
    loss = {
        "output": (off - x[:, :1].abs()).pow(2).mean(),
        "hinge": off.mean() + x.pow(2).mean(),
        "squared hinge": off.pow(2).mean() + x.pow(2).mean(),
    }[what]
    causes = rules.zero_gradient_causes(loss, dict(net.named_parameters()))
    assert len(causes) == 4
    assert all(cause.op == "relu" and cause.meant is (what != "output") for cause in causes.values())


def test_a_warm_up_from_zero_is_innocent() -> None:
    model = make("mlp")
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 10)
    with watched() as report:
        train(model, optimizer, steps=20, each=lambda _: schedule.step())
    assert loud(report) == []


def test_forgotten_zero_grad() -> None:
    for forgotten in (True, False):
        model = make("rnn")
        optimizer = sgd(model.parameters(), 1e-3)
        with watched() as report:
            for _ in range(6):
                x, y = batch(model)
                if not forgotten:
                    optimizer.zero_grad(set_to_none=False)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        if forgotten:
            finding = only(report, "P209")
            assert finding.source is not None and "backward()" in finding.source.text
        else:
            assert loud(report) == []


def test_zeroing_by_hand_is_zeroing() -> None:
    model = make("mlp")
    optimizer = sgd(model.parameters())
    with watched() as report:
        for step in range(10):
            x, y = batch(model)
            for p in model.parameters():
                if step % 2 and p.grad is not None:
                    p.grad.data.zero_()
                else:
                    p.grad = None
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert loud(report) == []


def test_vanishing_and_exploding_gradients() -> None:
    steady = [{f"l{i}.weight": 1.0 for i in range(6)}] * 6
    assert rules.find_gradient_scale(steady) == []
    vanishing = [{**look, "l0.weight": 1e-9} for look in steady]
    [note] = rules.find_gradient_scale(vanishing)
    assert note.severity == "note" and note.params == ["l0.weight"]
    assert rules.find_gradient_scale(vanishing, eps=1e-8)[0].severity == "warning"
    exploding = [*steady, {**steady[0], "l3.weight": 1e9}, {**steady[0], "l3.weight": 1e10}]
    assert rules.find_gradient_scale(exploding)[0].params == ["l3.weight"]


# ---------------------------------------------------------------------- in the Trainer, and what it costs


class Plain(Trainer):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


def hosted(model: Mlp, optimizer: torch.optim.Optimizer, **options: object) -> Report:
    report = Report()
    data = [batch(model) for _ in range(4)]
    trainer = Plain(model, optimizer, max_steps=8, guards="off", callbacks=gradient_guards(report), **options)
    trainer.fit(data)
    return report


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_in_the_trainer_faults_are_found_and_healthy_runs_are_not_accused(options: dict[str, object]) -> None:
    class Cut(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).data)

    healthy, cut = make("mlp"), Cut()
    assert loud(hosted(healthy, sgd(healthy.parameters()), **options)) == []
    assert only(hosted(cut, sgd(cut.parameters()), **options), "P201").module == "body"
    left = make("mlp")
    assert only(hosted(left, sgd(left.head.parameters()), **options), "P202").module == "body"


def test_a_compiled_model_is_not_looked_into() -> None:
    model = make("mlp")
    model.spare = nn.Linear(2, 2)
    model.compile(backend="eager")
    report = hosted(model, sgd(model.parameters()))
    assert only(report, "P201").module == "spare"


def test_the_change_detector_sees_each_kind_of_change() -> None:
    model = make("mlp")
    optimizer = sgd(model.body.parameters())

    def detector() -> ChangeDetector:
        return ChangeDetector(model, {"main": optimizer})

    d = detector()
    assert not d.model_changed() and not d.optimizers_changed({"main": optimizer})
    assert d.optimizers_changed({"renamed": optimizer})
    optimizer.add_param_group({"params": list(model.head.parameters())})
    assert d.optimizers_changed({"main": optimizer})
    for change in (
        lambda: model.head.requires_grad_(False),
        lambda: setattr(model, "head", nn.Linear(16, 3)),
        lambda: setattr(model, "extra", nn.Linear(2, 2)),
        lambda: setattr(model.head, "weight", nn.Parameter(torch.zeros(3, 16))),
    ):
        d = detector()
        change()
        assert d.model_changed()
