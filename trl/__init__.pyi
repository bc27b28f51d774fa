from .cli.arguments import ScriptArguments as ScriptArguments
from .cli.mixture import (
    DatasetMixtureConfig as DatasetMixtureConfig,
)
from .cli.mixture import (
    get_dataset as get_dataset,
)
from .cli.parser import TrlParser as TrlParser
from .data.formats import (
    apply_chat_template as apply_chat_template,
)
from .data.formats import (
    extract_prompt as extract_prompt,
)
from .data.formats import (
    is_conversational as is_conversational,
)
from .data.formats import (
    is_conversational_from_value as is_conversational_from_value,
)
from .data.formats import (
    maybe_apply_chat_template as maybe_apply_chat_template,
)
from .data.formats import maybe_convert_to_chatml as maybe_convert_to_chatml
from .data.formats import (
    maybe_extract_prompt as maybe_extract_prompt,
)
from .data.formats import (
    maybe_unpair_preference_dataset as maybe_unpair_preference_dataset,
)
from .data.formats import (
    prepare_multimodal_messages as prepare_multimodal_messages,
)
from .data.formats import (
    unpair_preference_dataset as unpair_preference_dataset,
)
from .data.packing import (
    pack_dataset as pack_dataset,
)
from .data.packing import (
    truncate_dataset as truncate_dataset,
)
from .data.templates import clone_chat_template as clone_chat_template
from .data.templates import get_training_chat_template as get_training_chat_template
from .generation.tools.templates import add_response_schema as add_response_schema
from .generation.tools.templates import supports_tool_calling as supports_tool_calling
from .memory.callback import MemoryCallback as MemoryCallback
from .models.reference import create_reference_model as create_reference_model
from .scripts.utils import init_zero_verbose as init_zero_verbose
from .trainer.callbacks import BEMACallback as BEMACallback
from .trainer.callbacks import (
    SyncRefModelCallback as SyncRefModelCallback,
)
from .trainer.display import RichProgressCallback as RichProgressCallback
from .trainer.dpo_config import DPOConfig as DPOConfig
from .trainer.dpo_trainer import DPOTrainer as DPOTrainer
from .trainer.grpo_config import GRPOConfig as GRPOConfig
from .trainer.grpo_trainer import GRPOTrainer as GRPOTrainer
from .trainer.kto_config import KTOConfig as KTOConfig
from .trainer.kto_trainer import KTOTrainer as KTOTrainer
from .trainer.model_config import (
    ModelConfig as ModelConfig,
)
from .trainer.model_config import (
    get_peft_config as get_peft_config,
)
from .trainer.model_config import (
    get_quantization_config as get_quantization_config,
)
from .trainer.online_dpo_config import OnlineDPOConfig as OnlineDPOConfig
from .trainer.online_dpo_trainer import OnlineDPOTrainer as OnlineDPOTrainer
from .trainer.ppo_config import PPOConfig as PPOConfig
from .trainer.ppo_trainer import PPOTrainer as PPOTrainer
from .trainer.reward_config import RewardConfig as RewardConfig
from .trainer.reward_trainer import RewardTrainer as RewardTrainer
from .trainer.rloo_config import RLOOConfig as RLOOConfig
from .trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
from .trainer.samples import LogCompletionsCallback as LogCompletionsCallback
from .trainer.samples import WeaveCallback as WeaveCallback
from .trainer.sft_config import SFTConfig as SFTConfig
from .trainer.sft_trainer import SFTTrainer as SFTTrainer

__version__: str
