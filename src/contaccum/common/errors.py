"""Errors whose message is meant for the user: what, where and the remedy, in one line."""


class DataError(ValueError):
    """A file that cannot be used; the message names it, the place in it and the remedy."""


class DivergedError(RuntimeError):
    """A training whose losses or weights are no numbers any more; the message says since when and what to do."""


class CheckpointError(RuntimeError):
    """A checkpoint or model that could not be written or read; the message says which and what to do."""
