"""What a run will need, before it runs: a step on fake tensors, and the switches that make it fit."""

from safetrain.planner.faking import Unforecastable
from safetrain.planner.forecast import Forecast, forecast

__all__ = ["Forecast", "Unforecastable", "forecast"]
