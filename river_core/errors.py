"""Errors whose text is meant for the person at the keyboard: what happened, and one thing to do."""


class RiverError(Exception):
    """Base of every error that a user can cause or mend; `str(error)` is one plain sentence or two."""


class InputError(RiverError):
    """A prompt, threshold, length or sampling value that cannot be used."""


class LoadError(RiverError):
    """A model that cannot be found, read, verified, or is of an unsupported kind."""


class NotFinite(RiverError):
    """Scores that are no numbers any more: nothing can be drawn from them."""

    def __init__(self):
        super().__init__("The model's scores are not finite numbers any more: an overflow. Try --dtype bfloat16 or float32.")
