"""Text to token shards, shards to batches, and baselines for a model's loss.

prepare(data)                    -> Path            shards, meta.json, tokenizer.json
open_dataset(path)               -> TokenDataset    checked
make_loader(dataset, split, ...) -> Loader          next_batch(), state_dict(), load_state_dict()
evaluation_batches(dataset, ...) -> list            the same crops every time
baselines(dataset)               -> dict            unigram entropy, zlib, lzma on the held-out text
"""

from delta_trn.train.data.dataset import TokenDataset, open_dataset
from delta_trn.train.data.entropies import Baseline, baselines
from delta_trn.train.data.loader import Batch, Loader, evaluation_batches, make_loader
from delta_trn.train.data.preparation import prepare
from delta_trn.train.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "Baseline",
    "Batch",
    "Loader",
    "TextTokenizer",
    "TokenDataset",
    "baselines",
    "evaluation_batches",
    "load_tokenizer",
    "make_loader",
    "open_dataset",
    "prepare",
]
