"""Options of supervised fine-tuning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from .base.options import option
from .offline.offline_config import OfflineConfig

# Older values, and what they are called here.
RENAMED = {"packing_strategy": {"bfd-requeue": "bfd_split"}, "loss_type": {"chunked_nll": "nll"}}


@dataclass
class SFTConfig(OfflineConfig):
    """Configuration of `SFTTrainer`."""

    learning_rate: float = option(2e-5, "Initial learning rate.", ge=0)

    # --- Data ---
    dataset_text_field: str = option("text", "Column of plain texts.")
    source_column: str = option(
        "dataset_source",
        "Column that names where a row is from, as mixtures write it: loss/NAME is logged.",
    )
    completion_only_loss: bool | None = option(
        None, "Train on completions alone. None: where rows have a prompt and a completion."
    )
    assistant_only_loss: bool = option(False, "Train on the turns of the assistant alone.")
    expand_turns: bool = option(
        False, "One target for each turn of the assistant, in the context in which it is written."
    )
    long_rows: str | None = option(
        None,
        "Cut, drop or split rows over max_length, or stop with an error. None: truncation_mode.",
        choices=("cut", "drop", "split", "error"),
    )
    truncation_mode: str = option(
        "keep_start",
        "Which end of a row over max_length is kept.",
        choices=("keep_start", "keep_end"),
    )
    lazy_tokenization: bool = option(
        False, "Tokenize while training instead of before; not with packing or token budgets."
    )

    # --- Packing ---
    packing: bool = option(
        False, "A row of a micro-batch is a pack of documents with max_length tokens at most."
    )
    packing_strategy: str = option(
        "bfd",
        "bfd cuts long documents, bfd_split keeps their rest; wrapped lays all end to end and "
        "cuts every max_length tokens. Documents never see each other.",
        choices=("bfd", "bfd_split", "wrapped"),
    )
    wrapped_attends_across: bool = option(
        False, "With wrapped, documents in the same max_length tokens are one and see each other."
    )
    eval_packing: bool | None = option(None, "Pack evaluation sets. None: as packing.")

    # --- Loss ---
    loss_type: str = option(
        "nll",
        "nll: cross-entropy; dft: weighted with the probability of each token.",
        choices=("nll", "dft"),
    )

    def __post_init__(self) -> None:
        for name, values in RENAMED.items():
            if (old := getattr(self, name)) in values:
                warnings.warn(
                    f"{name}={old!r} is called {values[old]!r}.", FutureWarning, stacklevel=3
                )
                setattr(self, name, values[old])
        super().__post_init__()
        self._check_packs()
        if self.wrapped_attends_across and self.row_limit != "wrapped_across":
            raise ValueError(
                "wrapped_attends_across=True needs packing=True and packing_strategy='wrapped'."
            )
        strategy = self.packing_strategy
        if self.packing and strategy != "bfd" and self.long_rows is not None:
            raise ValueError(
                f"packing_strategy={strategy!r} says what is done with long rows: "
                f"leave out long_rows={self.long_rows!r}, or pack with 'bfd'."
            )

    def _check_packs(self) -> None:
        packs = self.packing or self.eval_packing
        if packs and self.max_length is None:
            raise ValueError("packing=True needs max_length: it is the size of a pack.")
        if self.lazy_tokenization and (packs or self.max_tokens_per_micro_batch):
            name = "packing" if packs else "max_tokens_per_micro_batch"
            raise ValueError(f"{name} needs the lengths of all rows: drop lazy_tokenization=True.")
        if packs and self.long_rows == "split":
            raise ValueError("With packing, long_rows='split' is packing_strategy='bfd_split'.")

    @property
    def row_limit(self) -> str:
        """What is done with rows over `max_length`, as `SupervisedDataset` calls it."""
        if not self.packing or self.packing_strategy == "bfd":
            return self.long_rows or self.truncation_mode
        across = "_across" * self.wrapped_attends_across
        return {"bfd_split": "split"}.get(self.packing_strategy, self.packing_strategy + across)
