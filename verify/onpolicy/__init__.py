"""The on-policy doctor: why sampler and trainer give the same tokens other probabilities."""
