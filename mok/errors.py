"""The errors of `mok`: each message says what was given, what is allowed and what to do.

They exist so that a caller can tell a wrong argument (fix the call) from wrong routing data (fix
the router) and from a request that this backend refuses. Nothing here knows about `verify`.
"""

from __future__ import annotations


class MoKError(Exception):
    """Anything that `mok` refuses."""


class InputError(MoKError, ValueError):
    """A shape, dtype, device, layout or setting is wrong.

    With a group, raised on all its ranks; by the Hopper backend, after the first call of a kind, on
    the rank that meets it.
    """


class RoutingError(MoKError, ValueError):
    """Expert ids were out of range or repeated inside a token; they were run as unused slots."""


class ContextError(MoKError, RuntimeError):
    """A forward context was used twice, or with a schedule that it does not belong to."""


class ExchangeError(MoKError, RuntimeError):
    """A kernel waited in vain for a peer or for its own work; the workspace is refused.

    Raised on the rank that waited.
    """


class UnsupportedError(MoKError, NotImplementedError):
    """What was asked for does not exist in this backend, for example MXFP8 weights."""
