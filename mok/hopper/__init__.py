"""The Hopper backend's host side: what the layer's kernels are given, and how they are launched.

It exists apart from the portable backend because it owns memory that kernels of several launches
share (rings, flags, counters). Nothing here computes: the bits are those of csrc/moe. Refuses any
device but one of compute capability 9.0.
"""
