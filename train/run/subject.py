"""What a run would train on and with, for those who look at training without a run's folder."""

import torch

from delta_trn.train.data import TokenDataset
from delta_trn.train.run.setup import _dataset, _resolved, _with_data
from delta_trn.train.settings.schema import RunConfig


def subject(config: RunConfig) -> tuple[RunConfig, TokenDataset]:
    """The configuration without `auto`, its vocabulary known, this process's backend chosen; and its data."""
    config, _ = _resolved(config)
    dataset = _dataset(config)
    return _with_data(config, dataset), dataset


def resolved(config: RunConfig) -> tuple[RunConfig, torch.device]:
    """The configuration without `auto`, this process's backend chosen; and its device."""
    return _resolved(config)


def data_of(config: RunConfig) -> TokenDataset:
    """The prepared tokens of a configuration; prepares them where that has not been done."""
    return _dataset(config)
