"""Text to token shards, shards to batches, and baselines for a model's loss.

prepare(data)                    -> Path            shards, meta.json, tokenizer.json
open_dataset(path)               -> TokenDataset    checked
make_loader(dataset, split, ...) -> Loader          next_batch(), state_dict(), load_state_dict()
evaluation_batches(dataset, ...) -> list            the same crops every time
baselines(dataset)               -> dict            unigram entropy, zlib, lzma on the held-out text

>>> import pathlib, tempfile
>>> from delta_trn.train.settings.schema import DataSection
>>> text = "<|endoftext|>".join(f"{n} and {n} is {2 * n}." for n in range(100))
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = pathlib.Path(folder, "sums.txt").write_text(text)
...     data = DataSection(source=f"{folder}/sums.txt", folder=f"{folder}/shards", tokenizer="bytes")
...     dataset = open_dataset(prepare(data, show=False))
...     batch = make_loader(dataset, "train", batch=2, sequence=32, seed=0).next_batch()
...     crops = evaluation_batches(dataset, batch=2, sequence=8, batches=1)
...     ids = load_tokenizer(dataset.path).encode("1 and 1")
...     costs = baselines(dataset)
>>> batch.inputs.shape, len(crops), dataset.tokenizer.decode(ids), round(costs["uniform"].nats_per_token, 3)
(torch.Size([2, 32]), 1, '1 and 1', 5.557)
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
