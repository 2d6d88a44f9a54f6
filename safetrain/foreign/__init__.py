"""Watching a loop that knows nothing of this package, and driving the same listeners as the Trainer."""
