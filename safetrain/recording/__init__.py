"""Instruments over one step: what its operations did, what its graph saved, the same again without a trace."""
