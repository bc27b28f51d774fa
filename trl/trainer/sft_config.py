"""Options of supervised fine-tuning."""

import warnings
from dataclasses import dataclass
from typing import Any

from ..options import option
from .offline.offline_config import OfflineConfig

# Older values, and what they are called here.
RENAMED = {"packing_strategy": {"bfd-requeue": "bfd_split"}, "loss_type": {"chunked_nll": "nll"}}


@dataclass
class SFTConfig(OfflineConfig):
    """Configuration of `SFTTrainer`."""

    learning_rate: float = option(2e-5, "Initial learning rate.", ge=0)
    loss_type: str = option(
        "nll", "nll: cross-entropy; dft: nll times token probability.", choices=("nll", "dft")
    )
    dataset_text_field: str = option("text", "Column of plain texts.")
    source_column: str = option(
        "dataset_source", "Column of mixtures that names a row's dataset: loss/NAME is logged."
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
        "keep_start", "Which end of long rows is kept.", choices=("keep_start", "keep_end")
    )
    lazy_tokenization: bool = option(
        False, "Tokenize during training, not before it; excludes packing and token budgets."
    )
    packing: bool = option(False, "A row is a pack of documents with at most max_length tokens.")
    packing_strategy: str = option(
        "bfd",
        "bfd cuts long documents, bfd_split keeps their rest; wrapped lays all end to end and "
        "cuts every max_length tokens. Documents never see each other.",
        choices=("bfd", "bfd_split", "wrapped"),
    )
    wrapped_attends_across: bool = option(
        False, "With wrapped, documents within the same max_length tokens see each other as one."
    )
    eval_packing: bool | None = option(None, "Pack evaluation sets. None: the value of packing.")

    def __post_init__(self) -> None:
        for name, values in RENAMED.items():
            if new := values.get(old := getattr(self, name)):
                warnings.warn(f"{name}={old!r} is now {new!r}.", FutureWarning, stacklevel=4)
                setattr(self, name, new)
        super().__post_init__()

    def _problems(self) -> dict[str, Any]:
        packs, given = self.packing or self.eval_packing, self.long_rows
        by_length = "packing" if packs else "max_tokens_per_micro_batch"
        across = self.wrapped_attends_across and self.row_limit != "wrapped_across"
        return super()._problems() | {
            "packing=True needs max_length, the size of a pack": packs and not self.max_length,
            f"{by_length} needs the lengths of all rows: leave out lazy_tokenization=True": (
                self.lazy_tokenization and (packs or self.max_tokens_per_micro_batch)
            ),
            "With packing, set packing_strategy='bfd_split' instead of long_rows='split'": (
                packs and given == "split"
            ),
            "wrapped_attends_across=True needs packing=True and packing_strategy='wrapped'": across,
            f"packing_strategy={self.packing_strategy!r} says what is done with long rows: leave "
            f"out long_rows={given!r}, or pack with 'bfd'": given not in (None, self.row_limit),
        }

    @property
    def row_limit(self) -> str:
        """What is done with rows over `max_length`, as `SupervisedDataset` calls it."""
        if not self.packing or self.packing_strategy == "bfd":
            return self.long_rows or self.truncation_mode
        across = "_across" * self.wrapped_attends_across
        return {"bfd_split": "split"}.get(self.packing_strategy, self.packing_strategy + across)
