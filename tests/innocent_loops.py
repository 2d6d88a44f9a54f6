"""Training loops that are right and look suspicious: each is a pattern that has been accused by some rule once.

Written the way people write them, short names and all. `PROGRAMS` lists them by name.
"""

# ruff: noqa: B007, B905, E741 (loops as people write them)

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(n=192, d=6):
    x = torch.randn(n, d)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def mlp(i=6, o=3, h=16):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, o))


def bn(i=6, o=3, h=16):
    return nn.Sequential(nn.Linear(i, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.1), nn.Linear(h, o))


PROGRAMS: dict[str, Callable[[], None]] = {}


def prog(f: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[f.__name__] = f
    return f


@prog
def dqn() -> None:
    """A target network, copied now and then."""
    q = mlp(4, 2)
    t = copy.deepcopy(q)
    opt = torch.optim.Adam(q.parameters(), 1e-3)
    for i in range(60):
        s, a, r, s2 = torch.randn(16, 4), torch.randint(0, 2, (16, 1)), torch.randn(16), torch.randn(16, 4)
        with torch.no_grad():
            tgt = r + 0.9 * t(s2).max(1)[0]
        l = F.smooth_l1_loss(q(s).gather(1, a).squeeze(1), tgt)
        opt.zero_grad()
        l.backward()
        opt.step()
        if i % 10 == 0:
            t.load_state_dict(q.state_dict())


@prog
def sac() -> None:
    """Three optimizers, a moving-average critic, a learnt temperature."""
    act = mlp(4, 2)
    c1 = mlp(6, 1)
    tc = copy.deepcopy(c1)
    la = torch.zeros(1, requires_grad=True)
    oa = torch.optim.Adam(act.parameters(), 1e-3)
    oc = torch.optim.Adam(c1.parameters(), 1e-3)
    ol = torch.optim.Adam([la], 1e-3)
    for i in range(40):
        s = torch.randn(16, 4)
        a = torch.randn(16, 2)
        with torch.no_grad():
            tgt = torch.randn(16, 1) + 0.9 * tc(torch.cat([s, act(s)], 1))
        lc = F.mse_loss(c1(torch.cat([s, a], 1)), tgt)
        oc.zero_grad()
        lc.backward()
        oc.step()
        m = act(s)
        lp = -(m**2).sum(1, keepdim=True)
        lact = (la.exp().detach() * lp - c1(torch.cat([s, m], 1))).mean()
        oa.zero_grad()
        lact.backward()
        oa.step()
        ll = -(la * (lp.detach() + 1)).mean()
        ol.zero_grad()
        ll.backward()
        ol.step()
        with torch.no_grad():
            for p, q in zip(tc.parameters(), c1.parameters()):
                p.mul_(0.99).add_(0.01 * q)


@prog
def sac_one_module() -> None:
    """The same parts in one module; the target is trainable and held by no optimizer."""

    class Ag(nn.Module):
        def __init__(s):
            super().__init__()
            s.actor = mlp(4, 2)
            s.critic = mlp(6, 1)
            s.target = copy.deepcopy(s.critic)

    ag = Ag()
    oa = torch.optim.Adam(ag.actor.parameters(), 1e-3)
    oc = torch.optim.Adam(ag.critic.parameters(), 1e-3)
    for i in range(40):
        s = torch.randn(16, 4)
        a = torch.randn(16, 2)
        with torch.no_grad():
            tgt = torch.randn(16, 1) + 0.9 * ag.target(torch.cat([s, ag.actor(s)], 1))
        oc.zero_grad()
        F.mse_loss(ag.critic(torch.cat([s, a], 1)), tgt).backward()
        oc.step()
        oa.zero_grad()
        (-ag.critic(torch.cat([s, ag.actor(s)], 1)).mean()).backward()
        oa.step()


@prog
def ppo() -> None:
    """Several epochs over data that was gathered without gradients."""
    net = nn.ModuleDict({"pi": mlp(4, 2), "v": mlp(4, 1)})
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for it in range(6):
        S, A, LP, R = [], [], [], []
        for t in range(8):
            s = torch.randn(4)
            with torch.no_grad():
                d = torch.distributions.Categorical(logits=net["pi"](s))
                a = d.sample()
            S.append(s)
            A.append(a)
            LP.append(d.log_prob(a))
            R.append(torch.randn(()))
        S, A, LP, R = map(torch.stack, (S, A, LP, R))
        for ep in range(4):
            d = torch.distributions.Categorical(logits=net["pi"](S))
            v = net["v"](S).squeeze(1)
            adv = (R - v).detach()
            ratio = (d.log_prob(A) - LP).exp()
            loss = (
                -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                + F.mse_loss(v, R)
                - 0.01 * d.entropy().mean()
            )
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()


@prog
def vae_anneal() -> None:
    """A KL term of weight 0 for the first steps."""

    class V(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Linear(6, 16)
            s.mu = nn.Linear(16, 2)
            s.lv = nn.Linear(16, 2)
            s.d = mlp(2, 6)

        def forward(s, x):
            h = torch.tanh(s.e(x))
            mu, lv = s.mu(h), s.lv(h)
            z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
            return s.d(z), mu, lv

    m = V()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    x, _ = data()
    for i in range(60):
        o, mu, lv = m(x[:32])
        kl = -0.5 * (1 + lv - mu**2 - lv.exp()).mean()
        beta = max(0, min(1, (i - 20) / 20))
        loss = F.mse_loss(o, x[:32]) + beta * kl
        opt.zero_grad()
        loss.backward()
        opt.step()


@prog
def moe() -> None:
    """Hard routing: experts without samples get no gradient."""

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.g = nn.Linear(6, 4)
            s.ex = nn.ModuleList(mlp() for _ in range(4))

        def forward(s, x):
            p = s.g(x).softmax(1)
            k = p.argmax(1)
            out = torch.zeros(len(x), 3)
            for e in range(4):
                m = k == e
                if m.any():
                    out[m] = s.ex[e](x[m]) * p[m, e : e + 1]
            return out

    m = M()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(40):
        x, y = data(8)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def wgan_gp() -> None:
    """A critic under a gradient penalty: its last bias has a zero gradient."""
    G = mlp(3, 6)
    D = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    og = torch.optim.Adam(G.parameters(), 1e-3)
    od = torch.optim.Adam(D.parameters(), 1e-3)
    for i in range(60):
        x, _ = data(16)
        z = torch.randn(16, 3)
        f = G(z).detach()
        e = torch.rand(16, 1)
        mix = (e * x + (1 - e) * f).requires_grad_()
        (g,) = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)
        ld = D(f).mean() - D(x).mean() + 10 * ((g.norm(dim=1) - 1) ** 2).mean()
        od.zero_grad()
        ld.backward()
        od.step()
        if i % 5 == 4:
            lg = -D(G(z)).mean()
            og.zero_grad()
            lg.backward()
            og.step()


@prog
def wgan_clip() -> None:
    """Weights clipped by hand after each step."""
    G = mlp(3, 6)
    D = mlp(6, 1)
    og = torch.optim.RMSprop(G.parameters(), 1e-3)
    od = torch.optim.RMSprop(D.parameters(), 1e-3)
    for i in range(40):
        x, _ = data(16)
        f = G(torch.randn(16, 3)).detach()
        od.zero_grad()
        (D(f).mean() - D(x).mean()).backward()
        od.step()
        for p in D.parameters():
            p.data.clamp_(-0.01, 0.01)
        if i % 3 == 2:
            og.zero_grad()
            (-D(G(torch.randn(16, 3))).mean()).backward()
            og.step()


@prog
def cyclegan() -> None:
    """Critics frozen for the turn of the generators, with BatchNorm."""
    A, B, DA, DB = mlp(6, 6), mlp(6, 6), bn(6, 1), bn(6, 1)
    og = torch.optim.Adam([*A.parameters(), *B.parameters()], 1e-3)
    od = torch.optim.Adam([*DA.parameters(), *DB.parameters()], 1e-3)
    for i in range(24):
        x, _ = data(16)
        y = torch.randn(16, 6)
        for p in [*DA.parameters(), *DB.parameters()]:
            p.requires_grad_(False)
        og.zero_grad()
        fy = A(x)
        fx = B(y)
        (
            F.mse_loss(B(fy), x) + F.mse_loss(A(fx), y) + (DB(fy) - 1).pow(2).mean() + (DA(fx) - 1).pow(2).mean()
        ).backward()
        og.step()
        for p in [*DA.parameters(), *DB.parameters()]:
            p.requires_grad_(True)
        od.zero_grad()
        (((DB(y) - 1) ** 2).mean() + (DB(fy.detach()) ** 2).mean()).backward()
        (((DA(x) - 1) ** 2).mean() + (DA(fx.detach()) ** 2).mean()).backward()
        od.step()


@prog
def maml() -> None:
    """Fast weights, differentiated through."""
    m = mlp()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(20):
        opt.zero_grad()
        for t in range(3):
            x, y = data(16)
            fast = dict(m.named_parameters())
            l = F.cross_entropy(torch.func.functional_call(m, fast, (x,)), y)
            g = torch.autograd.grad(l, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * gg for (n, p), gg in zip(fast.items(), g)}
            x, y = data(16)
            F.cross_entropy(torch.func.functional_call(m, fast, (x,)), y).div(3).backward()
        opt.step()


@prog
def first_order_maml() -> None:
    """A copy and an optimizer of its own for each task; gradients of the copies are handed to the original."""
    m = mlp()
    outer = torch.optim.Adam(m.parameters(), 1e-2)
    for i in range(20):
        outer.zero_grad()
        for t in range(2):
            x, y = data(16)
            fast = copy.deepcopy(m)
            inner = torch.optim.SGD(fast.parameters(), 0.02)
            for k in range(3):
                inner.zero_grad()
                F.cross_entropy(fast(x), y).backward()
                inner.step()
            x, y = data(16)
            grads = torch.autograd.grad(F.cross_entropy(fast(x), y), list(fast.parameters()))
            for p, g in zip(m.parameters(), grads):
                p.grad = g if p.grad is None else p.grad + g
        outer.step()


@prog
def lbfgs() -> None:
    """A closure."""
    m = mlp()
    opt = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4)
    x, y = data()

    def c():
        opt.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        return l

    for i in range(12):
        opt.step(c)


@prog
def sam() -> None:
    """Two backwards a step, at two points."""
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    for i in range(20):
        x, y = data(16)
        F.cross_entropy(m(x), y).backward()
        es = []
        with torch.no_grad():
            for p in m.parameters():
                e = 0.05 * p.grad / (p.grad.norm() + 1e-9)
                p.add_(e)
                es.append(e)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        with torch.no_grad():
            for p, e in zip(m.parameters(), es):
                p.sub_(e)
        opt.step()
        opt.zero_grad()


@prog
def swa() -> None:
    """Averaged weights and renewed statistics."""
    m = bn()
    sw = torch.optim.swa_utils.AveragedModel(m)
    opt = torch.optim.SGD(m.parameters(), 0.05)
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 32)
    for e in range(4):
        m.train()
        for a, b in ld:
            opt.zero_grad()
            F.cross_entropy(m(a), b).backward()
            opt.step()
        sw.update_parameters(m)
    torch.optim.swa_utils.update_bn(ld, sw)


@prog
def siamese_bn() -> None:
    """Two BatchNorm forwards a step."""
    m = bn()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    for i in range(20):
        x, _ = data(32)
        a, b = m(x), m(x + 0.1 * torch.randn_like(x))
        opt.zero_grad()
        F.mse_loss(a, b.detach()).add(F.mse_loss(b, a.detach())).backward()
        opt.step()


@prog
def amp_accum() -> None:
    """Loss scaling, accumulation, clipping and a schedule per epoch, in the right order."""
    m = mlp()
    opt = torch.optim.AdamW(m.parameters(), 1e-3)
    s = torch.amp.GradScaler("cpu")
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for e in range(3):
        for i, (a, b) in enumerate(ld):
            with torch.autocast("cpu", torch.float16):
                o = m(a)
            s.scale(F.cross_entropy(o.float(), b) / 4).backward()
            if i % 4 == 3:
                s.unscale_(opt)
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                s.step(opt)
                s.update()
                opt.zero_grad()
        sch.step()


@prog
def unfreeze() -> None:
    """A layer thawed and given to the optimizer."""
    m = bn()
    m[0].requires_grad_(False)
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.05)
    for i in range(30):
        if i == 15:
            m[0].requires_grad_(True)
            opt.add_param_group({"params": m[0].parameters(), "lr": 0.01})
        x, y = data(32)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def unfreeze_all_in_opt() -> None:
    """A frozen layer that the optimizer holds, thawed later."""
    m = mlp()
    m[0].requires_grad_(False)
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(40):
        if i == 25:
            m[0].requires_grad_(True)
        x, y = data(32)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def lora() -> None:
    """Low-rank factors, one of them zero at the start, over frozen weights."""

    class L(nn.Module):
        def __init__(s):
            super().__init__()
            s.w = nn.Linear(6, 16).requires_grad_(False)
            s.a = nn.Parameter(torch.randn(2, 6))
            s.b = nn.Parameter(torch.zeros(16, 2))
            s.h = nn.Linear(16, 3)

        def forward(s, x):
            return s.h(torch.relu(s.w(x) + x @ s.a.T @ s.b.T))

    m = L()
    opt = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3)
    for i in range(30):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def tied_lm_tokens() -> None:
    """Tied embeddings; tokens weighed exactly over the window."""

    class LM(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(20, 16)
            s.t = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            s.o = nn.Linear(16, 20, bias=False)
            s.o.weight = s.e.weight

        def forward(s, x):
            return s.o(s.t(s.e(x)))

    m = LM()
    opt = torch.optim.AdamW(m.parameters(), 1e-3)
    for i in range(16):
        w = [torch.randint(0, 20, (4, random.randint(4, 12))) for _ in range(3)]
        n = sum(t.numel() for t in w)
        opt.zero_grad()
        for t in w:
            (F.cross_entropy(m(t).flatten(0, 1), t.flatten(), reduction="sum") / n).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()


@prog
def tbptt() -> None:
    """Hidden states carried and detached."""
    r = nn.GRU(3, 16, batch_first=True)
    h = nn.Linear(16, 1)
    opt = torch.optim.Adam([*r.parameters(), *h.parameters()], 1e-3)
    for ep in range(4):
        st = None
        seq = torch.randn(8, 60, 3)
        for k in range(0, 60, 10):
            o, st = r(seq[:, k : k + 10], st)
            st = st.detach()
            opt.zero_grad()
            F.mse_loss(h(o), seq[:, k : k + 10, :1]).backward()
            opt.step()


@prog
def multitask_alternate() -> None:
    """Heads that take turns."""
    m = nn.ModuleDict({"b": nn.Linear(6, 16), "h0": nn.Linear(16, 3), "h1": nn.Linear(16, 3)})
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(30):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m[f"h{i // 10 % 2}"](torch.tanh(m["b"](x))), y).backward()
        opt.step()


@prog
def fgsm_eval() -> None:
    """Adversarial examples made in eval mode, their gradients thrown away."""
    m = bn()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    for i in range(20):
        x, y = data(32)
        m.eval()
        xa = x.clone().requires_grad_()
        F.cross_entropy(m(xa), y).backward()
        adv = (xa + 0.1 * xa.grad.sign()).detach()
        m.train()
        opt.zero_grad()
        F.cross_entropy(m(adv), y).backward()
        opt.step()


@prog
def moco_bn() -> None:
    """A momentum encoder whose BatchNorm is in train mode."""
    q = bn(6, 8)
    k = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.SGD(q.parameters(), 0.05)
    for i in range(20):
        x, _ = data(32)
        with torch.no_grad():
            for a, b in zip(k.parameters(), q.parameters()):
                a.mul_(0.9).add_(0.1 * b)
            kk = F.normalize(k(x), dim=1)
        qq = F.normalize(q(x), dim=1)
        opt.zero_grad()
        F.cross_entropy(qq @ kk.T / 0.1, torch.arange(32)).backward()
        opt.step()


@prog
def pcgrad() -> None:
    """Gradients per task, combined by hand."""
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    for i in range(20):
        gs = []
        for t in range(2):
            x, y = data(16)
            opt.zero_grad()
            F.cross_entropy(m(x), y).backward()
            gs.append([p.grad.clone() for p in m.parameters()])
        for p, a, b in zip(m.parameters(), *gs):
            p.grad = (a + b) / 2
        opt.step()


@prog
def plateau_onecycle() -> None:
    """A schedule per step and one by validation."""
    for kind in (0, 1):
        m = bn()
        opt = torch.optim.SGD(m.parameters(), 0.05)
        x, y = data()
        ld = DataLoader(TensorDataset(x, y), 32, shuffle=True)
        sch = (
            torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
            if kind
            else torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=24)
        )
        for e in range(4):
            m.train()
            for a, b in ld:
                opt.zero_grad()
                l = F.cross_entropy(m(a), b)
                l.backward()
                opt.step()
                if not kind:
                    sch.step()
            m.eval()
            with torch.no_grad():
                v = F.cross_entropy(m(x), y).item()
            if kind:
                sch.step(v)


@prog
def perceptual() -> None:
    """A fixed network in the loss, in eval mode, never frozen."""
    vgg = bn(6, 8).eval()
    m = mlp(6, 6)
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(20):
        x, _ = data(16)
        opt.zero_grad()
        F.mse_loss(vgg(m(x)), vgg(x)).backward()
        opt.step()


@prog
def vqvae() -> None:
    """Straight-through quantisation with a learnt codebook."""

    class V(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = mlp(6, 4)
            s.d = mlp(4, 6)
            s.cb = nn.Parameter(torch.randn(8, 4))

        def forward(s, x):
            z = s.e(x)
            k = torch.cdist(z, s.cb).argmin(1)
            q = s.cb[k]
            l = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            return s.d(z + (q - z).detach()), l

    m = V()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(30):
        x, _ = data(32)
        o, l = m(x)
        opt.zero_grad()
        (F.mse_loss(o, x) + l).backward()
        opt.step()


@prog
def vq_ema() -> None:
    """The same with a codebook that is moved by hand."""

    class V(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = mlp(6, 4)
            s.d = mlp(4, 6)
            s.register_buffer("cb", torch.randn(8, 4))

        def forward(s, x):
            z = s.e(x)
            with torch.no_grad():
                k = torch.cdist(z, s.cb).argmin(1)
                q = s.cb[k]
                for j in range(8):
                    if (k == j).any():
                        s.cb[j].lerp_(z[k == j].mean(0), 0.1)
            return s.d(z + (q - z).detach()), 0.25 * F.mse_loss(z, q)

    m = V()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(30):
        x, _ = data(32)
        o, l = m(x)
        opt.zero_grad()
        (F.mse_loss(o, x) + l).backward()
        opt.step()


@prog
def style_transfer() -> None:
    """The optimizer trains an image."""
    f = mlp(6, 8)
    img = torch.randn(1, 6, requires_grad=True)
    opt = torch.optim.LBFGS([img], max_iter=3)
    t = torch.randn(1, 8)

    def c():
        opt.zero_grad()
        l = F.mse_loss(f(img), t)
        l.backward()
        return l

    for i in range(8):
        opt.step(c)


@prog
def deep_supervision() -> None:
    """Two losses of one batch, one after the other."""
    m = nn.ModuleDict({"a": nn.Linear(6, 16), "b": nn.Linear(16, 16), "o1": nn.Linear(16, 3), "o2": nn.Linear(16, 3)})
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 32)
    for e in range(3):
        for a, b in ld:
            opt.zero_grad()
            h = torch.tanh(m["a"](a))
            h2 = torch.tanh(m["b"](h))
            F.cross_entropy(m["o1"](h), b).backward(retain_graph=True)
            F.cross_entropy(m["o2"](h2), b).backward()
            opt.step()


@prog
def gumbel() -> None:
    """Hard samples with a soft gradient."""
    m = nn.ModuleDict({"e": nn.Linear(6, 4), "d": nn.Linear(4, 3)})
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(30):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m["d"](F.gumbel_softmax(m["e"](x), hard=True)), y).backward()
        opt.step()


@prog
def rezero_actnorm() -> None:
    """Gates of zero, and an initialisation by the first batch."""

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(6, 16)
            s.l = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            s.al = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(3))
            s.sc = nn.Parameter(torch.ones(16))
            s.init = False
            s.o = nn.Linear(16, 3)

        def forward(s, x):
            h = s.i(x)
            if not s.init:
                with torch.no_grad():
                    s.sc.copy_(1 / h.std(0))
                    s.init = True
            h = h * s.sc
            for a, l in zip(s.al, s.l):
                h = h + a * torch.relu(l(h))
            return s.o(h)

    m = M()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    for i in range(30):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def warmup_zero_lr_group() -> None:
    """A parameter group whose rate is 0 for a while."""
    m = mlp()
    opt = torch.optim.AdamW([{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2].parameters(), "lr": 1e-3}])
    for i in range(60):
        if i == 40:
            opt.param_groups[0]["lr"] = 1e-4
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()


@prog
def pseudo_label_restored() -> None:
    """Labels made in eval mode, which is left again."""
    m = bn()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 32)
    for e in range(3):
        m.train()
        for a, b in ld:
            m.eval()
            with torch.no_grad():
                pl = m(a + 0.1).argmax(1)
            m.train()
            opt.zero_grad()
            (F.cross_entropy(m(a), b) + F.cross_entropy(m(a + 0.1), pl)).backward()
            opt.step()


@prog
def noeval_no_dropout() -> None:
    """An evaluation without eval(), of a model that does not care."""
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 32)
    v = DataLoader(TensorDataset(x, y), 64)
    for e in range(3):
        for a, b in ld:
            opt.zero_grad()
            F.cross_entropy(m(a), b).backward()
            opt.step()
        with torch.no_grad():
            [m(a) for a, b in v]


@prog
def dcgan_samples() -> None:
    """Samples drawn in train mode; gradients of the critic from the turn of the generator."""
    G = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    D = mlp(6, 1)
    og = torch.optim.Adam(G.parameters(), 1e-3)
    od = torch.optim.Adam(D.parameters(), 1e-3)
    x, _y = data()
    ld = DataLoader(TensorDataset(x), 32)
    fixed = torch.randn(16, 3)
    for e in range(3):
        for (a,) in ld:
            D.zero_grad()
            l1 = F.binary_cross_entropy_with_logits(D(a), torch.ones(len(a), 1))
            l1.backward()
            f = G(torch.randn(len(a), 3))
            l2 = F.binary_cross_entropy_with_logits(D(f.detach()), torch.zeros(len(a), 1))
            l2.backward()
            od.step()
            G.zero_grad()
            F.binary_cross_entropy_with_logits(D(f), torch.ones(len(a), 1)).backward()
            og.step()
        with torch.no_grad():
            G(fixed)


@prog
def last_short_batch_accum() -> None:
    """A short window and a short batch at the end of the epoch."""
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    x, y = data(190)
    ld = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    for e in range(3):
        for i, (a, b) in enumerate(ld):
            w = min(4, len(ld) - i // 4 * 4)
            (F.cross_entropy(m(a), b) / w).backward()
            if i % 4 == 3 or i + 1 == len(ld):
                opt.step()
                opt.zero_grad()


@prog
def grad_by_hand() -> None:
    """No optimizer at all."""
    m = mlp()
    for i in range(20):
        x, y = data(16)
        F.cross_entropy(m(x), y).backward()
        with torch.no_grad():
            for p in m.parameters():
                p -= 0.05 * p.grad
                p.grad.zero_()


@prog
def checkpoint_rollback() -> None:
    """Weights and optimizer taken back in the middle of a run."""
    pth = os.path.join(tempfile.mkdtemp(), "b.pt")
    m = mlp()
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    sch = torch.optim.lr_scheduler.StepLR(opt, 1)
    x, y = data()
    ld = DataLoader(TensorDataset(x, y), 32)
    for e in range(4):
        for a, b in ld:
            opt.zero_grad()
            F.cross_entropy(m(a), b).backward()
            opt.step()
        sch.step()
        if e == 1:
            torch.save({"model": m.state_dict(), "optimizer": opt.state_dict(), "epoch": e}, pth)
        if e == 2:
            c = torch.load(pth)
            m.load_state_dict(c["model"])
            opt.load_state_dict(c["optimizer"])
            assert c["epoch"] == 1


@prog
def finetune_from_ckpt() -> None:
    """Weights to start from."""
    pth = os.path.join(tempfile.mkdtemp(), "b.pt")
    src = mlp()
    o = torch.optim.Adam(src.parameters())
    torch.save({"model": src.state_dict(), "optimizer": o.state_dict(), "epoch": 3}, pth)
    c = torch.load(pth)
    m = mlp()
    m.load_state_dict(c["model"])
    opt = torch.optim.SGD(m.parameters(), 0.01)
    sch = torch.optim.lr_scheduler.StepLR(opt, 1)
    for e in range(12):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()
        sch.step()


@prog
def ema_module_in_train() -> None:
    """A mean teacher in train mode."""
    m = bn()
    ema = copy.deepcopy(m)
    for p in ema.parameters():
        p.detach_()
    opt = torch.optim.SGD(m.parameters(), 0.05)
    for i in range(20):
        x, y = data(32)
        with torch.no_grad():
            t = ema(x)
        opt.zero_grad()
        (F.cross_entropy(m(x), y) + F.mse_loss(m(x), t)).backward()
        opt.step()
        for a, b in zip(ema.parameters(), m.parameters()):
            a.data.mul_(0.9).add_(b.data, alpha=0.1)


@prog
def rnd() -> None:
    """A random network that is never trained."""
    pred = mlp(6, 8)
    tgt = mlp(6, 8)
    opt = torch.optim.Adam(pred.parameters(), 1e-3)
    for i in range(20):
        x, _ = data(16)
        t = tgt(x).detach()
        opt.zero_grad()
        F.mse_loss(pred(x), t).backward()
        opt.step()


@prog
def two_phase() -> None:
    """A second optimizer over other parameters, later."""
    e, d = mlp(6, 4), mlp(4, 6)
    o1 = torch.optim.Adam([*e.parameters(), *d.parameters()], 1e-3)
    x, y = data()
    for i in range(15):
        o1.zero_grad()
        F.mse_loss(d(e(x)), x).backward()
        o1.step()
    h = nn.Linear(4, 3)
    o2 = torch.optim.Adam([*e.parameters(), *h.parameters()], 1e-3)
    for i in range(15):
        o2.zero_grad()
        F.cross_entropy(h(e(x)), y).backward()
        o2.step()


@prog
def linear_probe_nograd() -> None:
    """A probe on a network that is in no optimizer."""
    e, h = bn(6, 8).eval(), nn.Linear(8, 3)
    opt = torch.optim.Adam(h.parameters(), 1e-3)
    x, y = data()
    for i in range(15):
        with torch.no_grad():
            f = e(x)
        opt.zero_grad()
        F.cross_entropy(h(f), y).backward()
        opt.step()


@prog
def an_optimizer_of_ones_own() -> None:
    """Half of the model is trained by a class that torch does not know."""

    class Momentum:
        def __init__(self, params: object) -> None:
            self.params = list(params)
            self.m = [torch.zeros_like(p) for p in self.params]

        @torch.no_grad()
        def step(self) -> None:
            for p, m in zip(self.params, self.m):
                m.mul_(0.9).add_(p.grad)
                p.sub_(0.01 * m)
                p.grad = None

    m = mlp()
    opt, own = torch.optim.SGD(m[0].parameters(), 0.05), Momentum(m[2].parameters())
    for i in range(20):
        x, y = data(16)
        opt.zero_grad()
        F.cross_entropy(m(x), y).backward()
        opt.step()
        own.step()


@prog
def graph_net_with_a_sparse_buffer() -> None:
    """The adjacency matrix is a sparse buffer, which has no storage; evaluated on the whole graph after each step."""
    x, y = data(40)
    links = (torch.rand(40, 40) < 0.1).float() + torch.eye(40)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("links", (links / links.sum(1, keepdim=True)).to_sparse())
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x):
            return torch.sparse.mm(self.links, self.second(torch.sparse.mm(self.links, self.first(x)).relu()))

    net = Net()
    opt = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=5e-4)
    for i in range(40):
        net.train()
        opt.zero_grad()
        F.cross_entropy(net(x)[:20], y[:20]).backward()
        opt.step()
        net.eval()
        with torch.no_grad():
            (net(x)[20:].argmax(1) == y[20:]).float().mean().item()
