"""One training step for every trainer that generates its own completions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import TrainerCallback

from ...generation.base import GenerationBackend, row_seeds
from ...generation.function_backend import FunctionBackend, RolloutFunction
from ...models.loading import context_length, stop_token_ids
from ...models.policy_handle import PolicyHandle
from ...models.quantized import check_sharding, working_precision
from ...models.reference import FrozenCopy, ReferencePolicy, make_reference
from ...models.scorer import Scorer
from ...models.unwrap import causal_model, policy_for_inference
from ...online.buffer import Buffer
from ...online.prompts import PromptEncoder
from ...online.reward_sources import resolve_rewards
from ...online.rewards import RewardInputs, RewardSuite
from ...ops.masking import length_mask, pad_ragged
from ...ops.policy_losses import RatioLevel, importance_ratio
from ...types import Generations, Prompts, RewardTable, Rollout, Sampling, TokenScores
from ..base.policy import check_devices, init_options, prepare_policy, router_coefficient
from ..base.run_settings import fingerprint
from ..callbacks import SyncRefAdapterCallback, SyncRefModelCallback
from .agents import Agents
from .engines import check_engine, make_engine, settle_sampling
from .online_config import OnlineConfig
from .online_scoring import OnlineScoring
from .online_setup import (
    check_context,
    check_datasets,
    check_longest_prompt,
    check_run,
    checked_prompts,
    prompt_limit,
    warn_if_endless,
)
from .rollout_correction import SamplerMismatch


class OnlineTrainer(OnlineScoring):
    """The skeleton: sampling, generation, rewards, scoring, buffering, metrics, checkpoints.

    An algorithm is a subclass that says how rewards become advantages and advantages a loss, by
    `shape_rewards`, `compute_advantages`, `policy_loss` and `ratio_level`.

    Args:
        model (`str` or `PreTrainedModel`): policy to train, by name or already loaded.
        reward_funcs: a callable, a coroutine function, a sequence classifier, the name of one, or
            a list of these.
        args (`OnlineConfig`, *optional*): options.
        train_dataset (`Dataset` or `IterableDataset`): rows with a `prompt`; the other columns
            are passed to the reward functions.
        eval_dataset (*optional*): the same for evaluation, or a dictionary of datasets.
        processing_class (*optional*): the policy's tokenizer. None: loaded with the model.
        reward_processing_classes (*optional*): tokenizers of reward models.
        callbacks (`list[TrainerCallback]`, *optional*): additional callbacks.
        optimizers (`tuple`): optimizer and scheduler, as in `transformers.Trainer`.
        quantization_config (*optional*): how to quantize a model given by name.
        peft_config (`peft.PeftConfig`, *optional*): train an adapter instead of all weights.
        tools (`list`, *optional*): functions the policy may call, see `ToolRunner`.
        rollout_func (*optional*): makes the completions itself, see `FunctionBackend`.
        environment_factory: refused.
    """

    config_class: ClassVar[type[OnlineConfig]]
    ratio_level: RatioLevel = "token"
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self.config_class(f"{name.rstrip('/').split('/')[-1]}-{self.method.name}")
        check_run(model, args, self.config_class)
        check_engine(args)
        self._agents = Agents.of(args, tools, rollout_func, environment_factory)
        check_devices(args)
        check_datasets(train_dataset, eval_dataset, args)
        self._agents.check_prompts(train_dataset)
        sources = resolve_rewards(
            reward_funcs,
            reward_processing_classes,
            model_init_kwargs=init_options(args),
            template_kwargs=args.chat_template_kwargs,
            trust_remote_code=args.trust_remote_code,
        )
        policy = prepare_policy(model, args, processing_class, quantization_config, peft_config)
        super().__init__(
            model=policy.model,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=policy.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # `compute_loss` returns the mean of a micro-batch; the Trainer divides by accumulation.
        self.model_accepts_loss_kwargs = False
        check_sharding(self.model, self.accelerator)
        self.model.add_model_tags(["trl", self.method.tag])
        self._build_loop()
        self._build_stages(sources, policy.brought_adapter)
        self._dry_run()

    # --- Construction ---

    def _build_stages(self, sources: Any, brought_adapter: bool) -> None:
        args, tokenizer = self.args, self.processing_class
        plan = args.batch_plan
        self.buffer = Buffer(plan.slices, plan.iterations)
        context = context_length(self.model)
        check_context(args, context)
        limit = prompt_limit(args, context)
        self.encode = PromptEncoder(tokenizer, self._agents.template_kwargs(args), limit)
        self.train_dataset, self.eval_dataset = checked_prompts(
            self.encode, self.train_dataset, self.eval_dataset, args
        )
        drawing = Sampling(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop_ids=stop_token_ids(self.model, tokenizer),
            extra=args.generation_kwargs or {},
        )
        self.sampling = settle_sampling(args, drawing)
        warn_if_endless(self.sampling)
        self.router_coefficient = router_coefficient(self.model, args)
        self.scorer = Scorer(
            pad_id=tokenizer.pad_token_id,
            temperature=self.sampling.temperature,
            device=args.device,
            pad_multiple=args.pad_to_multiple_of,
            router_logits=self.router_coefficient != 0.0,
            shared_prefix=args.shared_prefix,
            chunk=args.logits_chunk_size,
        )
        self.policy = self._make_handle()
        self.backend = self._make_backend()
        self.mismatch = SamplerMismatch(args, self.sampling, self.guard, self.ranks)
        self.reference = self._make_reference(brought_adapter)
        self.rewards = RewardSuite(
            sources,
            args.reward_weights,
            args.reward_timeout,
            self.ranks,
            partial(self.phases.rewards.run, most=args.per_device_train_batch_size),
        ).to(args.device)

    def _make_handle(self) -> PolicyHandle:
        args = self.args
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        if not (args.bf16 or args.fp16):
            dtype = working_precision(causal_model(self.model))
        return PolicyHandle(
            current=lambda: self.model,
            tokenizer=self.processing_class,
            ranks=self.ranks,
            device=args.device,
            dtype=dtype,
            logps=self.row_logps,
            inference=self._policy_for_inference,
            layers_in_step=self.phases.layers_are_shared,
        )

    def _make_backend(self) -> GenerationBackend:
        args, given = self.args, self._agents.rollout_func
        engine = make_engine(
            self.policy,
            args,
            self.sampling,
            report=lambda name, value: self.store.value(name, value),
            check_prompts=partial(check_longest_prompt, self.train_dataset, self.encode, args),
            attempt=self.phases.generation.run,
        )
        if given is not None:
            return FunctionBackend(lambda prompts: given(prompts, self), engine, self.ranks)
        return self._agents.with_tools(engine, self.policy, args, self.sampling.stop_ids)

    def _make_reference(self, brought_adapter: bool) -> ReferencePolicy | None:
        if self.args.beta == 0.0:
            return None
        reference = make_reference(self.model, brought_adapter).prepare(self.accelerator)
        if self.args.sync_ref_model:
            self.add_callback(self._follower(reference))
        return reference

    def _follower(self, reference: ReferencePolicy) -> TrainerCallback:
        """What moves the reference towards the policy."""
        if isinstance(reference, FrozenCopy):
            return SyncRefModelCallback(reference.model, self.accelerator)
        if reference.adapter is None:
            raise NotImplementedError(
                "sync_ref_model=True: the reference is the base model, which has no weights of its "
                "own that could move. Leave the option out, or pass a model that already has an "
                "adapter: its reference is a copy of that."
            )
        return SyncRefAdapterCallback(reference.model, self.accelerator)

    def describe_run(self) -> dict[str, Any]:
        """Add where rewards come from, and the weights that a reference copied and keeps."""
        settings = super().describe_run()
        settings["reward functions"] = [source.name for source in self.rewards.sources]
        if isinstance(self.reference, FrozenCopy) and not self.args.sync_ref_model:
            weights = dict(self.model.named_parameters())  # the copy may be sharded
            settings["the reference's weights (fingerprint)"] = fingerprint(weights)
        return settings

    # --- What an algorithm says ---

    def shape_rewards(self, table: RewardTable, batch: Rollout) -> Tensor:
        """Return the reward (N,) that credit is computed from; NaN marks an unscorable row."""
        return table.total

    def compute_advantages(self, rewards: Tensor, table: RewardTable) -> Tensor:
        """Return advantages (N,); 0 for unscorable rows."""
        raise NotImplementedError

    def policy_loss(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        """Return the loss () of a micro-batch; denominators come from `per_micro_batch`."""
        raise NotImplementedError

    # --- One training step ---

    def _prepare_inputs(self, rows: list[dict[str, Any]] | Rollout) -> Rollout:
        if isinstance(rows, Rollout):
            return rows
        if not self.model.training:
            return self.collect(rows)
        if self.buffer.is_stale(self._step):
            self.buffer.fill(self._step, self.collect(rows))
        elif self.ranks.count > 1 and not self.scorer.has_agreed:
            # The round comes from a checkpoint: this process has scored nothing yet.
            self.agree_on(self.buffer.longest())
        return self.buffer.at(self._step)

    @torch.no_grad()
    def collect(self, rows: list[dict[str, Any]]) -> Rollout:
        """Generate completions for the rows, reward them and give them credit."""
        with self.ranks.together("reading prompts"):
            prompts = self.encode(rows)
        with self.phases.inference("generation", len(prompts)):
            generations = self.generate(prompts)
        prompts, rows = generations.prompts(prompts), generations.rows(rows)
        completions = generations.messages or self.encode.completions(
            prompts, generations.completion_ids
        )
        with self.phases.inference("scoring"):
            batch, healthy = self.score(self.assemble(prompts, generations))
        inputs = RewardInputs.from_rows(rows, completions, generations.completion_ids, self.state)
        with self.phases("rewards"):
            table, extras = self.rewards(inputs, self.group_size, self.store.value)
        credited = table.without(self._excluded(generations))
        rewards = self.shape_rewards(credited, batch)
        advantages = self.compute_advantages(rewards, credited)
        self.report_round(prompts, completions, generations, (table, extras, advantages))
        return self._finish(batch, self.ranks.local(advantages), healthy)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Rollout,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the loss of one micro-batch of a rollout."""
        if return_outputs:
            raise ValueError("return_outputs=True: a rollout has no model outputs to return.")
        with self.phases("forward"):
            scores = self.current_scores(model, inputs)
        current = scores.logps.detach()
        old_logps = current if inputs.old_logps is None else inputs.old_logps
        inputs, logps = self.corrected(scores, inputs)
        ratio = importance_ratio(logps, old_logps, inputs.loss_mask, self.ratio_level)
        loss = self.policy_loss(scores, ratio, inputs)
        if scores.aux_loss is not None:
            # It is a mean over what one forward pass routes, not a sum over rows.
            loss = loss + self.router_coefficient * scores.aux_loss * inputs.share_of_slice
            self.store.value("aux_loss", scores.aux_loss)
        return loss

    # --- Stages ---

    def generate(self, prompts: Prompts) -> Generations:
        """Complete every row."""
        self.backend.sync_weights(self.state.global_step)
        sampling = self.sampling.replace(seeds=self._row_seeds(len(prompts)))
        return self.backend.generate(prompts, sampling, self.group_size)

    def _policy_for_inference(self) -> AbstractContextManager[Any]:
        # Engines that shard weights replace `self.model` when training begins.
        return policy_for_inference(
            self.model, self.accelerator, at_once=not self.phases.layers_are_shared
        )

    def per_micro_batch(self, total: Tensor, batch: Rollout) -> Tensor:
        """Turn a total over all ranks and slices into the denominator of one micro-batch.

        Dividing a micro-batch's sum by it, and averaging over micro-batches and ranks, gives the
        mean over the whole round, however the round was cut.
        """
        return total.clamp(min=1) / (self.ranks.count * batch.num_slices)

    def assemble(self, prompts: Prompts, generations: Generations) -> Rollout:
        """Say which tokens are trained on, and count them over all ranks."""
        ids = generations.completion_ids
        lengths = torch.tensor([len(row) for row in ids])
        mask = length_mask(lengths, int(lengths.max()))
        if generations.trainable is not None:
            mask = mask & pad_ragged(generations.trainable, False, width=mask.shape[1]).bool()
        if self.args.mask_truncated_completions:
            stopped = torch.tensor([reason == "stop" for reason in generations.finish])
            mask = mask & stopped[:, None]
        mask = mask.to(self.args.device)
        totals = self.ranks.sum(torch.stack([mask.sum(), mask.any(1).sum()]))
        return Rollout(
            prompt_ids=prompts.token_ids,
            completion_ids=ids,
            row_ids=list(range(len(ids))),
            loss_mask=mask,
            num_loss_tokens=totals[0],
            num_loss_rows=totals[1],
            num_slices=self.args.steps_per_generation if self.model.training else 1,
            sampling_logps=self._sampling_logps(generations),
        )

    def _finish(self, batch: Rollout, advantages: Tensor, healthy: bool) -> Rollout:
        """Drop what the loss must not read.

        On-policy the loss takes the detached current log-probabilities as old ones, which makes
        the ratio 1 exactly. An unhealthy round gets NaN advantages, so each update is refused.
        """
        if not healthy:
            advantages = torch.full_like(advantages, torch.nan)
        if self.is_on_policy:
            batch = batch.replace(old_logps=None)
        advantages = advantages.to(self.args.device)
        return batch.replace(
            advantages=advantages, has_gradient=self.rows_with_gradient(batch, advantages)
        )

    def _sampling_logps(self, generations: Generations) -> Tensor | None:
        if generations.sampling_logps is None:
            return None
        rows = generations.sampling_logps
        return pad_ragged(rows, 0.0, dtype=torch.float32).to(self.args.device)

    def _row_seeds(self, count: int) -> tuple[int, ...]:
        place = self._substep if self.model.training else self._eval_batch
        key = (self.args.seed, self.mode, self.state.global_step, place)
        return row_seeds(key, self.ranks.rank * count, count)

    def _excluded(self, generations: Generations) -> Tensor:
        """Mark the rows (N,) of all ranks that give no credit because they were cut off."""
        truncated = [reason != "stop" for reason in generations.finish]
        rows = torch.tensor(truncated, device=self.args.device)
        if not self.args.mask_truncated_completions:
            rows = torch.zeros_like(rows)
        return self.ranks.gather(rows)

    def _dry_run(self) -> None:
        """Find what is wrong with chat template, prompts or reward functions from one row."""
        if not self.args.reward_dry_run and isinstance(self.train_dataset, IterableDataset):
            return
        row = next(iter(self.train_dataset))
        self.encode([row])
        if self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            row = {name: row[name] for name in self._signature_columns if name in row}
        if self.args.reward_dry_run:
            self.rewards.dry_run(row, self.state, self.args.group_size)
