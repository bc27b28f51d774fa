"""Reward models: classifiers that score the better of two answers higher."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..data.encode import TextEncoder
from ..data.preference_cutting import PreferenceLimits
from ..data.preference_rows import Learner
from ..data.rows import AnswerRows
from ..data.streams import PreparedStream
from ..models.packed_layout import plain_layout
from ..models.scorer import Reader
from ..models.unwrap import causal_model, score_layer
from ..models.value_model import ValueReader
from ..ops.masking import masked_sum
from ..ops.preference_losses import ranking_loss
from ..types import Mode
from .base.best_metric import EVERY_EVALUATION
from .model_card import Method
from .offline.batches import prepare_answers
from .offline.offline_trainer import OfflineTrainer
from .reward_config import RewardConfig


class RewardTrainer(OfflineTrainer):
    """Trains a sequence classifier with one label to score the better answer of a pair higher.

    The loss of an optimizer step is the mean of -log sigmoid(better - worse - margin) over all its
    pairs of answers. The score is read at the last token of a row, whatever fills the padding.

    The model is a sequence classifier with one label; a name is loaded as one. Datasets have
    `chosen` and `rejected`, with `prompt` and `margin` if there are any; or `prompt` with `answers`
    and their `ranks` (1 is best). With `peft_config` an adapter and the layer of the score are
    trained. Arguments are those of `OfflineTrainer`.
    """

    config_class = RewardConfig
    learner = Learner("A reward model", ("pair", "ranked"))
    evaluation_metrics = EVERY_EVALUATION | {
        "accuracy",
        "margin",
        "max_reward",
        "mean_reward",
        "min_reward",
    }
    method = Method("Reward", "reward-trainer", card="reward_model_card.md")

    def adapt(self, model: Any, tokenizer: PreTrainedTokenizerBase, args: RewardConfig) -> None:
        """Refuse a model that does not score; see `OfflineTrainer`."""
        model = causal_model(model)
        if model.can_generate():
            raise TypeError(
                f"model is a {type(model).__name__}, which gives no score. Pass its name, or a "
                "model loaded with AutoModelForSequenceClassification and num_labels=1."
            )
        if model.config.num_labels != 1:
            raise ValueError(
                f"The model has num_labels={model.config.num_labels}: a reward model has one. Load "
                "it with num_labels=1."
            )
        super().adapt(model, tokenizer, args)

    def prepare_dataset(
        self, dataset: Any, encoder: TextEncoder, args: RewardConfig, mode: Mode
    ) -> Any:
        """Tokenize, and leave out what is over `max_length`."""
        limits = PreferenceLimits(max_length=args.max_length, truncation_mode="drop")
        answers = prepare_answers(dataset, encoder, args, limits, learner=self.learner)
        return answers if isinstance(answers, PreparedStream) else answers.checked(str(limits))

    def weigh(self, rows: AnswerRows) -> Tensor:
        """Count the pairs (1,)."""
        return better_answers(rows).sum()[None]

    def reader(self, model: nn.Module) -> Reader:
        """The layer of the score, at the last token of each row."""
        layer = score_layer(model)
        return OwnForward() if layer is None else ValueReader(layer, at_last_token=True)

    def score(self, model: nn.Module, rows: AnswerRows) -> Tensor:
        """Score prompts with their answers: (F,)."""
        flat, reader = rows.flat, self.reader(model)
        if reader.can_pack:
            ((found, *_),), _ = self.scorer.read(model, flat, [reader])
            scores = torch.as_tensor(found)
        else:  # a classifier that reads all tokens of a prompt with its answer
            pad_id, args = self.processing_class.pad_token_id, self.args
            layout = plain_layout(flat, pad_id, args.device, args.pad_to_multiple_of)
            names = ("input_ids", "attention_mask")  # of which the mask is missing without padding
            inputs = {name: layout.inputs[name] for name in names if name in layout.inputs}
            scores = model(**inputs).logits[:, 0].float()
        self.guard.watch("score", scores, flat)
        return scores

    def loss_of(self, scores: Tensor, rows: AnswerRows) -> Tensor:
        """Return the sum of the losses of all pairs (1,)."""
        values = rows.by_group(scores)
        better, worse = values[:, :, None], values[:, None, :]
        margins = rows.values["margin"][:, None, None].to(values.dtype)
        losses = ranking_loss(better, worse, margins)
        if self.args.center_rewards_coefficient is not None:
            losses = losses + self.args.center_rewards_coefficient * (better + worse).square()
        counted = better_answers(rows)
        self._record(values.detach(), counted, rows)
        return masked_sum(losses, counted)[None]

    def _record(self, values: Tensor, counted: Tensor, rows: AnswerRows) -> None:
        store, pairs = self.metrics[rows.mode], counted.sum()
        difference = values[:, :, None] - values[:, None, :]
        store.mean("accuracy", ((difference > 0) & counted).sum(), pairs)
        store.mean("margin", masked_sum(difference, counted), pairs)
        known = (rows.values["lengths"] > 0) & rows.values["counts"][:, None]
        store.mean("mean_reward", masked_sum(values, known), known.sum())
        store.minimum("min_reward", values.masked_fill(~known, torch.inf).amin())
        store.maximum("max_reward", values.masked_fill(~known, -torch.inf).amax())
        self.keep(rows, scores=values)


class OwnForward(Reader):
    """Nothing is read of hidden states: a classifier makes its score of all tokens itself."""

    can_pack = False


def better_answers(rows: AnswerRows) -> Tensor:
    """Which answer is better, of lower rank, than which: (B, K, K) bool, for groups that count."""
    lengths, ranks = rows.values["lengths"], rows.values["ranks"]
    known = (lengths > 0) & rows.values["counts"][:, None]
    return (ranks[:, :, None] < ranks[:, None, :]) & known[:, :, None] & known[:, None, :]
