"""Which methods of a subclass are called, and which are warned of because they are not."""

import inspect
import re
import warnings

import dpo_runs
import kto_runs
import online_runs
import pytest
import reward_runs
import sft_runs
from tiny import tiny_model, tiny_tokenizer
from workspace import ROOT

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.online.online_trainer import OnlineTrainer
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.uncalled import OFFLINE, ONLINE, PREFERENCE

GENERATE = [RLOOTrainer, GRPOTrainer, OnlineDPOTrainer, PPOTrainer]
LEARN = [SFTTrainer, RewardTrainer, DPOTrainer, KTOTrainer]
CALLED = (
    *("compute_loss", "log", "training_step", "prediction_step", "evaluate", "create_optimizer"),
    *("create_scheduler", "get_train_dataloader", "get_eval_dataloader", "create_model_card"),
    *("_prepare_inputs", "_save_checkpoint", "_save", "save_model"),
)


def run(kind, folder):
    """One update, an evaluation and a checkpoint."""
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    saving |= {"eval_steps": 1, "push_to_hub": False}
    if issubclass(kind, OnlineTrainer):
        pairs = {"num_generations": 2, "per_device_train_batch_size": 1, "beta": 0.1}
        saving |= pairs if issubclass(kind, OnlineDPOTrainer) else {}
        data = online_runs.dataset()
        trainer = online_runs.make_trainer(folder, kind, eval_dataset=data, **saving)
    else:
        model, args, data = {
            SFTTrainer: (tiny_model, SFTConfig, sft_runs.pairs),
            RewardTrainer: (reward_runs.classifier, RewardConfig, reward_runs.pairs),
            DPOTrainer: (tiny_model, dpo_runs.DPOConfig, dpo_runs.pairs),
            KTOTrainer: (tiny_model, KTOConfig, kto_runs.labelled),
        }[kind.__mro__[1]]
        trainer = kind(
            model(),
            args=sft_runs.config(folder, args, **saving),
            train_dataset=data(),
            eval_dataset=data(),
            processing_class=tiny_tokenizer(),
        )
    trainer.train()
    trainer.save_model()


def raising(name):
    def method(self, *args, **options):
        raise AssertionError(f"{name} was called")

    return method


@pytest.mark.parametrize("kind", GENERATE + LEARN)
def test_methods_that_are_warned_of_are_not_called(kind, tmp_path):
    names = kind.uncalled_methods
    with pytest.warns(UserWarning, match="Mine defines methods that are never called") as caught:
        subclass = type(kind)("Mine", (kind,), {name: raising(name) for name in names})
    (message,) = [str(each.message) for each in caught if "never called" in str(each.message)]
    assert re.findall("nstead of `([^`]*)`", message) == list(names)
    run(subclass, tmp_path)


@pytest.mark.parametrize("kind", [RLOOTrainer, OnlineDPOTrainer, SFTTrainer, DPOTrainer])
def test_methods_that_are_called_are_not_warned_of(kind, tmp_path):
    called = set()

    def delegating(name):
        def method(self, *args, **options):
            called.add(name)
            return getattr(super(subclass, self), name)(*args, **options)

        return method

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subclass = type(kind)("Mine", (kind,), {name: delegating(name) for name in CALLED})
    run(subclass, tmp_path)
    assert called == set(CALLED) and not called & kind.uncalled_methods.keys()


def test_a_subclass_of_a_subclass_is_warned_of_what_is_new():
    with pytest.warns(UserWarning, match=r"`dpo_loss`: override `loss\("):

        class First(DPOTrainer):
            def dpo_loss(self):
                """Never called."""

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Second(First):
            def loss(self, scores, batch):
                """Called."""

    class Mixin:
        def concatenated_forward(self):
            """Never called."""

    with pytest.warns(UserWarning, match="concatenated_forward") as caught:
        type("Third", (Mixin, Second), {})
    assert "dpo_loss" not in str(caught[0].message)


EARLIER = {
    GRPOTrainer: [
        *("ratio_level", "needs_entropy", "compares_entropies", "has_token_losses"),
        *("clipped_losses", "per_micro_batch", "prepare"),
    ],
    SFTTrainer: ["per_micro_batch", "prepare", "statistic", "rows_class"],
    KTOTrainer: ["statistic", "answer_logps", "frozen"],
}


@pytest.mark.parametrize("kind", EARLIER)
def test_hooks_of_earlier_versions_are_warned_of(kind):
    """Also those that are attributes, whatever their value."""
    for name in EARLIER[kind]:
        with pytest.warns(UserWarning, match=f"Instead of `{name}`: "):
            type(kind)("Mine", (kind,), {name: False})


def test_the_term_on_the_page_counts_the_same_for_every_split(tmp_path):
    page = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    (block,) = re.findall("```python\n(class WithPenalty.*?)```", page, flags=re.DOTALL)
    names = {"GRPOTrainer": SFTTrainer}  # it is the same for all trainers
    exec(block, names)
    moved = []
    for rows, accumulation in ((8, 1), (2, 4), (1, 8)):
        split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        trainer = sft_runs.make_trainer(tmp_path, kind=names["WithPenalty"], **split)
        moved.append(sft_runs.direction(trainer))
    assert all(sft_runs.relative(other, moved[0]) <= 1e-5 for other in moved[1:])
    plain = sft_runs.direction(sft_runs.make_trainer(tmp_path))
    assert sft_runs.relative(plain, moved[0]) > 1e-3


@pytest.mark.parametrize(
    ("table", "kinds"),
    [(ONLINE, GENERATE), (OFFLINE, LEARN), (PREFERENCE, [DPOTrainer, KTOTrainer])],
)
def test_advice_names_what_there_is(table, kinds):
    """A method with these arguments, an argument or attribute of the trainer, or an option."""
    import trl

    for name, advice in table.items():
        hooks = re.findall(r"`(\w+)(?:\(([\w, ]*)\))?`", advice)
        for kind in kinds:
            assert name in kind.uncalled_methods
            options = {*kind.__signature__.parameters, *kind.config_class.__dataclass_fields__}
            options |= {"metrics", "peft_config", "rollout_func", "tools", "reward_funcs"}
            options |= {"needs", "answer_logps"} if "an algorithm" in advice else set()
            for hook, arguments in hooks:
                method = getattr(kind, hook, None)
                if "override" in advice and arguments:
                    assert ", ".join([*inspect.signature(method).parameters][1:]) == arguments
                assert method is not None or hook in options or hasattr(trl, hook), hook
