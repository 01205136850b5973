"""Documents of a dataset on the Hugging Face Hub, streamed: nothing is downloaded before it is used."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from delta_trn.train.data.readers import text_of
from delta_trn.train.settings.errors import SourceError


@dataclass(frozen=True)
class HubSource:
    """A dataset such as HuggingFaceFW/fineweb-edu, subset sample-10BT. `revision` pins a commit."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    revision: str | None = None

    @property
    def name(self) -> str:
        parts = [self.dataset.rsplit("/", 1)[-1], self.subset or ""]
        return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(parts)).strip("-").lower()

    def settings(self) -> dict[str, Any]:
        """Returns what was asked for. The reader's position holds the commit that this meant."""
        return {
            "kind": "dataset",
            "name": self.dataset,
            "subset": self.subset,
            "split": self.split,
            "text_field": self.text_field,
            "revision": self.revision,
        }

    def size(self) -> None:
        return None

    def reader(self, position: dict[str, Any] | None = None) -> "HubReader":
        return HubReader(self, position)

    @cached_property
    def commit(self) -> str | None:
        """The commit that the revision means today, the same for every reader of this source."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            return HfApi().dataset_info(self.dataset, revision=self.revision).sha
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise SourceError(
                f"the Hub has no dataset {self.dataset!r} at revision {self.revision or 'main'}, and there "
                "is no such path here; check the name, or log in with `hf auth login` where it is gated"
            ) from error
        except Exception as error:  # requests, httpx, OfflineModeIsEnabled: it varies by the client's version
            raise self._unreachable(error) from error

    def open(self, revision: str | None) -> Any:
        """Returns the `datasets.IterableDataset` of one commit.

        Of parquet, which most datasets are, no column but the text is fetched and decoded.
        """
        import datasets

        def load(**options: Any) -> Any:
            where = {"split": self.split, "streaming": True, "revision": revision}
            return datasets.load_dataset(self.dataset, self.subset, **where, **options)

        try:
            dataset = load()
            if dataset.info.builder_name == "parquet" and self.text_field in (dataset.column_names or ()):
                return load(columns=[self.text_field])
            return dataset
        except ValueError as error:  # an unknown subset or split: its message lists the known ones
            raise SourceError(
                f"dataset {self.dataset!r} has no subset {self.subset!r} with split {self.split!r}: {error}"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> SourceError:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return SourceError(
            f"cannot reach dataset {self.dataset!r} on the Hugging Face Hub{offline} "
            f"({type(error).__name__}), and there is no such path here; download it where there is a "
            "network, and pass the local folder, .parquet, .jsonl or .txt file instead of the name"
        )


class HubReader:
    """Streams rows. Its position: the commit, the rows read, and the library's own state."""

    def __init__(self, source: HubSource, position: dict[str, Any] | None):
        self.skipped: Counter[str] = Counter()
        self._source = source
        position = position or {"revision": source.commit, "rows": 0, "state": None}
        self._revision, self._rows = position["revision"], position["rows"]
        self._dataset = source.open(self._revision)
        splits = self._dataset.info.splits or {}
        self._total = splits[source.split].num_examples if source.split in splits else None
        if position["state"] is not None:
            self._dataset.load_state_dict(position["state"])
        self._iterator: Any = None  # a generator

    def __iter__(self) -> Iterator[str]:
        self._iterator = iter(self._dataset)
        while (row := self._next()) is not None:
            self._rows += 1
            yield text_of(row, self._source.text_field, f"{self._source.dataset} row {self._rows}")

    def _next(self) -> Any:
        try:
            return next(self._iterator, None)
        except Exception as error:  # after the library's own retries; whatever its storage clients raise
            raise SourceError(
                f"reading dataset {self._source.dataset!r} stopped after row {self._rows} "
                f"({type(error).__name__}: {error}); run the same command again, it continues"
            ) from error

    def position(self) -> dict[str, Any]:
        return {"revision": self._revision, "rows": self._rows, "state": self._dataset.state_dict()}

    def fraction(self) -> float | None:
        return min(1.0, self._rows / self._total) if self._total else None

    def close(self) -> None:
        """Closes the stream: a generator of pyarrow's that outlives the interpreter complains."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
