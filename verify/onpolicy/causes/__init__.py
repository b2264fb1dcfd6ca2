"""Why sampler and trainer disagree: one detector per cause, and the order of what they found."""
