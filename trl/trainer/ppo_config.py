"""Options of PPO."""

from dataclasses import dataclass
from typing import ClassVar

from ..algorithms.ppo import PPO, EarlyStop
from ..options import option
from .base.keyword_arguments import ignored
from .legacy_options import RLOO_AND_PPO_LEGACY_OPTIONS
from .online.online_config import OnlineConfig


@dataclass
class PPOConfig(OnlineConfig):
    """Configuration of `PPOTrainer`: the options of the online skeleton and its own.

    A round has `num_mini_batches` times the rows of an optimizer step, and is trained on
    `num_ppo_epochs` times: it serves `num_ppo_epochs * num_mini_batches` optimizer steps.
    """

    legacy_options = RLOO_AND_PPO_LEGACY_OPTIONS | ignored(
        "the adapter that is trained is the active one, and its base model the reference",
        *("model_adapter_name", "ref_adapter_name"),
    )
    least_group: ClassVar[int] = 1
    learning_rate: float = option(3e-6, "Initial learning rate.", ge=0)
    disable_dropout: bool = option(True, "Set the probability of every dropout layer to zero.")
    num_ppo_epochs: int = option(4, "Passes of optimization over each round.", ge=1)
    num_mini_batches: int = option(1, "Optimizer steps of each pass over a round.", ge=1)
    target_kl: float | None = option(
        None,
        "Start a new round once an update has moved the policy by more than this, in nats.",
        gt=0,
    )
    num_generations: int | None = option(1, "Completions for each prompt.")
    max_completion_length: int = option(53, "Maximum length of a completion in tokens.", ge=1)
    temperature: float = option(0.7, "Sampling temperature; divides the logits in training.", gt=0)
    beta: float = option(0.05, "Weight of the KL penalty of tokens; 0: no reference policy.", ge=0)
    kl_estimator: str = option("k1", "Estimator of the KL penalty.", choices=("k1", "k3"))
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the reward of a truncated completion.", ge=0
    )
    whiten_rewards: bool = option(False, "Scale rewards of tokens to variance 1; their mean stays.")
    gamma: float = option(1.0, "Discount factor per token.", ge=0, le=1)
    lam: float = option(0.95, "Lambda of generalized advantage estimation.", ge=0, le=1)
    cliprange_value: float = option(0.2, "Clip width of values around those of the rollout.", ge=0)
    vf_coef: float = option(0.1, "Weight of the value loss.", ge=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")

    def __post_init__(self) -> None:
        # In words of the skeleton: how often a round is trained on, and in how many steps.
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(
                f"num_iterations={self.num_iterations} and num_ppo_epochs={self.num_ppo_epochs} "
                "mean the same: leave num_iterations out."
            )
        if isinstance(self.num_ppo_epochs, int) and self.num_ppo_epochs >= 1:
            # Any other value is refused below, under its own name.
            self.num_iterations = self.num_ppo_epochs
        steps = self.num_mini_batches * self.gradient_accumulation_steps
        given = self.steps_per_generation, self.generation_batch_size
        if self.num_mini_batches > 1 and given[0] != steps and given != (None, None):
            raise ValueError(
                f"num_mini_batches={self.num_mini_batches} cannot be used with "
                "steps_per_generation or generation_batch_size, which also say how many optimizer "
                "steps a round serves. Leave it out."
            )
        if given == (None, None) and steps and isinstance(steps, int):
            # Factors that are no integers are refused below, under their own names.
            self.steps_per_generation = steps
        super().__post_init__()

    def make_algorithm(self) -> PPO:
        """Make the algorithm of these options."""
        return PPO(
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            gamma=self.gamma,
            lam=self.lam,
            clip_range=self.clip_range,
            cliprange_value=self.cliprange_value,
            vf_coef=self.vf_coef,
            entropy_coef=self.entropy_coef,
            whiten_rewards=self.whiten_rewards,
            missing_eos_penalty=self.missing_eos_penalty,
            early_stop=EarlyStop(target_kl=self.target_kl),
        )
