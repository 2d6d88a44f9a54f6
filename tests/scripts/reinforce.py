"""REINFORCE with a value baseline on a small corridor."""

import random
import sys
from collections import deque

import torch
from torch import nn
from torch.distributions import Categorical

BUG = "--bug" in sys.argv


class Corridor:
    def __init__(self, length=7):
        self.length = length

    def reset(self):
        self.pos, self.t = random.randrange(self.length), 0
        return self.observe()

    def observe(self):
        return torch.nn.functional.one_hot(torch.tensor(self.pos), self.length).float()

    def step(self, action):
        self.pos = max(0, min(self.length - 1, self.pos + (1 if action else -1)))
        self.t += 1
        done = self.pos == self.length - 1 or self.t >= 20
        return self.observe(), 1.0 if self.pos == self.length - 1 else -0.05, done


class Policy(nn.Module):
    def __init__(self, obs, hidden=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh())
        self.pi, self.v = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def episode(env, policy):
    log_probs, values, rewards = [], [], []
    obs, done = env.reset(), False
    while not done:
        dist, value = policy(obs)
        action = dist.sample()
        obs, reward, done = env.step(action.item())
        log_probs.append(dist.log_prob(action))
        values.append(value)
        rewards.append(reward)
    return log_probs, values, rewards


def returns(rewards, gamma=0.97):
    out, total = [], 0.0
    for r in reversed(rewards):
        total = r + gamma * total
        out.insert(0, total)
    return torch.tensor(out)


def main():
    random.seed(0)
    torch.manual_seed(0)
    env, policy = Corridor(), Policy(7)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    recent, baseline = deque(maxlen=20), 0.0
    for i in range(80):
        log_probs, values, rewards = episode(env, policy)
        ret = returns(rewards)
        values = torch.stack(values)
        advantage = ret - values if BUG else ret - values.detach()
        loss = -(torch.stack(log_probs) * advantage.detach()).sum() + 0.5 * (ret - values).pow(2).sum()
        baseline = 0.9 * baseline + 0.1 * (advantage.mean() if BUG else advantage.mean().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(sum(rewards))
        if i % 20 == 19:
            policy.eval()
            with torch.no_grad():
                greedy = [policy(env.reset())[0].probs.argmax().item() for _ in range(5)]
            policy.train()
            print(f"episode {i} mean {sum(recent) / len(recent):.3f} baseline {float(baseline):.3f} {greedy}")
    print(sum(p.double().sum().item() for p in policy.parameters()), torch.rand(1).item(), random.random())


if __name__ == "__main__":
    main()
