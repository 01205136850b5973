"""What can go wrong around a run and its data: one class per remedy.

A message says what was found, what was expected and what to do. The command line prints it on one
line and exits with 2. Nothing here imports anything: it must be cheap.
"""


class TrainError(Exception):
    """Anything the person who started the command can put right."""


class UsageError(TrainError):
    """The command line names something that does not exist."""


class ConfigError(TrainError):
    """A key or a value of the configuration is wrong, or values do not go together."""


class RunFolderError(TrainError):
    """The run's folder is taken, missing, in use, or not one."""


class CheckpointError(TrainError):
    """A checkpoint is missing or damaged, or belongs to another configuration."""


class DiskFull(TrainError):
    """The disk is full or forbidden. What was whole before is whole still."""


class NotAPlainFile(TrainError):
    """A link, a pipe or a folder lies where a file is written, and could lead to other files."""


class Diverged(TrainError):
    """Loss, gradient or weights are not finite. Nothing of it was saved."""


class ProcessLost(TrainError):
    """Another process of the run ended, or does not answer. What was saved before is intact."""


class OutOfMemory(TrainError):
    """The device cannot hold a step. What was saved before it is intact."""


class DataError(TrainError):
    """Text, tokenizer, shards or a position in them are not what they should be."""


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
