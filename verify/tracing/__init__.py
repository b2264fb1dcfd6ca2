"""Recordings of training runs: what every tensor was, as digests, and where two runs part."""
