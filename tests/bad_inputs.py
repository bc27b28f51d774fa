"""What users get wrong, and the line that answers it: tables of inputs for `test_bad_inputs.py`.

An answer names the option, column or row and, where there is one, the nearest legal value.
"""
# ruff: noqa: E501
# fmt: off

from accelerate import ParallelismConfig
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PrefixTuningConfig
from tiny import lora_model, tiny_model, tiny_tokenizer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    TrainerCallback,
)

from trl import GRPOConfig, SFTConfig

# --- Options in Python: configuration, options, what the error says ---

OPTIONS = [
    # Names.
    ("RLOO", {"num_generation": 4}, "RLOOConfig has no argument 'num_generation'. Did you mean num_generations?"),
    ("GRPO", {"lerning_rate": 1}, "GRPOConfig has no argument 'lerning_rate'. Did you mean learning_rate?"),
    ("SFT", {"max_seq_len": 8}, "SFTConfig has no argument 'max_seq_len'. Did you mean max_length?"),
    ("DPO", {"qqqqqqqq": 8}, "DPOConfig has no argument 'qqqqqqqq'."),
    ("Model", {"lora_rank": 8}, "ModelConfig has no argument 'lora_rank'. Did you mean lora_r?"),
    # Types.
    ("RLOO", {"beta": "0.1"}, "beta='0.1' must be a number, at least 0."),
    ("RLOO", {"learning_rate": "1e-5"}, "learning_rate='1e-5' must be a number, at least 0."),
    ("RLOO", {"num_generations": "4"}, "num_generations='4' must be an integer."),
    ("RLOO", {"num_generations": 4.0}, "num_generations=4.0 must be an integer; the nearest is 4."),
    ("RLOO", {"max_steps": "10"}, "max_steps='10' must be an integer."),
    ("RLOO", {"use_vllm": "false"}, "use_vllm='false' must be True or False."),
    ("RLOO", {"gradient_checkpointing": "yes"}, "gradient_checkpointing='yes' must be True or False."),
    ("RLOO", {"reward_weights": 1.0}, "reward_weights=1.0 must be a list."),
    ("RLOO", {"reward_weights": "1"}, "reward_weights='1' must be a list."),
    ("RLOO", {"reward_clip_range": 1.0}, "reward_clip_range=1.0 must be two numbers, lowest then highest; for a symmetric clip at 10: reward_clip_range=(-10, 10)."),
    ("RLOO", {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range=(1.0, -1.0) must be two numbers, lowest then highest; for a symmetric clip at 10: reward_clip_range=(-10, 10)."),
    ("RLOO", {"temperature": None}, "temperature=None must be a number, above 0 (for greedy decoding: generation_kwargs={'do_sample': False})."),
    ("RLOO", {"generation_kwargs": "do_sample"}, 'generation_kwargs=\'do_sample\' must be a dictionary, or a JSON object such as \'{"a": 1}\'.'),
    ("SFT", {"model_init_kwargs": [1]}, 'model_init_kwargs=[1] must be a dictionary, or a JSON object such as \'{"a": 1}\'.'),
    ("DPO", {"loss_type": 3}, "loss_type=3 must be one of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop,"),
    # Ranges.
    ("RLOO", {"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1."),
    ("RLOO", {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1."),
    ("RLOO", {"save_steps": -3}, "save_steps=-3 must be at least 0."),
    ("RLOO", {"max_grad_norm": -1}, "max_grad_norm=-1 must be at least 0."),
    ("RLOO", {"num_train_epochs": 0}, "num_train_epochs=0 must be above 0."),
    ("RLOO", {"learning_rate": -1.0}, "learning_rate=-1.0 must be at least 0."),
    ("RLOO", {"logging_steps": -1}, "logging_steps=-1 must be at least 0."),
    ("RLOO", {"warmup_steps": -1}, "warmup_steps=-1 must be at least 0."),
    ("RLOO", {"max_completion_length": 0}, "max_completion_length=0 must be at least 1."),
    ("RLOO", {"max_prompt_length": 0}, "max_prompt_length=0 must be at least 1."),
    ("RLOO", {"temperature": 0.0}, "temperature=0.0 must be above 0 (for greedy decoding: generation_kwargs={'do_sample': False})."),
    ("RLOO", {"top_p": 1.2}, "top_p=1.2 must be above 0 and at most 1."),
    ("RLOO", {"top_k": -1}, "top_k=-1 must be at least 0 (0: off)."),
    ("RLOO", {"min_p": 1.1}, "min_p=1.1 must be at least 0 and at most 1."),
    ("RLOO", {"beta": -0.1}, "beta=-0.1 must be at least 0."),
    ("RLOO", {"num_iterations": 0}, "num_iterations=0 must be at least 1."),
    ("RLOO", {"reward_timeout": 0}, "reward_timeout=0 must be above 0."),
    ("RLOO", {"vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization=1.5 must be above 0 and at most 1."),
    ("RLOO", {"vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size=0 must be at least 1."),
    ("RLOO", {"vllm_server_port": -1}, "vllm_server_port=-1 must be at least 1 and at most 65535."),
    ("RLOO", {"vllm_server_timeout": -1.0}, "vllm_server_timeout=-1.0 must be above 0."),
    ("RLOO", {"num_completions_to_print": -1}, "num_completions_to_print=-1 must be at least 0."),
    ("RLOO", {"epsilon_high": -0.1}, "epsilon_high=-0.1 must be at least 0."),
    ("GRPO", {"top_entropy_quantile": 1.5}, "top_entropy_quantile=1.5 must be above 0 and at most 1."),
    ("GRPO", {"delta": -1.0}, "delta=-1.0 must be above 0."),
    ("SFT", {"lr": 1e-5}, "SFTConfig has no argument 'lr'. Did you mean learning_rate?"),
    ("RLOO", {"epochs": 3}, "RLOOConfig has no argument 'epochs'. Did you mean num_train_epochs?"),
    ("SFT", {"learning_rate": float("inf")}, "learning_rate=inf must be finite."),
    ("SFT", {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 3}}, "lr_scheduler_kwargs['num_cycle']: lr_scheduler_type='cosine' has no such argument. Did you mean num_cycles?"),
    ("SFT", {"packing": True, "packing_strategy": None}, "packing_strategy=None must be one of bfd, bfd_split, wrapped."),
    ("SFT", {"loss_type": ["nll"]}, "loss_type=['nll'] must be one of nll, dft. Did you mean nll?"),
    ("GRPO", {"loss_type": None}, "loss_type=None must be one of grpo, dr_grpo, dapo,"),
    ("DPO", {"loss_weights": 0.5}, "loss_weights=0.5 must be a list."),
    ("KTO", {"desirable_weight": 0.0, "undesirable_weight": 0.0}, "desirable_weight=0 and undesirable_weight=0 train nothing: set one of them above 0."),
    ("PPO", {"num_mini_batches": 1.5}, "num_mini_batches=1.5 must be an integer; the nearest is 2."),
    ("RLOO", {"vllm_server_port": 70000}, "vllm_server_port=70000 must be at least 1 and at most 65535."),
    ("RLOO", {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "http://localhost"}, "vllm_server_host='http://localhost' must be the name of a machine, such as localhost; a whole address is given by vllm_server_base_url."),
    ("SFT", {"max_steps": -5}, "max_steps=-5 must be above 0, or -1 to train for num_train_epochs."),
    ("SFT", {"max_length": 1}, "max_length=1 must be at least 2."),
    ("DPO", {"beta": -1.0}, "beta=-1.0 must be at least 0."),
    ("DPO", {"beta": 0.0}, "beta=0.0 trains nothing: log-ratios are multiplied by it, so the loss is the same for every model. Set beta above 0, such as beta=0.1."),
    ("DPO", {"beta": 0.0, "loss_type": ["hinge", "sft"], "loss_weights": [1.0, 0.0]}, "beta=0.0 trains nothing: log-ratios are multiplied by it, so the loss is the same for every model."),
    ("KTO", {"beta": 0.0}, "beta=0.0 trains nothing: log-ratios are multiplied by it, so the loss is the same for every model. Set beta above 0, such as beta=0.1."),
    ("KTO", {"desirable_weight": -1.0}, "desirable_weight=-1.0 must be at least 0."),
    ("Reward", {"center_rewards_coefficient": -1.0}, "center_rewards_coefficient=-1.0 must be at least 0."),
    ("PPO", {"gamma": 1.5}, "gamma=1.5 must be at least 0 and at most 1."),
    ("PPO", {"lam": -0.1}, "lam=-0.1 must be at least 0 and at most 1."),
    ("PPO", {"num_ppo_epochs": 0}, "num_ppo_epochs=0 must be at least 1."),
    ("PPO", {"num_ppo_epochs": -1}, "num_ppo_epochs=-1 must be at least 1."),
    ("PPO", {"num_ppo_epochs": "4"}, "num_ppo_epochs='4' must be a number, at least 1."),
    ("PPO", {"num_mini_batches": 0}, "num_mini_batches=0 must be at least 1."),
    ("PPO", {"cliprange_value": -1.0}, "cliprange_value=-1.0 must be at least 0."),
    ("OnlineDPO", {"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must be at least 0."),
    ("Model", {"lora_alpha": 0}, "lora_alpha=0 must be above 0."),
    ("Model", {"lora_r": 0}, "lora_r=0 must be at least 1."),
    ("Model", {"lora_dropout": 1.5}, "lora_dropout=1.5 must be at least 0 and below 1."),
    # Choices.
    ("RLOO", {"vllm_mode": "colocated"}, "vllm_mode='colocated' must be one of colocate, server. Did you mean colocate?"),
    ("RLOO", {"long_prompts": "cut_left"}, "long_prompts='cut_left' must be one of error, drop, cut-left. Did you mean cut-left?"),
    ("RLOO", {"empty_cache": "auot"}, "empty_cache='auot' must be one of never, auto, always. Did you mean auto?"),
    ("RLOO", {"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin' must be one of linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup, inverse_sqrt,"),
    ("RLOO", {"optim": "adamw_tortch"}, "optim='adamw_tortch' must be one of adamw_torch, adamw_torch_fused, adamw_torch_xla, adamw_torch_npu_fused, adafactor, adamw_anyprecision,"),
    ("RLOO", {"eval_strategy": "step"}, "eval_strategy='step' must be one of no, steps, epoch. Did you mean steps?"),
    ("RLOO", {"save_strategy": "epochs"}, "save_strategy='epochs' must be one of no, steps, epoch, best. Did you mean epoch?"),
    ("RLOO", {"report_to": "wandbb"}, "report_to='wandbb' is not a known tracker. Did you mean wandb?"),
    ("RLOO", {"report_to": "comet_ml"}, "report_to='comet_ml' needs the package `comet-ml`, which is not installed. Run: pip install comet-ml; or set report_to='none'."),
    ("RLOO", {"hub_strategy": "every"}, "hub_strategy='every' must be one of end, every_save, checkpoint, all_checkpoints. Did you mean every_save?"),
    ("GRPO", {"loss_type": "dapoo"}, "loss_type='dapoo' must be one of grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo, vespo. Did you mean dapo?"),
    ("GRPO", {"scale_rewards": "bach"}, "scale_rewards='bach' must be one of group, batch, none. Did you mean batch?"),
    ("GRPO", {"importance_sampling_level": "tokens"}, "importance_sampling_level='tokens' must be one of token, sequence. Did you mean token?"),
    ("GRPO", {"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum' must be one of sum_then_normalize, normalize_then_sum."),
    ("GRPO", {"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode='token' must be one of token_truncate, token_mask, sequence_truncate, sequence_mask. Did you mean token_mask?"),
    ("SFT", {"packing": True, "packing_strategy": "bdf"}, "packing_strategy='bdf' must be one of bfd, bfd_split, wrapped. Did you mean bfd?"),
    ("SFT", {"loss_type": "nlll"}, "loss_type='nlll' must be one of nll, dft. Did you mean nll?"),
    ("SFT", {"long_rows": "truncate"}, "long_rows='truncate' must be one of cut, drop, split, error."),
    ("DPO", {"loss_type": "sigmoidd"}, "loss_type='sigmoidd' must be one of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down,"),
    ("DPO", {"f_divergence_type": "kl"}, "f_divergence_type='kl' must be one of reverse_kl, forward_kl, js_divergence, alpha_divergence."),
    ("DPO", {"truncation_mode": "keep_begin"}, "truncation_mode='keep_begin' must be one of keep_start, keep_end. Did you mean keep_end?"),
    ("KTO", {"loss_type": "ktoo"}, "loss_type='ktoo' must be one of kto, apo_zero_unpaired. Did you mean kto?"),
    ("OnlineDPO", {"loss_type": "hinge"}, "loss_type='hinge' must be one of sigmoid, ipo."),
    ("Model", {"dtype": "bfloat"}, "dtype='bfloat' must be one of auto, bfloat16, float16, float32. Did you mean bfloat16?"),
    ("Model", {"bnb_4bit_quant_type": "nf8"}, "bnb_4bit_quant_type='nf8' must be one of nf4, fp4. Did you mean nf4?"),
    # What does not go together.
    ("RLOO", {"num_generations": 1}, "num_generations=1 is too small: each completion is compared with the others of its prompt; training needs num_generations >= 2."),
    ("RLOO", {"num_generations": None}, "num_generations=None is too small: each completion is compared with the others of its prompt; training needs num_generations >= 2."),
    ("RLOO", {"per_device_train_batch_size": 8, "num_generations": 3}, "A generation round of 8 sequences cannot hold whole groups of num_generations=3. Nearest legal: num_generations=2 or 4, or generation_batch_size=24."),
    ("RLOO", {"generation_batch_size": 12}, "generation_batch_size=12 is not a multiple of the 8 rows of a micro-batch (per_device_train_batch_size x number of processes). Nearest legal: 8 or 16."),
    ("RLOO", {"generation_batch_size": 16, "steps_per_generation": 4}, "generation_batch_size=16 means steps_per_generation=2 with 8 rows per micro-batch, but steps_per_generation=4 was given. Give one of them,"),
    ("RLOO", {"steps_per_generation": 0}, "steps_per_generation=0 must be at least 1."),
    ("RLOO", {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 3}, "An evaluation batch of 8 sequences (per_device_eval_batch_size=8 on 1 rank) cannot hold whole groups of 3. Nearest legal:"),
    ("RLOO", {"auto_find_batch_size": True}, "auto_find_batch_size=True cannot be used: it would break up groups of completions."),
    ("GRPO", {"sync_ref_model": True}, "sync_ref_model=True needs a reference policy: set beta above 0."),
    ("PPO", {"num_mini_batches": 3, "steps_per_generation": 2}, "num_mini_batches=3 cannot be used with steps_per_generation or generation_batch_size, which also say how many optimizer steps a round serves."),
    ("RLOO", {"torch_compile": True}, "torch_compile=True cannot be used: micro-batches differ in length, so the model would be compiled again and again,"),
    ("RLOO", {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 cannot be used: completions are generated without noise. Leave it out."),
    ("RLOO", {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 cannot be used: completions have no labels. Leave it out."),
    ("RLOO", {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' cannot be used: the lengths of completions are not known before they are generated. Leave it out."),
    ("RLOO", {"rloo_k": 4, "num_generations": 4}, "RLOOConfig: both rloo_k and num_generations were given; use num_generations alone."),
    ("RLOO", {"batch_size": 4}, "batch_size=4 is no option of RLOOConfig any more: use generation_batch_size."),
    ("RLOO", {"fp16": True, "bf16": True}, "At most one of fp16 and bf16 can be True, but not both"),
    ("RLOO", {"use_vllm": True, "ds3_gather_for_generation": False}, "ds3_gather_for_generation=False cannot be used with use_vllm=True: it is an option of generation by transformers. Leave one of them out."),
    ("RLOO", {"use_vllm": True, "use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True cannot be used with use_vllm=True: it is an option of generation by transformers. Leave one of them out."),
    ("RLOO", {"vllm_importance_sampling_clip_min": 3.0}, "vllm_importance_sampling_clip_min=3.0 must be below vllm_importance_sampling_clip_max=3.0."),
    ("RLOO", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}, "vllm_importance_sampling_mode='token_truncate' needs a bound: set vllm_importance_sampling_clip_max, such as 3.0."),
    ("RLOO", {"use_vllm": True, "vllm_sync_adapter_only": True, "vllm_enable_sleep_mode": True}, "vllm_sync_adapter_only=True cannot be used with vllm_enable_sleep_mode=True: base weights would have to be sent after each sleep."),
    ("RLOO", {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}}, "gradient_checkpointing_kwargs: 'selective' needs gradient_checkpointing=True, and use_reentrant must not be True."),
    ("GRPO", {"log_completions_hub_repo": "a/b"}, "log_completions_hub_repo='a/b' cannot be used: completions stay in the folder `completions` of output_dir. Leave it out."),
    ("SFT", {"packing": True, "max_length": None}, "packing=True needs max_length, the size of a pack."),
    ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_type=['sigmoid', 'sft'] and loss_weights=[1.0] must be equally long."),
    ("DPO", {"tools": []}, "tools=[] is no option of DPOConfig any more: write them into the column 'tools' of the dataset."),
    ("GRPO", {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, "loss_type='vespo' cannot be used with vllm_importance_sampling_mode='sequence_mask': set it to 'token_mask'."),
    ("RLOO", {"parallelism_config": ParallelismConfig(cp_size=2)}, "cp_size=2 (or sp_size): context parallelism is for trainers that learn from the"),
    ("GRPO", {"parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=2)}, "cp_size=2 (or sp_size): context parallelism is for trainers that learn from the"),
    ("Model", {"load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit and load_in_4bit exclude each other; choose one."),
    # The best model.
    ("SFT", {"load_best_model_at_end": True}, "load_best_model_at_end=True needs evaluations: set eval_strategy='steps', and give an eval_dataset (--dataset_test_split)."),
    ("RLOO", {"load_best_model_at_end": True, "save_strategy": "epoch"}, "load_best_model_at_end=True needs evaluations: set eval_strategy='epoch', and give an eval_dataset"),
    ("SFT", {"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best' needs evaluations: set eval_strategy='steps', and give an eval_dataset"),
    ("SFT", {"save_strategy": "best", "eval_strategy": "epoch"}, "save_strategy='best' needs the metric that decides: set metric_for_best_model='loss', or another one that evaluations log."),
    ("DPO", {"load_best_model_at_end": True, "eval_strategy": "epoch"}, "load_best_model_at_end=True needs a checkpoint of each evaluated model, but save_strategy is 'steps': set save_strategy='epoch', or save_strategy='best'."),
    ("DPO", {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "no"}, "but save_strategy is 'no': set save_strategy='steps', or save_strategy='best'."),
    ("DPO", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30}, "save_steps=500 is not a multiple of the 30 steps between evaluations. Nearest legal: save_steps=480 or 510."),
    # Options of earlier releases of transformers.
    ("SFT", {"warmup_ratio": 3}, "warmup_ratio=3 must be below 1, as a share of all steps; a number of steps is given by warmup_steps."),
    ("RLOO", {"warmup_ratio": 0.1, "warmup_steps": 3}, "RLOOConfig: both warmup_ratio and warmup_steps were given; use warmup_steps alone."),
    ("GRPO", {"adafactor": True}, "adafactor=True is no option of GRPOConfig any more: use optim='adafactor'."),
    ("Model", {"lora_target_parameters": ["w"]}, "lora_target_parameters cannot be used with lora_dropout=0.05: dropout cannot act on the input of a parameter. Set lora_dropout=0."),
    ("DPO", {"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1."),
    ("DPO", {"label_smoothing": -0.1}, "label_smoothing=-0.1 must be at least 0 and below 1."),
    ("DPO", {"loss_type": "robust", "label_smoothing": 0.5}, "loss_type=robust needs label_smoothing below 0.5, not 0.5"),
]

# --- Options that are told of, and used: configuration, options, kind and words of the warning ---

WARNED = [
    ("RLOO", {"use_transformers_paged": True}, "FutureWarning: RLOOConfig: use_transformers_paged is now use_transformers_continuous_batching."),
    ("GRPO", {"vllm_importance_sampling_cap": 2.0}, "FutureWarning: GRPOConfig: vllm_importance_sampling_cap is now vllm_importance_sampling_clip_max."),
    ("RLOO", {"rloo_k": 4}, "FutureWarning: RLOOConfig: rloo_k is now num_generations."),
    ("DPO", {"loss_type": "aot_pair"}, "FutureWarning: 'aot_pair' is now 'aot_unpaired'."),
    ("GRPO", {"loss_type": "luspo"}, "UserWarning: loss_type='luspo' was published with importance_sampling_level='sequence', not 'token'."),
    *[
        ("GRPO", {"loss_type": kind, "importance_sampling_level": "sequence"}, f"UserWarning: loss_type={kind!r} was published with importance_sampling_level='token', not 'sequence'.")
        for kind in ("vespo", "bnpo", "dr_grpo", "dapo", "cispo")
    ],
    *[
        (name, {"warmup_ratio": 0.1}, f"FutureWarning: {name}Config: warmup_ratio is now warmup_steps.")
        for name in ("SFT", "DPO", "KTO", "Reward", "RLOO", "GRPO", "OnlineDPO", "PPO")
    ],
    ("SFT", {"overwrite_output_dir": True}, "FutureWarning: SFTConfig: overwrite_output_dir has no effect (a run always writes into output_dir; to continue one, use resume_from_checkpoint)."),
    ("RLOO", {"evaluation_strategy": "no"}, "FutureWarning: RLOOConfig: evaluation_strategy is now eval_strategy."),
    ("RLOO", {"vllm_mode": "server"}, "UserWarning: vllm_mode: without use_vllm=True no vLLM engine generates, so they have no effect."),
]

# --- Words after `trl`, before anything is loaded ---

NEEDED = "--model_name_or_path m --dataset_name d "
REWARD = NEEDED + "--reward_funcs r "
WORDS = [
    ("rlo", "trl: error: unknown command 'rlo'. Did you mean rloo?"),
    ("distillation", "trl: error: `trl distillation` is not part of this release. Commands: sft, dpo, kto, reward, rloo, grpo, online-dpo, ppo, memory-plan, lengths,"),
    ("trainn --x", "trl: error: unknown command 'trainn'. Commands: sft, dpo, kto, reward, rloo, grpo, online-dpo, ppo, memory-plan, lengths, vllm-serve, completions,"),
    ("rloo", "trl rloo: error: --model_name_or_path, --dataset_name (or --datasets) and --reward_funcs (or --reward_model_name_or_path) are required."),
    ("grpo --dataset_name d", "trl grpo: error: --model_name_or_path and --reward_funcs (or --reward_model_name_or_path) are required. `trl grpo --help` has an example."),
    ("dpo --lenth 4", "trl dpo: error: unknown option --lenth (closest: --max_length). --model_name_or_path and --dataset_name (or --datasets) are required."),
    ("kto --dataset_name d --desirable_wheight 2", "trl kto: error: unknown option --desirable_wheight (closest: --desirable_weight, --undesirable_weight). --model_name_or_path is required."),
    ("reward --center_rewards_coefficient x", "trl reward: error: --center_rewards_coefficient: 'x' is not a number. --model_name_or_path and --dataset_name (or --datasets) are required."),
    ("online-dpo --missing_eos_penalt 1 --beta x", "trl online-dpo: error: unknown option --missing_eos_penalt (closest: --missing_eos_penalty). --beta: 'x' is not a number. --model_name_or_path,"),
    ("ppo --num_ppo_epoch 1 --gamma x", "trl ppo: error: unknown option --num_ppo_epoch (closest: --num_ppo_epochs, --num_train_epochs). --gamma: 'x' is not a number. --model_name_or_path,"),
    ("rloo --num_generation 4", "trl rloo: error: unknown option --num_generation (closest: --num_generations, --num_generations_eval, --num_iterations). --model_name_or_path,"),
    ("rloo --lerning_rate 1 --betta 2", "trl rloo: error: unknown options --lerning_rate (closest: --learning_rate, --logging_strategy), --betta (closest: --beta). --model_name_or_path,"),
    ("rloo --qqqqqqqq", "trl rloo: error: unknown option --qqqqqqqq. --model_name_or_path,"),
    ("rloo --packing", "trl rloo: error: unknown option --packing (an option of `trl sft`). --model_name_or_path,"),
    ("sft --reward_funcs r", "trl sft: error: unknown option --reward_funcs (an option of `trl rloo`, `trl grpo`, `trl online-dpo`, `trl ppo`)."),
    ("rloo --no_beta", "trl rloo: error: unknown option --no_beta (closest: --beta). --model_name_or_path,"),
    ("rloo " + REWARD + "--num_generations four", "trl rloo: error: --num_generations: 'four' is not an integer. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--num_generations 4.5", "trl rloo: error: --num_generations: '4.5' is not an integer. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--num_generations 4 5", "trl rloo: error: unexpected words: 5."),
    ("rloo " + REWARD + "--learning_rate fast", "trl rloo: error: --learning_rate: 'fast' is not a number. `trl rloo --help` has an example."),
    ("sft " + NEEDED + "--lr 1", "trl sft: error: unknown option --lr (closest: --learning_rate)."),
    ("sft --model m --dataset d", "trl sft: error: unknown options --model (closest: --model_name_or_path, --module; an option of `trl vllm-serve`), --dataset (closest: --dataset_name, --datasets, --data_seed)."),
    ("sft " + NEEDED + "--batch_size 4", "trl sft: error: unknown option --batch_size (closest: --per_device_train_batch_size, "),
    ("rloo " + REWARD + "--reward_weights 1,2", "trl rloo: error: --reward_weights: '1,2' is not a number. Separate values by spaces."),
    ("rloo " + REWARD + "--config empty", "trl rloo: error: --config empty: this is a folder; give a file in it."),
    ("rloo " + REWARD + "--config latin.jsonl", "trl rloo: error: --config latin.jsonl: this is not text in UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    ("rloo " + REWARD + "--learning_rate nan", "trl rloo: error: --learning_rate: NaN is not allowed. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--log_completions maybe", "trl rloo: error: --log_completions: 'maybe' is neither true nor false. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--learning_rate", "trl rloo: error: --learning_rate: expected one argument"),
    ("rloo " + REWARD + "--reward_clip_range 1", "trl rloo: error: --reward_clip_range: 2 values are needed, not 1. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--reward_weights a", "trl rloo: error: --reward_weights: 'a' is not a number. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--generation_kwargs {do_sample", "trl rloo: error: --generation_kwargs: '{do_sample' is not a JSON object (Expecting property name enclosed in double quotes:"),
    ("rloo " + REWARD + "--optim adamww", "trl rloo: error: --optim: 'adamww' is not one of adamw_torch, adamw_torch_fused, adamw_torch_xla, adamw_torch_npu_fused, adafactor,"),
    ("rloo " + REWARD + "--eval_strategy sometimes", "trl rloo: error: --eval_strategy: 'sometimes' is not one of no, steps, epoch. `trl rloo --help` has an example."),
    ("grpo " + REWARD + "--loss_type dapoo", "trl grpo: error: --loss_type: 'dapoo' is not one of grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo, vespo. `trl grpo --help` has an example."),
    ("rloo " + REWARD + "--dtype float12", "trl rloo: error: --dtype: 'float12' is not one of auto, bfloat16, float16, float32. `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--num_processes 0", "trl rloo: error: --num_processes 0: at least one is needed."),
    ("rloo " + REWARD + "--num_processes two", "trl rloo: error: --num_processes: invalid int value: 'two'."),
    ("rloo " + REWARD + "--num_proceses 2", "trl rloo: error: unknown option --num_proceses (closest: --num_processes, --main_process_ip, --main_process_port). `trl rloo --help` has an example."),
    ("rloo " + REWARD + "--num_processes", "trl rloo: error: --num_processes: expected one argument."),
    ("rloo " + REWARD + "--mixed_precision fp17", "trl rloo: error: --mixed_precision: invalid choice: 'fp17' (choose from 'no', 'fp16', 'bf16', 'fp8')."),
    ("rloo " + REWARD + "--accelerate_config zero22", "trl rloo: error: --accelerate_config: zero22: there is no such file, and no shipped configuration of that name (closest: zero2)."),
    ("rloo " + REWARD + "--accelerate_config", "trl rloo: error: --accelerate_config: give a file, or one of fsdp1, fsdp2,"),
    ("rloo " + REWARD + "--multi_gpu 2", "trl rloo: error: unexpected words: 2."),
    ("rloo " + REWARD + "--accelerate_config zero3 --bf16 false --mixed_precision bf16", "trl rloo: error: --mixed_precision bf16 contradicts --bf16 false; leave one of them out."),
    ("rloo " + REWARD + "--config absent.yaml", "trl rloo: error: --config absent.yaml: there is no such file."),
    ("memory-plan", "trl memory-plan: error: --model_name_or_path is required."),
    ("memory-plan --method sftt --model_name_or_path m", "trl memory-plan: error: --method: 'sftt' is not one of sft, dpo, kto, reward, rloo, grpo, online-dpo, ppo."),
    ("memory-plan --model_name_or_path m", "trl memory-plan: error: The model 'm': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off."),
    ("lengths", "trl lengths: error: --model_name_or_path is required."),
    ("lengths --model_name_or_path m", "trl lengths: error: --dataset_name is required (or `datasets` in the configuration file)."),
    ("lengths --model_name_or_path tiny-modl --dataset_name sft.jsonl", "trl lengths: error: The model 'tiny-modl': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off. Did you mean tiny-model?"),
    ("lengths --model_name_or_path m --dataset_name absent.jsonl", "trl lengths: error: --dataset_name absent.jsonl: there is no such file. The nearest is sft.jsonl."),
    ("completions", "trl completions: error: the following arguments are required: folder"),
    ("completions absent", "trl completions: error: there are no completions at absent/completions/train.jsonl."),
    ("completions run --step 7", "trl completions: error: --step 7 has no completions; the steps that have some are 1."),
    ("completions run --bets 3", "trl completions: error: unrecognized arguments: --bets 3"),
    ("completions damaged", "trl completions: error: line 1 of damaged/completions/train.jsonl is not valid JSON."),
    ("report", "trl report: error: the following arguments are required: folders"),
    ("report absent", "trl report: error: absent has no run.json, metrics.jsonl or completions of a run."),
    ("report empty", "trl report: error: empty has no run.json, metrics.jsonl or completions of a run."),
    ("report a b c", "trl report: error: give one run, or two to compare, not 3."),
    ("report run --output absent/page.html", "trl report: error: absent/page.html cannot be written: No such file or directory; see --output."),
    ("env --verbose", "trl env: error: unrecognized arguments: --verbose"),
    ("merge adapter", "trl merge: error: the following arguments are required: --output_dir"),
    ("merge adapter --output_dir m --dtype int8", "trl merge: error: --dtype: invalid choice: 'int8' (choose from 'auto', 'bfloat16', 'float16', 'float32')"),
    ("merge adapter --output_dir m --base b", "trl merge: error: unrecognized arguments: --base b"),
    ("merge tiny-modle --output_dir m", "trl merge: error: There is no folder 'tiny-modle', and no such adapter on the hub. Did you mean tiny-model?"),
    ("merge tiny-model --output_dir m", "trl merge: error: tiny-model holds a whole model, not an adapter: nothing to merge."),
    ("merge run --output_dir m", "trl merge: error: run holds no adapter: adapter_config.json is missing."),
]
FILES = [
    ("a: [1", 'trl rloo: error: c.yaml is not valid YAML: while parsing a flow sequence in "<unicode string>", line 1, column 4: a: [1 ^ expected \',\' or \']\','),
    ("- 1", "trl rloo: error: c.yaml must be a mapping of option names to values."),
    ("env: [1]", "trl rloo: error: env in c.yaml must be a mapping of names to values."),
    ("betta: 1", "trl rloo: error: c.yaml: unknown key betta (closest: beta). `trl rloo --help` has an example."),
    ("num_proceses: 2", "trl rloo: error: c.yaml: unknown key num_proceses (closest: num_processes, main_process_ip, main_process_port). `trl rloo --help` has an example."),
    ("learning_rate: fast", "trl rloo: error: --learning_rate: 'fast' is not a number. `trl rloo --help` has an example."),
    ("num_generations: [1, 2]", "trl rloo: error: --num_generations: [1, 2] is not an integer. `trl rloo --help` has an example."),
    ("num_processes: [1, 2]", "trl rloo: error: unexpected words: 2."),
    ("multi_gpu: perhaps", "trl rloo: error: unexpected words: perhaps."),
    ("accelerate_config: zero22", "trl rloo: error: --accelerate_config: zero22: there is no such file, and no shipped configuration of that name (closest: zero2)."),
    ("no_shuffle_dataset: true", "trl rloo: error: c.yaml: unknown key no_shuffle_dataset (closest: shuffle_dataset). `trl rloo --help` has an example."),
    ("max_steps: 1e-1", "trl rloo: error: --max_steps: '1e-1' is not an integer. `trl rloo --help` has an example."),
    ("learning_rate: 1e-5x", "trl rloo: error: --learning_rate: '1e-5x' is not a number. `trl rloo --help` has an example."),
    ("reward_weights: [1e-1, much]", "trl rloo: error: --reward_weights: 'much' is not a number. `trl rloo --help` has an example."),
]

# --- Files for --accelerate_config: content, what is said ---

ACCELERATE_FILES = [
    ("a: [1", "trl rloo: error: The accelerate configuration a.yaml cannot be used: while parsing a flow sequence"),
    ("- 1", "trl rloo: error: The accelerate configuration a.yaml cannot be used: it must be a mapping of names to values."),
    ("", "trl rloo: error: The accelerate configuration a.yaml cannot be used: it must be a mapping of names to values."),
    ("num_processes: 2", "trl rloo: error: The accelerate configuration a.yaml cannot be used: distributed_type is missing (one of NO, MULTI_CPU, MULTI_GPU,"),
    ("distributed_type: NO\nnum_proceses: 2", "trl rloo: error: The accelerate configuration a.yaml cannot be used: unknown key num_proceses (closest: num_processes)."),
    ("distributed_type: DDP", 'trl rloo: error: The accelerate configuration a.yaml cannot be used: distributed_type: "DDP" must be one of NO, MULTI_CPU, MULTI_GPU,'),
    ("distributed_type: [FSDP]", 'trl rloo: error: The accelerate configuration a.yaml cannot be used: distributed_type: ["FSDP"] must be one of NO, MULTI_CPU, MULTI_GPU,'),
    ("distributed_type: NO\nnum_processes: two", 'trl rloo: error: The accelerate configuration a.yaml cannot be used: num_processes: "two" must be a whole number, at least 1.'),
    ("distributed_type: NO\nnum_processes: 0", "trl rloo: error: The accelerate configuration a.yaml cannot be used: num_processes: 0 must be a whole number, at least 1."),
    ("distributed_type: NO\nuse_cpu: perhaps", 'trl rloo: error: The accelerate configuration a.yaml cannot be used: use_cpu: "perhaps" must be true or false.'),
    ("distributed_type: NO\nmixed_precision: fp17", 'trl rloo: error: The accelerate configuration a.yaml cannot be used: mixed_precision: "fp17" must be one of no, fp8, fp16, bf16, in quotes.'),
    ("distributed_type: NO\nmixed_precision: no", "trl rloo: error: The accelerate configuration a.yaml cannot be used: mixed_precision: no must be one of no, fp8, fp16, bf16, in quotes."),
    ("distributed_type: FSDP\nfsdp_config: 2", "trl rloo: error: The accelerate configuration a.yaml cannot be used: fsdp_config: 2 must be a mapping of names to values."),
]

# --- Commands in a folder with `tiny-model`, `prompts.jsonl` and `rewards.py`: changed options ---

RUNS = [
    ({"model_name_or_path": "./absent"}, "trl rloo: error: The model './absent': there is no such folder."),
    ({"model_name_or_path": "absent"}, "trl rloo: error: The model 'absent': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off."),
    ({"model_name_or_path": "damaged-model"}, "trl rloo: error: The weights of damaged-model are damaged: Error while deserializing header: header too small."),
    ({"output_dir": "tiny-model"}, "trl rloo: error: --output_dir 'tiny-model' is the folder of the model, which would be replaced. Choose another one."),
    ({"output_dir": "rewards.py"}, "trl rloo: error: --output_dir rewards.py: nothing can be written in "),
    ({"dataset_name": "absent.jsonl"}, "trl rloo: error: --dataset_name absent.jsonl: there is no such file. The nearest is sft.jsonl."),
    ({"dataset_name": "promts.jsonl"}, "trl rloo: error: --dataset_name promts.jsonl: there is no such file. The nearest is prompts.jsonl."),
    ({"dataset_name": "empty"}, "trl rloo: error: --dataset_name empty: the folder holds no data file; it must be a saved dataset, or hold files of one kind out of .json, .jsonl, .csv, .tsv,"),
    ({"dataset_name": "rewards.py"}, "trl rloo: error: --dataset_name rewards.py: files of kind '.py' cannot be read; use one of .json, .jsonl, .csv, .tsv, .parquet, .arrow, .txt."),
    ({"dataset_name": "broken.jsonl"}, "trl rloo: error: --dataset_name broken.jsonl: cannot be read (line 1 of broken.jsonl is not valid JSON: Expecting property name enclosed in double quotes)."),
    ({"dataset_name": "blank.jsonl"}, "trl rloo: error: --dataset_name blank.jsonl: cannot be read (it holds no rows)."),
    ({"dataset_name": "latin.jsonl"}, "trl rloo: error: --dataset_name latin.jsonl: cannot be read (line 2 of latin.jsonl is not UTF-8: byte 0xe9, 'é' in latin-1; save it as UTF-8, for example with `iconv -f latin1 -t utf-8`)."),
    ({"dataset_name": "commas.jsonl"}, "trl rloo: error: --dataset_name commas.jsonl: cannot be read (line 1 of commas.jsonl ends with a comma, but JSON Lines has none between rows; remove it)."),
    ({"dataset_config": "main"}, "trl rloo: error: --dataset_config main: prompts.jsonl is a local path, and only datasets of the hub have configurations. Leave it out."),
    ({"model_init_kwargs": '{"trust": 1}'}, "trl rloo: error: The model 'tiny-model' does not take all of its model_init_kwargs: LlamaForCausalLM.__init__() got an unexpected keyword argument 'trust'."),
    ({"dataset_train_split": "tren"}, "trl rloo: error: --dataset_train_split tren: the dataset has the splits train."),
    ({"eval_strategy": "epoch"}, "trl rloo: error: --eval_strategy epoch: there is no split 'test' to evaluate on; the dataset has train. Set --test_split_size 0.1 to keep a share of the rows to train on, or name another split with --dataset_test_split."),
    ({"test_split_size": 0.1}, "trl rloo: error: --test_split_size 0.1 keeps rows for evaluation, but --eval_strategy is no: set --eval_strategy epoch or steps, or leave --test_split_size out."),
    ({"test_split_size": 8, "eval_strategy": "epoch"}, "trl rloo: error: --test_split_size 8.0 must be a share above 0 and below 1."),
    ({"test_split_size": 0.1, "eval_strategy": "epoch", "dataset_streaming": "true"}, "trl rloo: error: --test_split_size 0.1 needs a dataset of known length, and this is a stream: leave out --dataset_streaming,"),
    ({"reward_funcs": "acuracy_reward"}, "trl rloo: error: --reward_funcs acuracy_reward: no such reward function. Did you mean accuracy_reward?"),
    ({"reward_funcs": "rewards.py:exct"}, "trl rloo: error: --reward_funcs rewards.py:exct: rewards has no function 'exct'. Did you mean exact?"),
    ({"reward_funcs": "rewards.py"}, "trl rloo: error: --reward_funcs rewards.py: name a function of the file; it defines rewards.py:exact"),
    ({"reward_funcs": "absent.py"}, "trl rloo: error: --reward_funcs absent.py: there is no such file."),
    ({"reward_funcs": "absent.py:exact"}, "trl rloo: error: --reward_funcs absent.py: there is no such file."),
    ({"reward_funcs": "rewardz.exact"}, "trl rloo: error: --reward_funcs rewardz.exact: there is no module 'rewardz' in "),
    ({"reward_funcs": "broken.py:exact"}, "trl rloo: error: --reward_funcs broken.py: loading it failed: ZeroDivisionError: division by zero (broken.py, line 1)."),
    ({"reward_funcs": None, "reward_model_name_or_path": "tiny-model"}, "trl rloo: error: The reward model 'tiny-model' has no weights for score.weight: its rewards would be random."),
    ({"dataset_name": "preferences.jsonl"}, "trl rloo: error: The reward function 'exact' needs the column 'answer', which the dataset lacks; it has 'chosen', 'rejected'."),
    ({"num_generations": 3}, "trl rloo: error: A generation round of 8 sequences cannot hold whole groups of --num_generations 3. Nearest legal: --num_generations 2 or 4,"),
    ({"load_in_4bit": "true", "load_in_8bit": "true"}, "trl rloo: error: load_in_8bit and load_in_4bit exclude each other; choose one."),
    ({"load_in_4bit": "true"}, "trl rloo: error: Quantized weights cannot be trained: add an adapter with peft_config (--use_peft), or leave the quantization out."),
    ({"use_peft": "true", "lora_target_modules": "*"}, "trl rloo: error: target_modules (--lora_target_modules): '*' is no regular expression (nothing to repeat at position 0). For names of modules give a list."),
    ({"eval_on_start": "true"}, "trl rloo: error: --eval_on_start true has nothing to evaluate on, because --eval_strategy is no: set --eval_strategy epoch or steps, or leave --eval_on_start out."),
    ({"use_peft": "true", "lora_target_modules": "qq_proj"}, "trl rloo: error: target_modules (--lora_target_modules): the model has no module 'qq_proj'. Did you mean q_proj? Modules with weight matrices are embed_tokens, q_proj,"),
    ({"resume_from_checkpoint": "true"}, "trl rloo: error: --resume_from_checkpoint true: nothing to resume in --output_dir 'out'. There is no checkpoint there. Without the option,"),
    ({"resume_from_checkpoint": "absent"}, "trl rloo: error: --resume_from_checkpoint 'absent': there is no such folder."),
    ({"resume_from_checkpoint": "tiny-model"}, "trl rloo: error: --resume_from_checkpoint 'tiny-model' cannot be resumed from: trainer_state.json is missing."),
    ({"attn_implementation": "fast"}, 'trl rloo: error: Specified `--attn_implementation "fast"` is not supported. The only possible arguments are `--attn_implementation "eager"`,'),
    ({"model_revision": "v9", "model_name_or_path": "someone/model"}, "trl rloo: error: The model 'someone/model': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off."),
    ({"deepspeed": "absent.json"}, 'trl rloo: error: --deepspeed \'absent.json\' must be a dictionary, or a JSON object such as \'{"a": 1}\'.'),
    ({"lr_scheduler_kwargs": "[1]"}, 'trl rloo: error: --lr_scheduler_kwargs \'[1]\' must be a dictionary, or a JSON object such as \'{"a": 1}\'.'),
    ({"max_prompt_length": 2}, "trl rloo: error: The prompt of row 0 of train_dataset ('1+2=') has 4 tokens; at most 2 are possible (--max_prompt_length 2). Shorten such prompts,"),
    ({"use_peft": "true", "lora_target_modules": "q_porj, v_proj"}, "trl rloo: error: target_modules (--lora_target_modules): the model has no module 'q_porj'. Did you mean q_proj? Modules with weight matrices are embed_tokens, q_proj,"),
    # Names of models and their files.
    ({"model_name_or_path": "tiny-modl"}, "trl rloo: error: The model 'tiny-modl': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off. Did you mean tiny-model?"),
    ({"model_name_or_path": "./tiny-modl"}, "trl rloo: error: The model './tiny-modl': there is no such folder. Did you mean tiny-model?"),
    ({"model_name_or_path": "tiny-model/model.safetensors"}, "trl rloo: error: The model 'tiny-model/model.safetensors' is a file; give the folder that it is in: 'tiny-model'."),
    ({"model_name_or_path": "empty"}, "trl rloo: error: The model folder 'empty' has no config.json."),
    ({"model_name_or_path": "above-model"}, "trl rloo: error: The model folder 'above-model' has no config.json. Did you mean above-model/checkpoint-1?"),
    ({"model_name_or_path": "headless"}, "trl rloo: error: The model 'headless' has no weights for lm_head.weight, which would be random: it was saved without its output projection, as by AutoModel. Save it with AutoModelForCausalLM,"),
    ({"reward_funcs": None, "reward_model_name_or_path": "three-classes"}, "trl rloo: error: The model 'three-classes' classifies into 3 classes (num_labels=3 in its config.json); a reward model has one label, whose logit is the reward. Use one that was trained with num_labels=1."),
    ({"model_name_or_path": "no-tokenizer"}, "trl rloo: error: The model folder 'no-tokenizer' has no tokenizer: tokenizer.json is missing. Copy it and tokenizer_config.json from the model that it was trained from, or give that model's name (--tokenizer_name_or_path; in Python, a processing_class)."),
    ({"tokenizer_name_or_path": "tiny-modl"}, "trl rloo: error: The model 'tiny-modl': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off. Did you mean tiny-model?"),
    ({"model_name_or_path": "moved-adapter"}, "trl rloo: error: The adapter 'moved-adapter' was trained on a model that cannot be loaded. The model '/nowhere/model': there is no such folder. If it has moved, set base_model_name_or_path in moved-adapter/adapter_config.json to where it is now."),
    ({"eval_strategy": "steps", "dataset_test_split": "train", "save_strategy": "best", "metric_for_best_model": "eval_rewrd"}, "trl rloo: error: --metric_for_best_model 'eval_rewrd' is not logged by evaluations. Did you mean eval_reward?"),
    ({"load_best_model_at_end": "true"}, "trl rloo: error: --load_best_model_at_end true needs evaluations: set --eval_strategy 'steps', and give an eval_dataset (--dataset_test_split)."),
    ({"push_to_hub": "true"}, "trl rloo: error: --push_to_hub true cannot be used: HF_HUB_OFFLINE=1 switches the hub off. Leave push_to_hub out, or unset that variable; a finished run is uploaded by `hf upload REPOSITORY out`."),
    ({"reward_model_name_or_path": "tiny-modl"}, "trl rloo: error: reward_funcs: 'tiny-modl' is not a reward model: there is no such folder. Did you mean tiny-model?"),
    ({"reward_model_name_or_path": "tiny-model/model.safetensors"}, "trl rloo: error: The model 'tiny-model/model.safetensors' is a file; give the folder that it is in: 'tiny-model'."),
    ({"dataset_name": "promts"}, "trl rloo: error: --dataset_name promts: neither a local path nor a dataset that can be loaded from the hub (ConnectionError: Couldn't reach 'promts' on the Hub (OfflineModeIsEnabled)). The nearest is prompts.jsonl."),
    ({"tools": "x"}, "trl rloo: error: unknown option --tools (an option of `trl dpo`, `trl kto`)."),
    ({"lora_r": 8, "lora_alpha": 16}, "trl rloo: error: --lora_r 8, --lora_alpha 16: no effect without an adapter, and all weights would be trained. To train an adapter, add --use_peft (use_peft in Python), or leave out lora_r, lora_alpha."),
    ({"lora_r": 16}, "trl rloo: error: --lora_r 16: no effect without an adapter, and all weights would be trained. To train an adapter, add --use_peft "),
    ({"lora_r": 8, "plan": "true"}, "trl rloo: error: --lora_r 8: no effect without an adapter, and all weights would be trained. To train an adapter, add --use_peft "),
    ({"eval_strategy": "steps"}, "trl rloo: error: --eval_strategy steps: there is no split 'test' to evaluate on; the dataset has train. Set --test_split_size 0.1 to keep a share of the rows to train on, or name another split with --dataset_test_split."),
    ({"warmup_ratio": 3}, "trl rloo: error: --warmup_ratio 3 must be below 1, as a share of all steps; a number of steps is given by warmup_steps."),
    ({"warmup_ratio": 0.1, "warmup_steps": 3}, "trl rloo: error: RLOOConfig: both warmup_ratio and warmup_steps were given; use warmup_steps alone."),
]

# --- What trainers are given: trainer, changed arguments (options in `args`) ---


def rows(count=4, **columns):
    return Dataset.from_dict({name: [value] * count for name, value in columns.items()})


def stream_of(**row):
    return IterableDataset.from_generator(lambda: iter([row] * 4))


PROMPTS = rows(prompt="ab")
PAIRS = rows(prompt="ab", chosen="c", rejected="d")
LABELLED = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]})
CHAT = [{"role": "user", "content": "ab"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
REPLY = [{"role": "assistant", "content": "c"}]


def constant(completions, **kwargs):
    return [0.0] * len(completions)


def too_few(completions, **kwargs):
    return [0.0]


def nested(completions, **kwargs):
    return [[0.0]] * len(completions)


def words(completions, **kwargs):
    return ["good"] * len(completions)


def number(completions, **kwargs):
    return 1.0


def infinite(completions, **kwargs):
    return [float("inf")] * len(completions)


def lost(completions, solution, **kwargs):
    return [0.0] * len(completions)


def closed(completions):
    return [0.0] * len(completions)


def raises(completions, **kwargs):
    return 1 / 0


def without(name):
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, name, None)
    return tokenizer


def with_template(text):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


def with_a_new_token():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens("<new>")
    return tokenizer


def lora(**options):
    return LoraConfig(**({"r": 2, "target_modules": ["v_proj"]} | options))


def encoder_decoder():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=100, **sizes))


def encoder_decoder_classifier():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForSequenceClassification(T5Config(vocab_size=100, num_labels=1, **sizes))


def encoder():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertLMHeadModel(BertConfig(vocab_size=100, intermediate_size=16, **sizes))


PAIRED = {"num_generations": 2}  # fits the rounds of a tiny trainer


def three_classes():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=100, intermediate_size=16, num_labels=3, **sizes)
    )


def tiny_backbone():
    return tiny_model().model


def frozen():
    return tiny_model().requires_grad_(False)


MODELS = (with_a_new_token, lora_model, tiny_model, tiny_backbone, frozen, encoder_decoder, encoder_decoder_classifier, encoder, three_classes)
TRAINERS = [
    # Names and kinds of arguments.
    ("RLOO", {"tokenizer": 1}, "RLOOTrainer has no argument 'tokenizer'. Did you mean processing_class?"),
    ("SFT", {"tokenizer": 1}, "SFTTrainer has no argument 'tokenizer'. Did you mean processing_class?"),
    ("RLOO", {"reward_function": 1}, "RLOOTrainer has no argument 'reward_function'. Did you mean reward_funcs?"),
    ("DPO", {"datasets": 1}, "DPOTrainer has no argument 'datasets'. Did you mean eval_dataset?"),
    ("RLOO", {"args": GRPOConfig}, "args must be an instance of RLOOConfig, not of GRPOConfig."),
    ("RLOO", {"model": 3}, "model must be a name or a transformers model, not int."),
    ("RLOO", {"model": nn.Linear(2, 2)}, "model must be a name or a transformers model, not Linear."),
    ("SFT", {"peft_config": PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}, "Prefix tuning needs gradient_checkpointing=False: its prefix is a cache."),
    ("SFT", {"model": frozen}, "Nothing in the model can be trained: all its weights are frozen, as if loaded for inference. Load adapters with PeftModel.from_pretrained(..., is_trainable=True)."),
    ("SFT", {"formatting_func": lambda row: row["b"]}, "Row 0 of the dataset: KeyError('b')"),
    ("SFT", {"model": tiny_backbone}, "LlamaModel predicts no tokens: load the model with AutoModelForCausalLM."),
    ("SFT", {"model": encoder_decoder}, "T5ForConditionalGeneration is an encoder-decoder. Only models that continue their prompt can be trained here, such as those of AutoModelForCausalLM."),
    *[
        (name, {"model": encoder}, "BertLMHeadModel is not causal: what follows a token changes the logits at that token, so it would see what it is to predict. Encoders cannot be trained here;")
        for name in ("SFT", "DPO", "KTO", "RLOO", "PPO")
    ],
    ("Reward", {"model": encoder_decoder_classifier}, "T5ForSequenceClassification is an encoder-decoder. Only models that continue their prompt can be trained here,"),
    ("RLOO", {"model": "./absent"}, "The model './absent': there is no such folder."),
    ("SFT", {"args": SFTConfig}, "args must be an instance of SFTConfig, not the class SFTConfig itself."),
    ("RLOO", {"model": LlamaForCausalLM}, "model must be a name or a transformers model, not the class LlamaForCausalLM; load one with LlamaForCausalLM.from_pretrained."),
    *[
        case
        for name in ("SFT", "RLOO")
        for case in (
            (name, {"callbacks": [3]}, "callbacks[0] must be a transformers.TrainerCallback, not 3."),
            (name, {"callbacks": TrainerCallback}, "callbacks must be a list of callbacks, not <class 'transformers.trainer_callback.TrainerCallback'>."),
            (name, {"optimizers": 3}, "optimizers must be a pair (optimizer, scheduler), with None for what the trainer should make, not int."),
        )
    ],
    ("RLOO", {"processing_class": {}}, "processing_class must be a tokenizer, not dict."),
    ("RLOO", {"processing_class": None}, "The model does not say where it was loaded from: pass its tokenizer as processing_class."),
    ("RLOO", {"peft_config": {"r": 2}}, "peft_config must be a peft.PeftConfig, not dict."),
    ("RLOO", {"model": lora_model, "peft_config": lora()}, "The model already has an adapter: pass it without peft_config to continue training that adapter, or merge it first."),
    ("RLOO", {"peft_config": lora(target_modules=["qq_proj"])}, "target_modules (--lora_target_modules): the model has no module 'qq_proj'. Did you mean q_proj? Modules with weight matrices are embed_tokens, q_proj,"),
    # Datasets of trainers that generate.
    ("RLOO", {"train_dataset": None}, "train_dataset is required: a dataset with a 'prompt' column."),
    ("RLOO", {"train_dataset": [{"prompt": "a"}]}, "train_dataset must be a datasets.Dataset or IterableDataset, not list."),
    ("RLOO", {"train_dataset": rows(text="a", label="b")}, "train_dataset has no 'prompt' column; it has text, label."),
    ("RLOO", {"train_dataset": rows(prompt=3)}, "The prompt of row 0 of train_dataset (3) must be a string or a list of messages with 'role' and 'content'."),
    ("RLOO", {"train_dataset": Dataset.from_dict({"prompt": ["a", "b", None, ""]})}, "The prompt of row 2 of train_dataset (None) is missing. Remove such rows, for example with dataset.filter(lambda row: row['prompt'])."),
    ("RLOO", {"train_dataset": Dataset.from_dict({"prompt": [CHAT, [], CHAT]})}, "The prompt of row 1 of train_dataset ([]) has no messages. Remove such rows, for example with dataset.filter(lambda row: row['prompt'])."),
    ("RLOO", {"train_dataset": rows(prompt=[{"role": "user"}])}, "The prompt of row 0 of train_dataset ([{'role': 'user'}]) has no 'content' in message 0."),
    ("RLOO", {"train_dataset": rows(prompt=[{"content": "ab"}])}, "The prompt of row 0 of train_dataset ([{'content': 'ab'}]) must be a string or a list of messages with 'role' and 'content'."),
    ("RLOO", {"train_dataset": rows(prompt="")}, "The prompt of row 0 of train_dataset ('') has no tokens. Remove such rows from the dataset."),
    ("RLOO", {"train_dataset": rows(prompt="ab", image="x")}, "train_dataset has the column 'image': images are not available in this release. Remove the column to train on text."),
    ("RLOO", {"train_dataset": rows(1, prompt="ab")}, "train_dataset has 1 row, but one generation round takes 2 prompts x 2 completions. Add rows,"),
    ("RLOO", {"train_dataset": rows(prompt="a" * 300)}, "The prompt of row 0 of train_dataset ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa) has 300 tokens;"),
    ("RLOO", {"train_dataset": rows(prompt="abc"), "args": {"max_prompt_length": 2}}, "The prompt of row 0 of train_dataset ('abc') has 3 tokens; at most 2 are possible (max_prompt_length=2). Shorten such prompts,"),
    ("RLOO", {"args": {"max_prompt_length": 1, "long_prompts": "drop"}}, "train_dataset has 0 rows, but one generation round takes 2 prompts x 2 completions. Add rows."),
    ("RLOO", {"args": {"max_completion_length": 256}}, "max_completion_length=256 leaves no room for a prompt: the model sees 256 tokens. At most 255 minus the longest prompt is possible."),
    ("RLOO", {"train_dataset": PROMPTS.to_iterable_dataset(), "args": {"max_steps": -1}}, "An iterable train_dataset has no length: set max_steps above 0."),
    ("RLOO", {"eval_dataset": rows(0, prompt="a")}, "eval_dataset has no rows."),
    ("PPO", {"train_dataset": rows(1, prompt="ab"), "args": {"generation_batch_size": 8}}, "train_dataset has 1 row, but one generation round takes 8 prompts x 1 completion. Add rows, or lower"),
    ("RLOO", {"eval_dataset": "x"}, "eval_dataset must be a datasets.Dataset or IterableDataset, not str."),
    ("RLOO", {"train_dataset": IterableDataset.from_generator(lambda: iter(()))}, "train_dataset has no rows."),
    ("RLOO", {"train_dataset": rows(text="a").to_iterable_dataset()}, "train_dataset has no 'prompt' column; it has text."),
    ("RLOO", {"eval_dataset": {"a": PROMPTS, "b": rows(text="a")}}, "eval_dataset['b'] has no 'prompt' column; it has text."),
    ("RLOO", {"args": {"eval_strategy": "steps", "eval_steps": 1}}, "You have set `args.eval_strategy` to IntervalStrategy.STEPS but you didn't pass an `eval_dataset` to `Trainer`."),
    ("RLOO", {"args": {"accelerator_config": {"dispatch_batches": True}}}, "accelerator_config.dispatch_batches=True cannot be used: rows are text, so each process must read its own batches. Leave it out."),
    ("RLOO", {"train_dataset": rows(prompt=CHAT), "processing_class": without("chat_template")}, "The prompt of row 0 of train_dataset ([{'role': 'user', 'content': 'ab'}]) cannot be tokenized: The tokenizer has no chat template, which conversations need."),
    # Rewards.
    ("RLOO", {"reward_funcs": []}, "reward_funcs is empty: give at least one reward function or model."),
    ("RLOO", {"reward_funcs": "exct"}, "reward_funcs: 'exct' is not a reward model: there is no such folder. A reward function is passed itself, not its name."),
    ("RLOO", {"reward_funcs": "acuracy_reward"}, "reward_funcs: 'acuracy_reward' is not a reward model: there is no such folder. Did you mean accuracy_reward? A reward function is passed itself,"),
    ("RLOO", {"reward_funcs": "./judge"}, "reward_funcs: './judge' is not a reward model: there is no such folder. A reward function is passed itself, not its name."),
    ("RLOO", {"reward_funcs": [constant, 3]}, "reward_funcs[1] is 3: it must be callable, a model, or the name of a model."),
    ("RLOO", {"reward_funcs": tiny_model}, "reward_funcs: 'LlamaForCausalLM' is a LlamaForCausalLM, which writes text and gives no reward. Use a model that was trained to give rewards:"),
    ("RLOO", {"reward_funcs": three_classes}, "The model 'BertForSequenceClassification' classifies into 3 classes (num_labels=3 in its config.json); a reward model has one label, whose logit is the reward."),
    ("RLOO", {"reward_funcs": nn.Linear(1, 1)}, "The reward model 'Linear' does not say where it was loaded from: pass its tokenizer in reward_processing_classes."),
    ("RLOO", {"reward_funcs": constant, "reward_processing_classes": [None, None]}, "reward_processing_classes has length 2, and reward_funcs has length 1; give one for each, and None for those that are not models."),
    ("RLOO", {"args": {"reward_weights": [1.0, 2.0]}}, "reward_weights has 2 entries for 1 reward function (constant)."),
    ("RLOO", {"args": {"reward_weights": [float("nan")]}}, "reward_weights=[nan] must be finite."),
    ("RLOO", {"reward_funcs": too_few}, "The reward function 'too_few' returned 1 reward for 2 completions. This was a trial on the first row, {'prompt': 'ab'}, with the completion '0';"),
    ("RLOO", {"reward_funcs": nested}, "The reward function 'nested' returned [0.0] for row 0; a reward must be a number or None. This was a trial on the first row, {'prompt': 'ab'},"),
    ("RLOO", {"reward_funcs": words}, "The reward function 'words' returned 'good' for row 0; a reward must be a number or None. This was a trial on the first row, {'prompt': 'ab'},"),
    ("RLOO", {"reward_funcs": number}, "The reward function 'number' returned a float; it must return a list of 2 numbers. This was a trial on the first row, {'prompt': 'ab'},"),
    ("RLOO", {"reward_funcs": infinite}, "The reward function 'infinite' returned inf for row 0; a reward must be finite in float32. This was a trial on the first row, {'prompt': 'ab'},"),
    ("RLOO", {"reward_funcs": lost}, "The reward function 'lost' needs the column 'solution', which the dataset lacks; it has prompts alone. This was a trial on the first row,"),
    ("RLOO", {"reward_funcs": closed}, "The reward function 'closed' does not accept 'prompts', 'completion_ids', 'trainer_state', ...: functions get all columns and more by name. Add **kwargs to its arguments. This was a trial on the first row, {'prompt':"),
    ("RLOO", {"reward_funcs": raises}, "The reward function 'raises' failed: ZeroDivisionError: division by zero. This was a trial on the first row, {'prompt': 'ab'},"),
    # Models and references.
    ("RLOO", {"args": {"router_aux_loss_coef": 0.1}}, "router_aux_loss_coef=0.1: LlamaConfig is not a mixture of experts; leave the option out."),
    ("RLOO", {"args": {"generation_kwargs": {"num_beams": 4}}}, "generation_kwargs['num_beams'] cannot be used in training: beam search picks completions instead of drawing them from the policy."),
    ("RLOO", {"args": {"generation_kwargs": {"temprature": 4}}}, "generation_kwargs['temprature'] is not a generation option. Did you mean temperature?"),
    ("RLOO", {"args": {"use_vllm": True, "vllm_tensor_parallel_size": 2}}, "vllm_tensor_parallel_size=2 must divide the number of processes, which is 1: choose 1."),
    ("RLOO", {"args": {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "a,a"}}, "vllm_server_base_url='a,a' must be an address such as http://localhost:8000, or several different ones with commas between."),
    ("RLOO", {"args": {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 9}}, "vllm_max_model_length=9 is for an engine in the training process; with vllm_mode='server' give --max_model_len to `trl vllm-serve`."),
    ("RLOO", {"args": {"use_vllm": True, "vllm_max_model_length": 4}}, "The vLLM engine has a context of 4 tokens, but max_completion_length=4 leaves no room for a prompt: set vllm_max_model_length to 4 plus the longest prompt,"),
    ("GRPO", {"tools": [3], "args": PAIRED}, "tools: 3 is not a function or method."),
    ("GRPO", {"tools": 3, "args": PAIRED}, "tools must be a list of functions, not 3."),
    ("GRPO", {"tools": [len], "args": PAIRED}, "tools: <built-in function len> is not a function or method."),
    ("GRPO", {"environment_factory": 3, "args": PAIRED}, "environment_factory: 3 cannot be called; give a class, or a function without arguments that makes an environment."),
    ("GRPO", {"environment_factory": dict, "args": PAIRED}, "environment_factory: dict has no method 'reset', which begins an episode with the columns of a row."),
    ("GRPO", {"rollout_func": 3, "args": PAIRED}, "rollout_func must be a function, not 3."),
    ("GRPO", {}, "A generation round of 4 sequences cannot hold whole groups of num_generations=8. Nearest legal: num_generations=4, or generation_batch_size=8."),
    ("OnlineDPO", {"judge": 3, "reward_funcs": None}, "judge must be an object with a method 'judge', not 3."),
    ("OnlineDPO", {"judge": 3, "reward_funcs": ...}, "Both a judge and reward_funcs were given: leave one of them out."),
    ("OnlineDPO", {"judge": constant, "reward_funcs": constant}, "Both a judge and reward_funcs were given: leave one of them out."),
    ("PPO", {"value_model": 3}, "value_model must be a sequence classifier with one label (AutoModelForSequenceClassification, num_labels=1), not int."),
    ("PPO", {"value_model": tiny_model}, "value_model must be a sequence classifier with one label (AutoModelForSequenceClassification, num_labels=1), not LlamaForCausalLM."),
    # Datasets of the others.
    ("SFT", {"train_dataset": None}, "train_dataset is required."),
    ("SFT", {"train_dataset": [{"text": "a"}]}, "train_dataset must be a datasets.Dataset or IterableDataset, not list. Make one with Dataset.from_list."),
    ("SFT", {"train_dataset": {"text": ["a"]}}, "train_dataset must be a datasets.Dataset or IterableDataset, not dict. Make one with Dataset.from_dict."),
    ("SFT", {"train_dataset": DatasetDict(train=PROMPTS)}, "train_dataset must be a datasets.Dataset or IterableDataset, not DatasetDict. Choose one of train."),
    ("SFT", {"formatting_func": 3}, "formatting_func must be a function that makes a text of a row, not 3."),
    ("SFT", {"train_dataset": "data.jsonl"}, "train_dataset must be a datasets.Dataset or IterableDataset, not str."),
    ("SFT", {"train_dataset": rows(prompt="a", chosen="b")}, "The examples have the columns ['chosen', 'prompt']. Supervised fine-tuning takes 'text' (dataset_text_field), 'messages', 'conversations',"),
    ("SFT", {"train_dataset": rows(text=3)}, "Row 0 of the dataset: the text must be a string, not 3."),
    ("SFT", {"train_dataset": Dataset.from_dict({"text": ["a", None]})}, "Row 1 of the dataset: the text must be a string, not None."),
    ("SFT", {"train_dataset": rows(0, text="a")}, "train_dataset has no rows."),
    ("SFT", {"train_dataset": rows(messages=CHAT + REPLY, tools=3)}, "Row 0 of the dataset: tools must be a list of tools, not 3."),
    ("SFT", {"train_dataset": rows(messages=CHAT + REPLY, chat_template_kwargs="[1]")}, "Row 0 of the dataset: chat_template_kwargs must be a mapping, not [1]."),
    ("SFT", {"train_dataset": rows(input_ids="abc")}, "Row 0 of the dataset: input_ids must be a list of integers, not 'abc'."),
    ("SFT", {"train_dataset": rows(input_ids=[1.5, 2.0])}, "Row 0 of the dataset: input_ids must be a list of integers, not [1.5, 2.0]."),
    ("SFT", {"train_dataset": rows(messages=CHAT, tools="[f")}, "Row 0 of the dataset: tools is not valid JSON: Expecting value: line 1 column 2 (char 1)."),
    ("SFT", {"args": {"chat_template_path": "none.jinja"}}, "chat_template_path='none.jinja': there is no such file."),
    ("SFT", {"args": {"chat_template_path": "someone/templat"}}, "chat_template_path='someone/templat': there is no such folder, and HF_HUB_OFFLINE=1 switches the hub off."),
    ("SFT", {"args": {"chat_template_path": __file__}}, ": the name of a template must end in .jinja."),
    ("SFT", {"args": {"max_steps": 0}}, "max_steps=0 must be above 0, or -1 to train for num_train_epochs."),
    ("SFT", {"args": {"deepspeed": "none.json"}}, "deepspeed='none.json' must be a dictionary, or a JSON object such as '{\"a\": 1}'. There is no such file."),
    ("SFT", {"train_dataset": rows(messages=[])}, "Row 0 of the dataset: 'messages' has no messages."),
    ("SFT", {"train_dataset": rows(messages=[{"role": "user"}])}, "Row 0 of the dataset: 'messages' has no 'content' in message 0."),
    ("SFT", {"train_dataset": rows(messages="c")}, "Row 0 of the dataset: 'messages' must be a list of messages, not the string 'c'."),
    ("SFT", {"train_dataset": rows(prompt=CHAT + REPLY, completion="c")}, "Row 0 of the dataset: 'prompt' ends with a message of the assistant and 'completion' is text, which may go on with it or not."),
    ("SFT", {"train_dataset": rows(input_ids=[1, 2], completion_mask=[1])}, "Row 0 of the dataset: completion_mask must be as long as input_ids (2), not 1."),
    ("SFT", {"args": {"completion_only_loss": True}}, "completion_only_loss=True needs examples with a prompt and a completion; these have ['text']. Leave the option out."),
    ("SFT", {"args": {"assistant_only_loss": True}}, "assistant_only_loss=True needs conversations (messages with role and content); the examples have ['text']."),
    ("SFT", {"args": {"dataset_text_field": "txt"}}, "The examples have the columns ['text']. Supervised fine-tuning takes 'txt' (dataset_text_field), 'messages', 'conversations',"),
    ("SFT", {"args": {"eos_token": "<nope>"}}, "eos_token='<nope>' is not in the tokenizer's vocabulary. Its own is '<eos>'."),
    ("SFT", {"processing_class": without("eos_token")}, "Row 0 of the dataset: The tokenizer has no EOS token, so the end of plain text cannot be learned. Set tokenizer.eos_token, or the option eos_token."),
    ("SFT", {"train_dataset": rows(text="abcdef"), "args": {"max_length": 4, "long_rows": "error"}}, "4 of 4 rows have more than max_length=4 tokens, among them row 0, 1, 2. Raise max_length, or choose long_rows='cut', 'drop' or 'split'."),
    ("SFT", {"train_dataset": rows(prompt="abcdef", completion="g"), "args": {"max_length": 4}}, "None of the 4 rows has a token to train on with max_length=4 (long_rows='keep_start'). Raise the limit, or check the masks of the dataset."),
    ("SFT", {"data_collator": list}, "data_collator cannot be used: rows are laid out by the trainer, without padding. To choose the tokens in the loss, give `input_ids` with `labels`."),
    ("DPO", {"compute_metrics": print}, "compute_metrics cannot be used: logits are never held as a whole, and rows are not padded. Metrics are in the log; others can be added in `loss`."),
    ("DPO", {"train_dataset": rows(prompt="a", chosen="b")}, "The examples have the columns ['chosen', 'prompt']. DPO needs 'chosen' and 'rejected' (with 'prompt', or a common beginning)."),
    ("DPO", {"train_dataset": rows(text="a")}, "The examples have the columns ['text']. DPO needs 'chosen' and 'rejected' (with 'prompt', or a common beginning)."),
    ("DPO", {"train_dataset": LABELLED}, "The examples have the columns ['completion', 'label', 'prompt']. DPO needs 'chosen' and 'rejected' (with 'prompt', or a common beginning). Answers with a label are for KTO (`trl kto`)."),
    ("DPO", {"train_dataset": rows(prompt="a", answers=["b", "c"], ranks=[0, 1])}, "The examples have the columns ['answers', 'prompt', 'ranks']. DPO needs 'chosen' and 'rejected' (with 'prompt', or a common beginning). Ranked answers are for reward models"),
    ("KTO", {"train_dataset": rows(prompt="a", answers=["b", "c"], ranks=[0, 1])}, "The examples have the columns ['answers', 'prompt', 'ranks']. KTO needs 'prompt', 'completion' and 'label'; or 'chosen' and 'rejected' (with 'prompt', or a common beginning). Ranked answers are for"),
    ("SFT", {"train_dataset": rows(instruction="a", input="", output="b")}, "or 'input_ids'. Make them of 'instruction', 'input', 'output': in a configuration file by `columns: {prompt: \"{instruction} {input}\", completion: \"{output}\"}` of an entry of `datasets`, in Python by formatting_func"),
    ("SFT", {"train_dataset": rows(question="a", answer="b")}, "Make them of 'question', 'answer': in a configuration file by `columns: {prompt: \"{question}\", completion: \"{answer}\"}`"),
    # Conversations without what is trained on, or without a value.
    ("SFT", {"train_dataset": rows(messages=CHAT), "args": {"assistant_only_loss": True}}, "None of the 4 rows has a token to train on. assistant_only_loss=True trains on messages of the role 'assistant'; row 0 has the roles user."),
    ("SFT", {"train_dataset": rows(messages=[*CHAT, {"role": "asistant", "content": "b"}]), "args": {"assistant_only_loss": True}}, "Row 0 of the dataset: assistant_only_loss=True trains on messages of the role 'assistant', but this row has the roles user, asistant. Write 'assistant' instead of 'asistant'."),
    ("SFT", {"train_dataset": rows(messages=[*CHAT, {"role": "model", "content": "b"}]), "args": {"expand_turns": True}}, "Row 0 of the dataset: expand_turns=True trains on messages of the role 'assistant', but this row has the roles user, model. Write 'assistant' instead of 'model'."),
    ("SFT", {"train_dataset": rows(messages=CHAT), "args": {"expand_turns": True}}, "No row has a token to train on. expand_turns=True trains on messages of the role 'assistant'; row 0 has the roles user."),
    ("SFT", {"train_dataset": Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", None]})}, "Row 1 of the dataset: 'completion' is missing. Remove such rows, for example with dataset.filter(lambda row: row['completion'])."),
    ("SFT", {"train_dataset": Dataset.from_dict({"messages": [CHAT, None]})}, "Row 1 of the dataset: 'messages' is missing. Remove such rows,"),
    ("SFT", {"train_dataset": rows(messages=[*CHAT, {"role": "assistant", "content": None}])}, "Row 0 of the dataset: 'messages' has no 'content' in message 1."),
    ("DPO", {"train_dataset": Dataset.from_dict({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", None]})}, "Row 1 of the dataset: 'rejected' is missing. Remove such rows,"),
    ("KTO", {"train_dataset": rows(prompt=CHAT, completion=[{"role": "assistant", "content": None}], label=True)}, "Row 0 of the dataset: 'completion' has no 'content' in message 0."),
    # Chat templates.
    ("SFT", {"train_dataset": rows(messages=CHAT), "processing_class": without("chat_template")}, "Row 0 of the dataset: The tokenizer has no chat template, which conversations need. Give one by chat_template_path='FILE.jinja' (SFT, DPO, KTO, reward models), or"),
    ("SFT", {"train_dataset": rows(messages=CHAT), "processing_class": with_template("{% for m in messages %}\n{{ m['content'] }")}, "Row 0 of the dataset: line 2 of the chat template: unexpected '}'"),
    ("SFT", {"train_dataset": rows(messages=CHAT), "processing_class": with_template("a\nb\n{{ messages[0]['content'] + 1 }}")}, "Row 0 of the dataset: line 3 of the chat template: TypeError: can only concatenate str (not \"int\") to str"),
    ("RLOO", {"train_dataset": rows(prompt=CHAT), "processing_class": with_template("\n{{ messages | nothing }}")}, "cannot be tokenized: line 2 of the chat template: No filter named 'nothing'."),
    ("DPO", {"train_dataset": rows(prompt="a", chosen=CHAT + REPLY, rejected=REPLY)}, "Row 0 of the dataset: 'chosen' begins with a message of the user that 'prompt' does not have: it is unclear whether it belongs to the prompt."),
    ("DPO", {"train_dataset": rows(prompt=CHAT, chosen=CHAT, rejected=REPLY)}, "Row 0 of the dataset: 'chosen' repeats 'prompt' and has no answer to it."),
    ("DPO", {"args": {"max_length": 2}}, "None of the 4 rows has a token to train on with max_length=2. Raise the limit, or check the masks of the dataset."),
    ("DPO", {"ref_model": 3}, "ref_model must be a name or a transformers model, not int."),
    ("KTO", {"train_dataset": PAIRS.remove_columns("rejected")}, "The examples have the columns ['chosen', 'prompt']. KTO needs 'prompt', 'completion' and 'label'; or 'chosen' and 'rejected' (with 'prompt', or a common beginning)."),
    ("DPO", {"ref_model": "./absent"}, "The model './absent': there is no such folder."),
    ("KTO", {"train_dataset": rows(prompt="a", completion="b", label=None)}, "Row 0 of the dataset: the label must be True or False, not None."),
    ("KTO", {"train_dataset": rows(prompt="a", completion="b", label=True)}, "Row 0 has no partner: the KL estimate needs rows of other examples with other completions."),
    # Contents that no trainer reads.
    ("SFT", {"train_dataset": rows(messages=IMAGE)}, "Row 0 of the dataset: 'messages' has 'image' content, which is not available in this release, in message 0."),
    ("SFT", {"train_dataset": rows(prompt=IMAGE, completion=REPLY)}, "Row 0 of the dataset: 'prompt' has 'image' content, which is not available in this release, in message 0."),
    ("DPO", {"train_dataset": rows(prompt=IMAGE, chosen="a", rejected="b")}, "Row 0 of the dataset: 'prompt' has 'image' content, which is not available"),
    ("KTO", {"train_dataset": rows(prompt=CHAT, completion=IMAGE, label=True)}, "Row 0 of the dataset: 'completion' has 'image' content, which is not available"),
    ("Reward", {"train_dataset": rows(chosen=IMAGE, rejected=REPLY)}, "Row 0 of the dataset: 'chosen' has 'image' content, which is not available"),
    ("RLOO", {"train_dataset": rows(prompt=IMAGE)}, "The prompt of row 0 of train_dataset ([{'role': 'user', 'content': [{'type': 'image', 'image': 'a.png'}]}]) has 'image' content, which is not available"),
    ("SFT", {"train_dataset": rows(text="a", images=["a.png"])}, "train_dataset has the column 'images': images are not available in this release. Remove the column to train on text."),
    ("SFT", {"train_dataset": stream_of(text="a", image="a.png"), "args": {"max_steps": 1}}, "The dataset has the column 'image': images are not available in this release."),
    ("RLOO", {"train_dataset": stream_of(prompt="a", image="a.png"), "args": {"max_steps": 1}}, "Row 0 of train_dataset has the column 'image': images are not available in this release."),
    ("SFT", {"train_dataset": rows(messages=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}])}, "Row 0 of the dataset: the content of a message of the user has a part 'input_text', but the chat template reads text alone:"),
    ("RLOO", {"train_dataset": rows(prompt=[{"role": "user", "content": ["a"]}])}, "cannot be tokenized: the content of a message of the user has a part 'a', but the chat template reads text alone:"),
    ("Reward", {"train_dataset": LABELLED}, "The examples have the columns ['completion', 'label', 'prompt']. A reward model needs 'chosen' and 'rejected' (with 'prompt', or a common beginning); or 'prompt', 'answers' and 'ranks'."),
    ("Reward", {"train_dataset": rows(prompt="a", answers=["b", "c"], ranks=["first", "second"])}, "Row 0 of the dataset: ranks must be integers, of which the lowest is the best, not ['first', 'second']."),
    ("Reward", {"train_dataset": rows(prompt="a", answers=["b", "c"], ranks=[1.2, 1.8])}, "Row 0 of the dataset: ranks must be integers, of which the lowest is the best, not [1.2, 1.8]."),
    ("Reward", {"train_dataset": rows(prompt="a", chosen="b", rejected="c", margin="big")}, "Row 0 of the dataset: the margin must be a number, not 'big'."),
    ("Reward", {"train_dataset": rows(prompt="a", answers=["b", "c"], ranks=[1])}, "Row 0 of the dataset: 2 answers need as many ranks, not 1."),
    # Ids that the model does not know.
    ("SFT", {"train_dataset": rows(input_ids=[1, 200])}, "Row 0 of the dataset has the token id 200, but the vocabulary of the model has 95 tokens (ids 0 to 94). Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer)) before training."),
    ("SFT", {"train_dataset": rows(input_ids=[1, -100])}, "Row 0 of the dataset: input_ids has the id -100 at position 1, but ids begin with 0. To leave a token out of the loss, keep its id, and write -100 into 'labels'."),
    ("SFT", {"train_dataset": rows(text="ab<new>"), "processing_class": with_a_new_token}, "Row 0 of the dataset has the token id 95, but the vocabulary of the model has 95 tokens (ids 0 to 94)."),
    ("DPO", {"train_dataset": rows(prompt_ids=[1], chosen_ids=[2], rejected_ids=[200])}, "Row 0 of the dataset has the token id 200, but the vocabulary of the model has 95 tokens (ids 0 to 94). Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer)) before training."),
    ("DPO", {"train_dataset": rows(prompt_ids=[1], chosen_ids=[2], rejected_ids=[-1])}, "Row 0 of the dataset: the prompt or an answer has the id -1, but ids begin with 0."),
    ("KTO", {"train_dataset": rows(prompt_ids=[200], completion_ids=[2], label=True)}, "Row 0 of the dataset has the token id 200, but the vocabulary of the model has 95 tokens (ids 0 to 94). Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer)) before training."),
    ("Reward", {"train_dataset": rows(prompt_ids=[1], chosen_ids=[200], rejected_ids=[3])}, "Row 0 of the dataset has the token id 200, but the vocabulary of the model has 95 tokens (ids 0 to 94). Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer)) before training."),
    ("RLOO", {"train_dataset": rows(prompt="ab<new>"), "processing_class": with_a_new_token}, "The prompt of row 0 of train_dataset ('ab<new>') has the token id 95, but the vocabulary of the model has 95 tokens (ids 0 to 94)."),
]

# --- What trainers are given, told of, and do without ---


def nothing(completions, **kwargs):
    return [None] * len(completions)


def not_a_number(completions, **kwargs):
    return [float("nan")] * len(completions)


WARNED_TRAINERS = [
    ("RLOO", {"args": {"model_init_kwargs": {"dtype": "float32"}}}, "model_init_kwargs ignored: the given model is already loaded."),
    ("DPO", {"quantization_config": {"load_in_4bit": True}}, "quantization_config ignored: the given model is already loaded."),
    ("RLOO", {"peft_config": lora(), "args": {"learning_rate": 1e-6}}, "learning_rate=1e-06 is the default for training all weights."),
    ("RLOO", {"reward_funcs": not_a_number}, "The reward function 'not_a_number' returned NaN on the first row; return None for completions it cannot score."),
    ("RLOO", {"args": {"max_prompt_length": 1, "long_prompts": "cut-left"}}, "train_dataset: 4 of 4 prompts have more than 1 token (max_prompt_length=1) and are cut on the left."),
    ("RLOO", {"train_dataset": rows(prompt="ab", completions="c")}, "train_dataset: reward functions do not get the column 'completions', because their argument of this name is something else. Rename it: dataset.rename_column('completions', 'dataset_completions')."),
    ("GRPO", {"eval_dataset": rows(prompt="ab", log_extra="c"), "args": {"num_generations": 4}}, "eval_dataset: reward functions do not get the column 'log_extra', because their argument"),
    ("DPO", {"train_dataset": rows(prompt="a", chosen="b", rejected="b")}, "In the first row, 'chosen' and 'rejected' are equal: nothing is learned from such rows."),
    ("SFT", {"args": {"max_length": 2}, "train_dataset": rows(text="abc")}, "4 of 4 rows longer than max_length=2 (long_rows='keep_start'): 8 tokens left out, 8 of them trained."),
    ("SFT", {"train_dataset": rows(text="a" * 300)}, "4 of 4 rows are longer than the 256 tokens that the model sees (max_position_embeddings): first row 0, at most 301 tokens. To cut them, set max_length=256."),
    ("DPO", {"train_dataset": rows(prompt="a" * 300, chosen="b", rejected="cd")}, "4 of 4 rows are longer than the 256 tokens that the model sees (max_position_embeddings): first row 0, at most 303 tokens. To cut them, set max_length=256."),
    ("KTO", {"train_dataset": Dataset.from_dict({"prompt": ["a", "b" * 300], "completion": ["c", "d"], "label": [True, False]})}, "1 of 2 rows are longer than the 256 tokens that the model sees (max_position_embeddings): first row 1, at most 302 tokens. To cut them, set max_length=256."),
    ("Reward", {"train_dataset": rows(prompt="a" * 300, chosen="b", rejected="cd")}, "4 of 4 rows are longer than the 256 tokens that the model sees (max_position_embeddings): first row 0, at most 303 tokens. To cut them, set max_length=256."),
    ("RLOO", {"train_dataset": rows(prompt="a" * 250), "args": {"max_completion_length": 8}}, "train_dataset: 4 of 4 prompts, with max_completion_length=8, are longer than the 256 tokens that the model sees (max_position_embeddings): first row 0, and the longest has 250. Lower max_completion_length to 6,"),
]
