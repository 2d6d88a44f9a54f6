"""Character model: an LSTM over long streams, truncated backpropagation through time."""

import sys

import torch
from torch import nn

BUG = "--bug" in sys.argv
TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 8
CHARS = sorted(set(TEXT))


class CharLM(nn.Module):
    def __init__(self, vocab, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, 12)
        self.lstm = nn.LSTM(12, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, state=None):
        y, state = self.lstm(self.embed(x), state)
        return self.out(y), state


def detach(state):
    return tuple(s.detach() for s in state)


def main():
    torch.manual_seed(5)
    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    streams = ids[: len(ids) // 4 * 4].view(4, -1)
    model = CharLM(len(CHARS))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        state, total, n = None, 0.0, 0
        for t in range(0, streams.shape[1] - 17, 16):
            x, y = streams[:, t : t + 16], streams[:, t + 1 : t + 17]
            logits, state = model(x, state)
            if not BUG:
                state = detach(state)
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total, n = total + loss.item(), n + 1
        print(f"epoch {epoch} perplexity {2.718281828 ** (total / n):.3f}")
    model.eval()
    with torch.no_grad():
        x, state, out = torch.tensor([[CHARS.index("t")]]), None, ["t"]
        for _ in range(30):
            logits, state = model(x, state)
            x = torch.multinomial(logits[:, -1].softmax(-1), 1)
            out.append(CHARS[x.item()])
    print("".join(out))
    print(sum(p.double().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()
