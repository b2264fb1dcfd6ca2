"""Timing against peers; each module is one benchmark that states its protocol and machine."""
