"""Options of RLOO."""

from dataclasses import dataclass

from ..algorithms.rloo import RLOO
from ..options import option
from .base.keyword_arguments import ignored, refused
from .legacy_options import RLOO_AND_PPO_LEGACY_OPTIONS
from .online.online_config import OnlineConfig


@dataclass
class RLOOConfig(OnlineConfig):
    """Configuration of `RLOOTrainer`, which may use the names of the first one (`rloo_k`, ...)."""

    legacy_options = {
        **RLOO_AND_PPO_LEGACY_OPTIONS,
        "rloo_k": "num_generations",
        "normalize_reward": "normalize_advantages",
        "num_ppo_epochs": "num_iterations",
        "num_mini_batches": "steps_per_generation",
        **ignored("the KL penalty is the sum over a completion's tokens", "token_level_kl"),
        **ignored("write a reward function of completion_ids", "missing_eos_penalty"),
        **refused("use normalize_advantages", "whiten_rewards", "normalize_advantage"),
    }

    beta: float = option(0.05, "Weight of the KL penalty in the reward; 0: no reference.", ge=0)
    normalize_advantages: bool = option(
        False, "Whiten advantages over the generation round after the leave-one-out baseline."
    )
    reward_clip_range: tuple[float, float] | None = option(
        None, "Lowest and highest weighted reward, applied before the KL penalty."
    )

    def __post_init__(self) -> None:
        if "num_mini_batches" in self.given_by_old_names:  # updates of several micro-batches
            updates = self.steps_per_generation or 1
            self.steps_per_generation = updates * self.gradient_accumulation_steps
        super().__post_init__()
        if (bounds := self.reward_clip_range) is None:
            return
        is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
        if not is_pair or not bounds[0] < bounds[1]:
            raise ValueError(
                f"reward_clip_range={bounds!r} must be two numbers, lowest then highest; for a "
                "symmetric clip at 10: reward_clip_range=(-10, 10)."
            )
        self.reward_clip_range = (float(bounds[0]), float(bounds[1]))

    def make_algorithm(self) -> RLOO:
        """Make the algorithm of these options."""
        return RLOO(
            beta=self.beta,
            clip_range=self.clip_range,
            reward_clip_range=self.reward_clip_range,
            normalize_advantages=self.normalize_advantages,
        )
