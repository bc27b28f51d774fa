"""Options of supervised fine-tuning."""

import warnings
from dataclasses import dataclass
from typing import Any

from ..algorithms.sft import SFT
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
        "dataset_source", "Column with the name of a row's dataset; loss/NAME is logged for each."
    )
    completion_only_loss: bool | None = option(
        None, "Train on completions only. None: if rows have a prompt and a completion."
    )
    assistant_only_loss: bool = option(False, "Train on the turns of the assistant only.")
    expand_turns: bool = option(
        False, "Make a row of each turn of the assistant, with the context in which it was written."
    )
    long_rows: str | None = option(
        None,
        "Cut, drop or split rows over max_length, or stop with an error. None: cut them.",
        choices=("cut", "drop", "split", "error"),
    )
    truncation_mode: str = option(
        "keep_start", "Which end of long rows to keep.", choices=("keep_start", "keep_end")
    )
    lazy_tokenization: bool = option(
        False,
        "Tokenize during training, not before; not with packing or max_tokens_per_micro_batch.",
    )
    packing: bool = option(False, "Fill rows with several documents, up to max_length tokens.")
    packing_strategy: str = option(
        "bfd",
        "bfd cuts long documents, bfd_split also keeps their rest, wrapped concatenates all "
        "documents and cuts every max_length tokens. Documents do not attend to each other.",
        choices=("bfd", "bfd_split", "wrapped"),
    )
    wrapped_attends_across: bool = option(
        False, "With wrapped, documents within the same max_length tokens attend to each other."
    )
    eval_packing: bool | None = option(None, "Pack evaluation sets. None: the value of packing.")

    def __post_init__(self) -> None:
        for name, values in RENAMED.items():
            old = vars(self)[name]
            new = values.get(old) if isinstance(old, str) else None
            if new is not None:
                warnings.warn(f"{name}={old!r} is now {new!r}.", FutureWarning, stacklevel=4)
                setattr(self, name, new)
        super().__post_init__()

    def make_algorithm(self) -> SFT:
        """Make SFT of these options."""
        return SFT(loss_type=self.loss_type)

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
        """What is done with rows over `max_length`, as `DocumentLimits` calls it."""
        if not self.packing or self.packing_strategy == "bfd":
            return self.long_rows or self.truncation_mode
        across = "_across" * self.wrapped_attends_across
        return {"bfd_split": "split"}.get(self.packing_strategy, self.packing_strategy + across)
