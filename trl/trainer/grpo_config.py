"""Options of GRPO."""

import warnings
from dataclasses import dataclass
from typing import Any

from ..algorithms.entropy_bonus import EntropyController
from ..algorithms.grpo import GRPO
from ..ops.policy_losses import GammaShape
from ..options import option
from ..suggestions import did_you_mean
from .legacy_options import ONLINE_LEGACY_OPTIONS
from .online.online_config import OnlineConfig

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
SCALES = ("group", "batch", "none")


@dataclass
class GRPOConfig(OnlineConfig):
    """Configuration of `GRPOTrainer`: the options of the online skeleton and its own."""

    legacy_options = ONLINE_LEGACY_OPTIONS
    without_meaning = OnlineConfig.without_meaning | {
        "log_completions_hub_repo": "completions stay in the folder `completions` of output_dir"
    }

    num_generations: int | None = option(8, "Completions for each prompt (G).")
    scale_rewards: str = option(
        "group",
        "Divide advantages by the standard deviation of the group (True), batch, or none (False).",
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Add reward functions up before or after normalizing them.",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    loss_type: str = option("dapo", "Objective and its denominator.", choices=LOSS_TYPES)
    importance_sampling_level: str = option(
        "token", "A ratio for each token, or for each completion.", choices=("token", "sequence")
    )
    delta: float | None = option(None, "Upper bound of the unclipped ratio.", gt=0)
    use_bias_correction_kl: bool = option(True, "Multiply the KL penalty by the probability ratio.")
    sapo_temperature_neg: float = option(1.05, "Gate temperature where the advantage is <= 0.")
    sapo_temperature_pos: float = option(1.0, "Gate temperature where the advantage is > 0.")
    vespo_k_pos: float = option(2.0, "Power of the weight where the advantage is >= 0.")
    vespo_lambda_pos: float = option(3.0, "Decay of the weight where the advantage is >= 0.")
    vespo_k_neg: float = option(3.0, "Power of the weight where the advantage is < 0.")
    vespo_lambda_neg: float = option(2.0, "Decay of the weight where the advantage is < 0.")
    off_policy_mask_threshold: float | None = option(
        None,
        "Leave out completions of negative advantage that lost more nats per token than this.",
    )
    top_entropy_quantile: float = option(
        1.0, "Train on this share of tokens, those of highest entropy.", gt=0, le=1
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    use_adaptive_entropy: bool = option(False, "Steer entropy_coef towards entropy_target.")
    entropy_coef_min: float = option(0.0, "Lowest adaptive entropy_coef.")
    entropy_coef_max: float = option(1.0, "Highest adaptive entropy_coef.")
    entropy_coef_delta: float = option(0.005, "Change of entropy_coef at each update.")
    entropy_target: float = option(0.2, "Target entropy, in nats per token.")
    log_completions_hub_repo: str | None = option(None, "Hub dataset that gets the completions.")

    def __post_init__(self) -> None:
        scale = str(self.scale_rewards).lower()
        self.scale_rewards = {"true": "group", "false": "none"}.get(scale, scale)
        if self.scale_rewards not in SCALES:
            hint = did_you_mean(scale, SCALES)
            raise ValueError(f"scale_rewards={scale!r} must be one of {', '.join(SCALES)}.{hint}")
        super().__post_init__()
        level, kind = self.importance_sampling_level, self.loss_type
        usual = "sequence" if kind == "luspo" else "token"
        if level != usual and kind not in ("grpo", "sapo"):
            words = f"loss_type={kind!r} was published with importance_sampling_level={usual!r}"
            warnings.warn(f"{words}, not {level!r}.", stacklevel=4)

    def make_algorithm(self) -> GRPO:
        """Make the algorithm of these options."""
        scale: Any = self.scale_rewards
        return GRPO(
            loss_type=self.loss_type,
            scale_rewards=scale,
            multi_objective_aggregation=self.multi_objective_aggregation,
            importance_sampling_level=self.importance_sampling_level,
            clip_range=self.clip_range,
            delta=self.delta,
            cispo_ratio_max=1 + self.epsilon if self.epsilon_high is None else self.epsilon_high,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_pos=GammaShape(self.vespo_k_pos, self.vespo_lambda_pos),
            vespo_neg=GammaShape(self.vespo_k_neg, self.vespo_lambda_neg),
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            top_entropy_quantile=self.top_entropy_quantile,
            max_completion_length=self.max_completion_length,
            entropy=EntropyController(
                coefficient=self.entropy_coef,
                is_adaptive=self.use_adaptive_entropy,
                target=self.entropy_target,
                delta=self.entropy_coef_delta,
                lowest=self.entropy_coef_min,
                highest=self.entropy_coef_max,
            ),
        )

    def _problems(self) -> dict[str, Any]:
        mode = self.vllm_importance_sampling_mode
        low, high = self.entropy_coef_min, self.entropy_coef_max
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return super()._problems() | {
            f"entropy_coef_min={low} must not exceed entropy_coef_max={high}": low > high,
            # Its weight of a completion is made of the ratios of tokens, those of the engine too.
            f"loss_type='vespo' cannot be used with vllm_importance_sampling_mode={mode!r}: set it "
            f"to {mode.replace('sequence', 'token')!r}": (
                self.loss_type == "vespo" and corrects and mode.startswith("sequence")
            ),
        }
