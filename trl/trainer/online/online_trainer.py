"""One training step for every trainer that generates its own completions."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ...algorithms.base import Algorithm
from ...batch import Batch, Step, with_totals
from ...generation.base import Generations, PolicyHandle
from ...models.loading import stop_token_ids
from ...models.scorer import Reader
from ...models.unwrap import causal_model, policy_for_inference
from ...models.weights import working_precision
from ...online.buffer import Buffer
from ...online.prompts import COLUMNS
from ...online.reports import Reports, log_table, print_table, tracker_rows
from ...online.reward_sources import RewardSource, resolve_rewards
from ...online.rewards import RewardSuite
from ...online.sampler import RepeatIterableDataset
from ...types import EnvironmentFactory, Mode, Prompts, RewardFunc, RolloutFunc, TokenScores
from ..attributes import ONLINE_OPTIONS, ONLINE_PROPERTIES, add_trl_properties
from ..base.annotate import Annotator
from ..base.base_trainer import BaseTrainer
from ..base.best_metric import COMPLETIONS, EVERY_EVALUATION, reward_metrics
from ..base.policy import (
    EvalDataset,
    Tokenizers,
    check_additions,
    check_optimizer,
    checked_args,
    prepare_policy,
)
from ..uncalled import ONLINE
from . import online_setup as setup
from .agents import Agents
from .correction import CorrectionOptions, EngineCorrection
from .online_config import OnlineConfig
from .rollout_batch import completion_advantages, rows_with_gradient
from .rollout_source import RewardedRollouts, RolloutSource, RoundId
from .scoring import RolloutScoring


@add_trl_properties(ONLINE_OPTIONS, ONLINE_PROPERTIES)
class OnlineTrainer(BaseTrainer):
    """The skeleton: prompts, generation, scoring, rewards, credit, buffer, reports.

    An algorithm says how rewards become advantages and advantages a loss. `make_algorithm` makes it
    of the options. To change a part of one, override a method and call that of the base class:

    - `credit(step)`: from the rewards of all ranks (`step.rewards`) to columns of `step.batch`;
    - `loss(scores, batch)`: loss terms of a chunk, each a sum and its total over the step;
    - `generate(prompts, mode)`, `collect(rows, mode)`: how completions are made.

    Datasets have a `prompt`; other columns are passed to the reward functions. `eval_dataset` may
    be a dictionary of datasets. `reward_funcs` are callables, coroutine functions, sequence
    classifiers with their `reward_processing_classes`, or names; one or a list. A model that is
    given by name is quantized by `quantization_config`; with `peft_config` an adapter is trained.
    The policy may call `tools`, a `rollout_func` makes the completions, an `environment_factory`
    what each row acts in. The reference is `ref_model`, or the policy as it is now.
    """

    config_class: ClassVar[type[OnlineConfig]]
    uncalled_methods = ONLINE
    evaluation_metrics = EVERY_EVALUATION | COMPLETIONS
    algorithm: Algorithm[TokenScores]
    train_dataset: Any
    eval_dataset: Any
    num_rounds = 0  # generated so far in training; the number of the next one
    _first_round_of_step = 0  # number of the first round that the latest step generated

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: OnlineConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Tokenizers = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | None = None,
        ref_model: str | nn.Module | None = None,
    ):
        args = checked_args(model, args, self.config_class, self.method.name)
        check_additions(callbacks, optimizers)
        self.agents = Agents(args, tools, rollout_func, environment_factory)
        given = train_dataset, eval_dataset
        train_dataset, eval_dataset = (setup.with_prompts(x, processing_class) for x in given)
        train_dataset = self.agents.checked_dataset(train_dataset, eval_dataset)
        init_kwargs: Any = args.model_init_kwargs
        sources = resolve_rewards(
            reward_funcs,
            reward_processing_classes,
            model_init_kwargs=init_kwargs,
            template_kwargs=args.chat_template_kwargs,
            trust_remote_code=args.trust_remote_code,
            of_environments=self.agents.rewards,
        )
        policy = prepare_policy(model, args, processing_class, quantization_config, peft_config)
        check_optimizer(policy.model, optimizers[0])
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        others = {"callbacks": callbacks, "optimizers": optimizers}
        super().__init__(policy, args, data_collator=list, **datasets, **others)
        # Otherwise rank 0 would read streams for all ranks, and send batches of text as tensors.
        self.accelerator.dataloader_config.dispatch_batches = False
        template_kwargs = self.agents.template_kwargs
        self.encode = setup.prompt_encoder(
            args, self.model, self.processing_class, template_kwargs, self.ranks
        )
        self.train_dataset, self.eval_dataset = setup.checked_prompts(
            self.encode, self.train_dataset, self.eval_dataset, args
        )
        self._signature_columns = list(COLUMNS)
        self._build_policy(model, ref_model)
        self._build_scoring()
        self._build_rounds(sources)
        self.set_up()
        # Rewards ask environments once they have begun.
        if args.reward_dry_run and self.agents.environments is None:
            if (row := next(iter(self.train_dataset), None)) is None:
                raise ValueError("train_dataset has no rows.")
            if args.remove_unused_columns:
                row = {name: row[name] for name in COLUMNS if name in row}
            self.rewards.dry_run(row, self.state, args.batch_plan.group_size)

    def _build_policy(self, model: str | nn.Module, ref_model: str | nn.Module | None) -> None:
        from ...generation.factory import make_engine, make_sampling  # it knows all engines

        args, tokenizer = self.args, self.processing_class
        self.sampling = make_sampling(args, stop_token_ids(self.model, tokenizer))
        if not self.sampling.stop_ids:
            warnings.warn(
                "Neither the tokenizer nor the generation config of the model has an EOS token: "
                f"no completion ends before it has {self.sampling.max_tokens} tokens "
                "(max_completion_length). Set tokenizer.eos_token.",
                stacklevel=2,
            )
        self._make_scorer(self.sampling.temperature)
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        if not (args.bf16 or args.fp16):
            dtype = working_precision(causal_model(self.model))
        whole = args.ds3_gather_for_generation or not self.ranks.shards_weights
        self.policy = PolicyHandle(
            current=lambda: self.model,
            tokenizer=tokenizer,
            ranks=self.ranks,
            device=args.device,
            dtype=dtype,
            logps=lambda *row: self.scoring.row_logps(*row),
            inference=lambda: policy_for_inference(self.model, self.accelerator, at_once=whole),
            layers_in_lockstep=not whole,
        )
        engine = make_engine(
            self.policy,
            args,
            self.sampling,
            longest_prompts=self.encode.longest,
            oom_retry=self.phases.adaptive("generation", alone=self.policy.layers_in_lockstep).run,
        )
        given, stops = self.agents.rollout_func, self.sampling.stop_ids
        call = None if given is None else lambda prompts: given(prompts, self)
        self.backend = self.agents.around(engine, call, self.policy, stops, self.encode)
        if self.algorithm.needs.ref_logps:
            self._make_reference(ref_model, model)

    def _build_scoring(self) -> None:
        args, phases = self.args, self.phases
        self.correction = EngineCorrection(
            options=CorrectionOptions.of(args),
            sampling=self.sampling,
            guard=self.guard,
            ranks=self.ranks,
        )
        self.runner.reset_hooks.append(self.correction.discard_update)
        self.runner.reset_hooks.append(lambda: self.algorithm.discard_update())
        annotator = Annotator(
            policy=lambda: self.model,
            scorer=self.scorer,
            guard=self.guard,
            chunks=lambda batch: [batch],
            # A process cannot go back alone while others wait for its part of the weights.
            size=phases.adaptive("scoring", alone=self.ranks.shards_weights),
            autocast=self.accelerator.autocast,
            reference=self.reference,
            value_reader=self.value_reader,
        )
        self.scoring = RolloutScoring(
            args=args,
            policy=self.policy,
            scorer=self.scorer,
            annotator=annotator,
            correction=self.correction,
            guard=self.guard,
            autocast=self.accelerator.autocast,
            values=self.value_reader,
        )

    def _build_rounds(self, sources: Sequence[RewardSource]) -> None:
        args, phases = self.args, self.phases
        at_once = partial(phases.adaptive("rewards").run, most=args.batch_plan.micro_batch)
        self.rewards = RewardSuite(
            sources, args.reward_weights, args.reward_timeout, self.ranks, at_once
        ).to(args.device)
        self.source = RolloutSource(
            args=args,
            encode=self.encode,
            generate=lambda prompts, mode: self.generate(prompts, mode),  # as it is then
            rewards=self.rewards,
            keeps_groups=self.algorithm.needs.whole_groups,
            ranks=self.ranks,
            phases=phases,
            metrics=self.metrics,
        )
        self.run_facts["reward functions"] = [source.name for source in sources]
        self.reports = Reports(args.output_dir, self.ranks, self.metrics)
        self.buffer = Buffer(args.batch_plan.micro_batches, args.batch_plan.iterations, self.ranks)
        self.rank_state.register(
            "round",
            lambda: self.buffer.state(self.data_position.micro_steps),
            lambda held: self.buffer.restore(self.data_position.micro_steps, held, args.device),
        )
        self.rank_state.register("num_rounds", lambda: self.num_rounds, self._count_rounds)

    def _count_rounds(self, count: int) -> None:
        """Go on after a number of rounds."""
        self.num_rounds = count

    def set_up(self) -> None:
        """Build what only this algorithm has; all stages are there."""

    def value_reader(self, model: nn.Module) -> Reader | None:
        """Return what reads values in a forward of `model`, if the algorithm needs them."""
        return None

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether rows of zero advantage are left out: all of the loss is a multiple of it."""
        is_possible = self.algorithm.needs.only_advantages and self.router_coefficient == 0.0
        return bool(self.args.skip_zero_advantages) and is_possible

    def take_step(self, inputs: list[Any], mode: Mode) -> list[Batch]:
        """Return the micro-batches of a step, generating the rollout batches they belong to."""
        if mode == "eval":
            (rows,) = inputs
            return with_totals([self.collect(rows, mode)], self.ranks)
        batches = []
        self._first_round_of_step = self.num_rounds
        for step, rows in enumerate(inputs, start=self.data_position.micro_steps):
            if self.buffer.is_stale(step):
                self.buffer.fill(step, self.collect(rows, mode))
            elif self.ranks.count > 1 and not self.scorer.check.has_agreed:
                # The round comes from a checkpoint: this process has scored nothing yet.
                self.scoring.agree_on(self.buffer.longest().rows)
            batches.append(self.buffer.at(step, accumulation=len(inputs)))
        return batches

    @torch.no_grad()
    def collect(self, rows: list[dict[str, Any]], mode: Mode = "train") -> Batch:
        """Generate completions for the rows, reward them, score them and give them credit."""
        rollouts = self.source.take(self._next_round_id(mode), rows, self.state)
        with self.phases.inference("scoring"):
            step, is_finite = self.scoring.annotate(
                rollouts.step,
                self.algorithm.needs,
                is_policys_own=self.backend.reports_policy_logps,
                global_step=self.state.global_step,
            )
        step = self.credit(step)
        self._report(rollouts, step)
        return self._ready_for_loss(step.batch, is_finite)

    def _next_round_id(self, mode: Mode) -> RoundId:
        """Number the rounds of a run, and the batches of an evaluation."""
        if mode == "eval":
            return RoundId(self.data_position.eval_batches, self.state.global_step, mode)
        number = self.num_rounds
        self.num_rounds += 1
        return RoundId(number, self.state.global_step)

    def _report(self, rollouts: RewardedRollouts, step: Step) -> None:
        mode = step.mode
        first_number = self._first_round_of_step if mode == "train" else 0
        tokens = self.reports.add(
            mode,
            rollouts.report(
                number=rollouts.round_id.number - first_number,
                advantages=completion_advantages(step.batch, self.ranks),
                token_texts=self.encode.token_texts if self.args.log_token_logps else None,
            ),
        )
        if mode == "train":
            self.state.num_input_tokens_seen += tokens
            for name, count in self.encode.counts().items():
                self.metrics[mode].maximum(name, count)

    def _ready_for_loss(self, batch: Batch, is_finite: bool) -> Batch:
        """Drop old log-probabilities if on-policy, and mark the rows that have a gradient.

        Scores that are not finite make all advantages NaN: the gradient guard skips the updates.
        """
        if not is_finite:
            nan = torch.full_like(batch.columns["advantages"], torch.nan)
            batch = batch.with_columns(advantages=nan)
        if self.scoring.is_on_policy(batch.mode):
            batch = batch.without_columns("old_logps")
        if self.skips_zero_advantages:
            batch = batch.with_columns(has_gradient=rows_with_gradient(batch))
        return batch

    def metric_names(self) -> frozenset[str]:
        """With those of each reward."""
        return self.evaluation_metrics | reward_metrics(x.name for x in self.rewards.sources)

    def may_log_own_metrics(self) -> bool:
        """Reward functions may."""
        return True

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, TokenScores]:
        """Score a chunk with gradient, and correct it for what the engine drew with."""
        needs, metrics = self.algorithm.needs, self.metrics[batch.mode]
        with_entropies = self.logs_next(batch.mode)
        scores = self.scoring.score(model, batch, needs, metrics, with_entropies)
        return self.correction(scores, batch, needs, metrics), scores

    def check_update(self, step: int) -> None:
        """Compare engine and trainer, and let the algorithm end the round."""
        self.correction.check(step, self.args.device)
        if self.algorithm.end_update(self.ranks, self.metrics["train"]):
            self.buffer.clear()

    def generate(self, prompts: Prompts, mode: Mode = "train") -> Generations:
        """Complete every row, with the seeds of the prompts."""
        self.backend.sync_weights(self.state.global_step)
        sampling, size = self.sampling.replace(seeds=prompts.seeds), self.args.group_size_in(mode)
        generations = self.backend.generate(prompts, sampling, size)
        for name, value in self.backend.take_metrics():
            self.metrics[mode].value(name, value)
        return generations

    def show(self, mode: Mode) -> None:
        """Show the completions of the latest round, if asked to."""
        args, records = self.args, self.reports.take(mode)
        if args.log_completions and records:
            print_table(records, self.state.global_step, args.num_completions_to_print)
            log_table(args.report_to, *tracker_rows(records, args.log_unique_prompts))

    def begin_training(self) -> None:
        """Drop what an earlier call has left."""
        self.buffer.clear()
        # A checkpoint knows better, since a round may end early.
        self.num_rounds = self.args.batch_plan.rounds_before(self.state.global_step)
        self.reports.restart(self.state.global_step)
        if self.is_world_process_zero():
            print(self.args.batch_plan.describe(), flush=True)

    def begin_epoch(self) -> None:
        """Read the prompts in the order of the epoch."""
        self._order.set_epoch(self.data_position.epoch)

    def end_epoch(self) -> None:
        """Drop the rest of a round, which is not trained on."""
        self.buffer.clear()

    def batch_layout(self) -> list[int]:
        """The numbers of `BatchPlan`."""
        return list(dataclasses.astuple(self.args.batch_plan))

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> DataLoader:
        is_training = kwargs.get("is_training")
        mode: Mode = "train" if is_training else "eval"
        rows, order = setup.repeated(dataset, mode, self.args, self.encode)
        kwargs["sampler_fn"] = lambda _: order
        if is_training:
            self._order = order
        batch_size = self.args.batch_plan.rows_per_rank if is_training else self.args.eval_rows
        if isinstance(rows, RepeatIterableDataset):  # of which each worker would read the whole
            collate = self._get_collator_with_removed_columns(self.data_collator, description)
            options = {"collate_fn": collate, "pin_memory": self.args.dataloader_pin_memory}
            return self.accelerator.prepare(DataLoader(rows, batch_size, **options))
        loader = super()._get_dataloader(rows, description, batch_size, *args, **kwargs)
        if not is_training and isinstance(loader.dataset, Dataset):
            # Of the last batch, accelerate gathers only rows that it takes to be in the dataset.
            repeated = len(loader.dataset) * self.args.group_size_in("eval")
            loader.dataset.total_dataset_length = repeated
        return loader
