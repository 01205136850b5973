"""What can be wrong with text, tokenizers, shards and positions, one class a remedy.

All derive from DataError, whose message is complete: what was found, what was expected, what to do.
"""


class DataError(ValueError):
    """Anything the caller of train.data can put right."""


class SourceError(DataError):
    """The text cannot be read, or yields nothing to train or to validate on."""


class TokenizerError(DataError):
    """The tokenizer cannot be had, or does not fit the data."""


class ShardError(DataError):
    """A token file or its meta.json is not what it says it is."""


class SettingsDiffer(DataError):
    """The folder holds a preparation with other settings."""


class PositionMismatch(DataError):
    """A saved loader position belongs to other data, or to another arrangement of ranks."""


class WriteError(DataError):
    """The disk refused; nothing half-written counts as complete."""
