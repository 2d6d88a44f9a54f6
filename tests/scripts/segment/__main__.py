"""A package run as `python -m segment`: relative imports, a config module, an engine."""

import sys

from . import config
from .engine import train

if __name__ == "__main__":
    assert __package__ == "segment", __package__
    train(config.Config(bug="--bug" in sys.argv))
