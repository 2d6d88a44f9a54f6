"""Batches: where a run is inside its data, how a batch of any structure is moved and counted."""
