"""Reward models: classifiers that score the better of two answers higher."""

from typing import Any, cast

from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..batch import Batch
from ..data.encode import TextEncoder
from ..data.preference_cutting import PreferenceLimits
from ..data.preference_rows import Learner
from ..data.streams import PreparedStream
from ..models.packed_layout import plain_layout
from ..models.scorer import Reader
from ..models.unwrap import causal_model, score_layer
from ..models.value_model import ValueReader
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

    args: RewardConfig
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

    def adapt(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: RewardConfig
    ) -> None:
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
        self,
        dataset: Dataset | IterableDataset,
        encoder: TextEncoder,
        args: RewardConfig,
        mode: Mode,
    ) -> Any:
        """Tokenize, and leave out what is over `max_length`."""
        limits = PreferenceLimits(max_length=args.max_length, truncation_mode="drop")
        answers = prepare_answers(dataset, encoder, args, limits, learner=self.learner)
        return answers if isinstance(answers, PreparedStream) else answers.checked(str(limits))

    def reader(self, model: nn.Module) -> Reader:
        """Make what reads the layer of the score at the last token of each row."""
        layer = score_layer(model)
        return OwnForward() if layer is None else ValueReader(layer, at_last_token=True)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, Tensor]:
        """Score prompts with their answers: (B,)."""
        reader = self.reader(model)
        if reader.can_pack:
            (results, *_), _ = self.scorer.read(model, batch.rows, [reader])
            scores = cast(Tensor, results[0])
        else:
            scores = self._own_scores(model, batch)
        self.guard.watch("score", scores, batch.rows)
        return batch, scores

    def _own_scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores (B,) of a classifier that reads all tokens of a prompt with its answer."""
        scorer = self.scorer
        layout = plain_layout(batch.rows, scorer.pad_id, scorer.device, scorer.pad_multiple)
        inputs = {"input_ids": layout.inputs["input_ids"]}
        if "attention_mask" in layout.inputs:  # there is none without padding
            inputs["attention_mask"] = layout.inputs["attention_mask"]
        logits: Tensor = model(**inputs).logits
        return logits[:, 0].float()


class OwnForward(Reader):
    """Nothing is read of hidden states: a classifier makes its score of all tokens itself."""

    can_pack = False
