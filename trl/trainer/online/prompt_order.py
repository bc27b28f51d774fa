"""The order of prompts: each stands in a row for its group, and comes again for each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from ...data.sampler import RepeatIterableDataset, RepeatSampler
from ...online.prompts import PromptEncoder
from .batch_math import check_eval_groups
from .online_config import OnlineConfig
from .online_setup import check_dataset

Sampler = Callable[[Any], RepeatSampler]


class PromptOrder:
    """Repeats the prompts of datasets for their groups.

    Args:
        args (`OnlineConfig`): batch sizes, seed, `shuffle_dataset`.
        encode (`PromptEncoder`): checks the prompts of datasets that are only evaluated.
    """

    def __init__(self, args: OnlineConfig, encode: PromptEncoder):
        self._args = args
        self._encode = encode
        self._training: RepeatSampler | RepeatIterableDataset | None = None

    def for_training(self, dataset: Any) -> tuple[Any, Sampler]:
        """The dataset as training reads it, and the order of its rows if it is no stream."""
        if not isinstance(dataset, IterableDataset):
            return dataset, self._train_sampler
        plan, args = self._args.batch_plan, self._args
        prompts = plan.round_rows // plan.group_size
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        self._training = RepeatIterableDataset(
            dataset, plan.group_size, prompts, plan.micro_steps_per_round
        )
        return self._training, self._train_sampler

    def _train_sampler(self, dataset: Any) -> RepeatSampler:
        plan, args = self._args.batch_plan, self._args
        self._training = RepeatSampler(
            dataset,
            mini_repeat_count=plan.group_size,
            batch_size=plan.round_rows // plan.group_size,
            repeat_count=plan.micro_steps_per_round,
            shuffle=bool(args.shuffle_dataset),
            seed=args.seed,
        )
        return self._training

    def for_evaluation(self, dataset: Any) -> tuple[Any, Sampler]:
        """The dataset as evaluation reads it, and the order of its rows if it is no stream.

        Raises:
            ValueError: if batches hold no whole groups, or a prompt cannot be used.
        """
        args = self._args
        group = args.eval_group_size
        check_eval_groups(args.eval_rows, args.world_size, group)
        check_dataset("eval_dataset", dataset)
        dataset = self._encode.check("eval_dataset", dataset)
        if isinstance(dataset, IterableDataset):
            dataset = RepeatIterableDataset(dataset, group, 1, 1)
        return dataset, partial(RepeatSampler, mini_repeat_count=group, seed=args.seed)

    def set_epoch(self, epoch: int) -> None:
        """Let training go on in the order of an epoch."""
        if self._training is not None:
            self._training.set_epoch(epoch)

    @contextmanager
    def reading(self, dataset: Any) -> Iterator[None]:
        """Make the loader of a stream without workers: each would read the whole of it."""
        alone = {
            "dataloader_num_workers": 0,
            "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": None,
        }
        usual = {name: getattr(self._args, name) for name in alone}
        chosen = alone if isinstance(dataset, IterableDataset) else {}
        try:
            for name, value in chosen.items():
                setattr(self._args, name, value)
            yield
        finally:
            for name, value in usual.items():
                setattr(self._args, name, value)
