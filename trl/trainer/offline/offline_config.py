"""Options shared by every trainer that learns from the examples of a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...algorithms.base import Algorithm
from ...data.preference_cutting import PreferenceLimits
from ...data.templates import clone_chat_template, read_template, take_template
from ...models.loading import end_with
from ...options import option
from ...sources import is_cached, raise_if_missing
from ..base.base_config import BaseConfig, ReferenceOptions
from ..base.keyword_arguments import EARLIER_ARGUMENTS, ignored, refused

PIECE_ON_ACCELERATOR = 8192  # tokens; not measured
NO_LOGITS = "logits are never held as a whole, and rows are not padded"
# Arguments of constructors that cannot be used, and why.
UNSUPPORTED = {
    "data_collator": "rows are laid out by the trainer, without padding. To choose the tokens in "
    "the loss, give `input_ids` with `labels`",
    "compute_loss_func": f"{NO_LOGITS}. To change the loss, override `loss`",
    "compute_metrics": f"{NO_LOGITS}. Metrics are in the log; others can be added in `loss`",
    "preprocess_logits_for_metrics": NO_LOGITS,
}


def check_unsupported(arguments: Mapping[str, object]) -> None:
    """Raise a ValueError if one of these arguments of a constructor, by name, is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} cannot be used: {UNSUPPORTED[name]}. Leave it out.")


@dataclass
class OfflineConfig(BaseConfig):
    """Data, lengths and micro-batches of trainers that learn from a dataset."""

    divides_rows = True
    piece_on_cpu: ClassVar[int] = 2048  # tokens
    without_meaning = BaseConfig.without_meaning | {
        "label_smoothing_factor": "logits are never held as a whole",
        "neftune_noise_alpha": "its noise depends on the width that rows are padded to",
        "auto_find_batch_size": (
            "after running out of memory, training continues with fewer rows of the batch at once "
            "(recover_from_oom)"
        ),
        "dataloader_drop_last": "the last micro-batch counts in proportion to its tokens",
    }

    max_length: int | None = option(1024, "Maximum tokens of a row. None: no limit.", ge=2)
    dataset_num_proc: int | None = option(
        None, "Processes that tokenize. None: chosen by the numbers of rows and cores.", ge=1
    )
    dataset_kwargs: dict | str | None = option(
        None,
        "Options of preparation (JSON); skip_prepare_dataset refuses rows that are not tokenized.",
    )
    shuffle_dataset: bool = option(
        False,
        "Shuffle a stream within a buffer. Other datasets are shuffled in each epoch anyway, "
        "unless train_sampling_strategy='sequential'.",
    )
    max_tokens_per_micro_batch: int | None = option(
        None, "Maximum tokens of a micro-batch; a longer row has a micro-batch of its own.", ge=1
    )
    remove_unused_columns: bool | None = option(True, "No effect: other columns are never read.")
    dataloader_pin_memory: bool = option(False, "Pin memory; not needed, because rows are lists.")
    chat_template_path: str | None = option(
        None, "File with a chat template, or a model whose template is copied."
    )
    eos_token: str | None = option(None, "Token that ends a text. None: the tokenizer's.")
    pad_token: str | None = option(
        None, "Token that fills padding; no result depends on it. None: the tokenizer's."
    )
    padding_free: bool = option(False, "No effect: rows are never padded.")
    use_liger_loss: bool = option(False, "No effect: logits are never held as a whole.")

    def _problems(self) -> dict[str, Any]:
        return super()._problems() | {
            "train_sampling_strategy='group_by_length' is not needed: rows are not padded. To "
            "bound the tokens of a micro-batch, use max_tokens_per_micro_batch": (
                self.train_sampling_strategy == "group_by_length"
            ),
        }

    @property
    def piece_tokens(self) -> int:
        """Maximum tokens of a chunk, see `BaseConfig`; the default depends on the device."""
        if self.max_tokens_per_piece is not None:
            return self.max_tokens_per_piece
        return self.piece_on_cpu if self.device.type == "cpu" else PIECE_ON_ACCELERATOR

    def make_algorithm(self) -> Algorithm[Any]:
        """Make the algorithm of these options."""
        raise NotImplementedError

    @property
    def order_seed(self) -> int | None:
        """Seed of the order of rows; None: the order of the dataset."""
        is_fixed = self.train_sampling_strategy == "sequential" and not self.shuffle_dataset
        return None if is_fixed else self.seed


@dataclass
class PreferenceConfig(ReferenceOptions, OfflineConfig):
    """Options of trainers that compare a policy with a reference on answers of prompts."""

    legacy_options = {
        **EARLIER_ARGUMENTS,
        **ignored("rows are not padded", "label_pad_token_id", "padding_value"),
        **ignored("the model tells by itself", "is_encoder_decoder"),
        **ignored("a ref_model that is passed is used", "force_use_ref_model"),
        **ignored("the head is found without it", "base_model_attribute_name"),
        **ignored("generate with the saved model", "generate_during_eval"),
        **ignored("the active adapter is trained", "model_adapter_name"),
        **refused(
            "the reference is a frozen copy of the adapter that a model brings", "ref_adapter_name"
        ),
        **refused("write them into the column 'tools' of the dataset", "tools"),
    }

    learning_rate: float = option(1e-6, "Initial learning rate.", ge=0)
    disable_dropout: bool = option(True, "Set the probability of every dropout layer to zero.")
    beta: float = option(0.1, "How strongly the policy is held near the reference.", ge=0)
    max_prompt_length: int | None = option(
        None, "Maximum length of a prompt; its last tokens are kept. None: no limit.", ge=1
    )
    max_completion_length: int | None = option(
        None, "Maximum length of an answer; its first tokens are kept. None: no limit.", ge=1
    )
    truncation_mode: str = option(
        "keep_start",
        "Which end to keep of a prompt and answer longer than max_length.",
        choices=("keep_start", "keep_end"),
    )
    use_logits_to_keep: bool = option(False, "No effect: logits of prompts are never computed.")
    precompute_ref_log_probs: bool = option(
        False,
        "Score all answers with the reference once, before training; results are kept on disk.",
    )
    precompute_ref_batch_size: int | None = option(
        None, "Prompts scored at once before training. None: per_device_train_batch_size.", ge=1
    )

    def _problems(self) -> dict[str, Any]:
        return super()._problems() | {
            "precompute_ref_log_probs=True cannot be used with sync_ref_model=True: the reference "
            "would move": self.precompute_ref_log_probs and self.sync_ref_model,
            f"beta={self.beta} trains nothing: log-ratios are multiplied by it, so the loss is the "
            "same for every model. Set beta above 0, such as beta=0.1": (
                self.all_losses_need_beta and not self.beta
            ),
        }

    @property
    def all_losses_need_beta(self) -> bool:
        """Whether no loss has a gradient without beta."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference at all."""
        return True

    @property
    def limits(self) -> PreferenceLimits:
        """The maximum lengths of prompts and answers."""
        return PreferenceLimits(
            max_length=self.max_length,
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
            truncation_mode=self.truncation_mode,
        )


def set_template(
    model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, args: OfflineConfig
) -> None:
    """Apply `chat_template_path`, `eos_token` and `pad_token` to a tokenizer and its model, if any.

    A token that is not in the tokenizer's vocabulary is a ValueError.
    """
    if (path := args.chat_template_path) is not None:
        if Path(path).suffix in (".jinja", ".j2"):
            if not Path(path).is_file():
                raise FileNotFoundError(f"chat_template_path={path!r}: there is no such file.")
            tokenizer.chat_template = read_template(path)
        else:
            _check_template_source(path)
            if model is None:
                take_template(tokenizer, path)
            else:
                clone_chat_template(model, tokenizer, path)
    if args.eos_token is not None:
        _check_token("eos_token", args.eos_token, tokenizer.eos_token, tokenizer)
        tokenizer.eos_token = args.eos_token
    if args.pad_token is not None:
        _check_token("pad_token", args.pad_token, tokenizer.pad_token, tokenizer)
        tokenizer.pad_token = args.pad_token
    if args.eos_token is not None and model is not None:
        end_with(model, tokenizer.eos_token_id)


def _check_token(
    option_name: str, token: str, current: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise a ValueError if a token is not in the vocabulary."""
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"{option_name}={token!r} is not in the tokenizer's vocabulary. Its own is {current!r}."
        )


def _check_template_source(name: str) -> None:
    """Raise an error if a model is neither a folder nor on the hub, which is asked once."""
    if Path(name).is_dir() or is_cached(name):
        return
    if Path(name).is_file():
        raise ValueError(f"chat_template_path={name!r}: the name of a template must end in .jinja.")
    raise_if_missing(name, f"chat_template_path={name!r}")
