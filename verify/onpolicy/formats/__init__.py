"""Readers of the files that samplers and trainers leave: one module per family of formats."""
