"""Options of Online DPO."""

from dataclasses import dataclass
from typing import ClassVar

from ..algorithms.online_dpo import OnlineDPO
from ..options import option
from .base.keyword_arguments import ignored, refused
from .legacy_options import ONLINE_LEGACY_OPTIONS
from .online.online_config import OnlineConfig


@dataclass
class OnlineDPOConfig(OnlineConfig):
    """Configuration of `OnlineDPOTrainer`: the options of the online skeleton and its own.

    `per_device_train_batch_size` and `per_device_eval_batch_size` count prompts, each with its two
    completions.
    """

    legacy_options = {
        **ONLINE_LEGACY_OPTIONS,
        "max_new_tokens": "max_completion_length",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
        **ignored("see max_prompt_length and long_prompts", "max_length"),
        **ignored("prompts are tokenized batch by batch", "dataset_num_proc"),
        **refused("pass the model to reward_funcs", "reward_model_path"),
        **refused("pass the judge to the trainer", "judge"),
    }
    without_meaning = OnlineConfig.without_meaning | {
        "vllm_importance_sampling_correction": "the loss is the same whoever wrote the completions"
    }
    unit: ClassVar[int] = 2
    learning_rate: float = option(5e-7, "Initial learning rate.", ge=0)
    disable_dropout: bool = option(True, "Set the probability of every dropout layer to zero.")
    max_completion_length: int = option(64, "Maximum length of a completion in tokens.", ge=1)
    temperature: float = option(0.9, "Sampling temperature; divides the logits in training.", gt=0)
    vllm_importance_sampling_correction: bool = option(
        False, "Cannot be used: the loss is valid for completions of any policy."
    )
    beta: list[float] = option(  # type: ignore[assignment]
        [0.1], "How closely the policy is held to the reference; a list has one value per epoch."
    )
    loss_type: str = option("sigmoid", "Loss of a pair.", choices=("sigmoid", "ipo"))
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the reward of a truncated completion.", ge=0
    )

    def __post_init__(self) -> None:
        self.beta = list(self.beta) if isinstance(self.beta, (list, tuple)) else [self.beta]
        super().__post_init__()
        if not self.beta or not all(isinstance(x, (int, float)) and x > 0 for x in self.beta):
            raise ValueError(f"beta={self.beta} must be above 0, or a list of such numbers.")
        if len(self.beta) == 1:
            (self.beta,) = self.beta  # type: ignore[assignment]
        if self.num_generations != 2 or self.group_size_in("eval") != 2:
            raise ValueError(
                "num_generations and num_generations_eval must be 2: the two completions of a "
                "prompt are compared. Leave them out."
            )

    def beta_in(self, epoch: int) -> float:
        """The value in an epoch; after the last value it stays."""
        values = self.beta if isinstance(self.beta, list) else [self.beta]
        return values[min(epoch, len(values) - 1)]

    def make_algorithm(self) -> OnlineDPO:
        """Make the algorithm of these options, as it is in the first epoch."""
        return OnlineDPO(
            beta=self.beta_in(0),
            loss_type=self.loss_type,
            missing_eos_penalty=self.missing_eos_penalty,
        )
