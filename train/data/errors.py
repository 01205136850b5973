"""The data's errors, under their old address until every import names `train.settings.errors`."""

from delta_trn.train.settings.errors import (
    DataError,
    DiskFull,
    PositionMismatch,
    SettingsDiffer,
    ShardError,
    SourceError,
    TokenizerError,
)

WriteError = DiskFull
__all__ = [
    "DataError",
    "PositionMismatch",
    "SettingsDiffer",
    "ShardError",
    "SourceError",
    "TokenizerError",
    "WriteError",
]
