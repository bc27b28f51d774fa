"""The skeleton: loaders, resuming, evaluation, precision, adapters, failures."""

import shutil

import pytest
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import OfflineModeIsEnabled
from online_runs import (
    PROMPTS,
    completion_logps,
    config,
    dataset,
    make_trainer,
    prompts_seen,
    records,
    relative,
    rows_of,
    script,
    step_direction,
    token_sum,
    weights,
)
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl.algorithms.base import Algorithm, Needs
from trl.online.guard import NonFiniteError
from trl.ops.masking import masked_sum
from trl.ops.policy_losses import clipped_surrogate
from trl.trainer.model_card import Method
from trl.trainer.online.online_config import OnlineConfig
from trl.trainer.online.online_trainer import OnlineTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.types import TokenScores


class Mine(RLOOTrainer):
    """As users override it, with the arguments of `transformers.Trainer` by place."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_the_loss_can_be_changed_by_a_subclass(tmp_path):
    plain, double = (make_trainer(tmp_path, kind) for kind in (RLOOTrainer, Mine))
    assert relative(step_direction(double), 2 * step_direction(plain)) < 1e-6


MANY = [f"{chr(97 + i)}{i}" for i in range(12)]


def test_prompts_come_in_order_and_epochs_reshuffle(tmp_path):
    plain = tmp_path / "plain"
    make_trainer(plain, data=dataset(MANY), max_steps=6).train()
    assert list(prompts_seen(plain).values()) == [MANY[i : i + 2] for i in range(0, 12, 2)]
    mixed = tmp_path / "mixed"
    make_trainer(mixed, data=dataset(MANY), max_steps=12, shuffle_dataset=True).train()
    seen = [prompt for group in prompts_seen(mixed).values() for prompt in group]
    assert sorted(seen[:12]) == sorted(seen[12:]) == sorted(MANY)
    assert seen[:12] != seen[12:] and seen[:12] != MANY


@pytest.mark.parametrize("stop", [4, 8])
def test_resuming_continues_with_the_same_data_and_weights(tmp_path, stop):
    """Stopped within the first epoch or the second; sampled completions included."""
    settings = {
        "data": dataset(MANY),
        "script": None,
        "max_steps": 11,
        "shuffle_dataset": True,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "beta": 0.0,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = make_trainer(whole, **settings)
    uninterrupted.train()
    make_trainer(parts, **settings, save_strategy="steps", save_steps=stop).train()
    for folder in parts.glob("checkpoint-*"):
        if folder.name != f"checkpoint-{stop}":
            shutil.rmtree(folder)
    resumed = make_trainer(parts, **settings, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 11
    assert prompts_seen(parts) == prompts_seen(whole)
    assert records(parts) == records(whole), "nothing twice, nothing lost"
    assert torch.equal(weights(resumed.model), weights(uninterrupted.model))


def test_same_seed_same_run(tmp_path):
    runs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer = make_trainer(tmp_path / name, script=None, max_steps=3, seed=seed)
        trainer.train()
        runs.append(([r["completion_ids"] for r in records(tmp_path / name)], trainer.model))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert torch.equal(weights(runs[0][1]), weights(runs[1][1]))


def test_a_reward_that_changes_its_arguments_trains_alike(tmp_path):
    def spoiling(completion_ids, completions, **kwargs):
        rewards = token_sum(completion_ids)
        for ids in completion_ids:
            ids.clear()
        completions.clear()
        return rewards

    plain, other = (
        make_trainer(tmp_path / reward.__name__, reward=reward) for reward in (token_sum, spoiling)
    )
    start = weights(plain.model)
    plain.train()
    other.train()
    assert (weights(plain.model) - start).abs().max() > 1e-6
    assert torch.equal(weights(other.model), weights(plain.model))


def test_iterable_dataset_gives_the_same_steps(tmp_path):
    def stream():
        for prompt in MANY:
            yield {"prompt": prompt}

    mapped = make_trainer(tmp_path / "map", data=dataset(MANY), max_steps=3)
    iterable = make_trainer(
        tmp_path / "iterable", data=IterableDataset.from_generator(stream), max_steps=3
    )
    mapped.train()
    iterable.train()
    assert prompts_seen(tmp_path / "iterable") == prompts_seen(tmp_path / "map")
    assert torch.equal(weights(mapped.model), weights(iterable.model))


def test_rounds_serve_several_updates(tmp_path):
    trainer = make_trainer(
        tmp_path,
        data=dataset(MANY),
        per_device_train_batch_size=4,
        steps_per_generation=4,
        max_steps=8,
    )
    trainer.train()
    assert prompts_seen(tmp_path) == {0: MANY[:4], 4: MANY[4:8]}


def test_conversational_prompts(tmp_path):
    seen = []

    def reward(prompts, completions, flavor, **kwargs):
        seen.append((prompts[0], completions[0], flavor))
        return [float(len(c[0]["content"])) for c in completions]

    rows = [[{"role": "user", "content": text}] for text in PROMPTS]
    data = Dataset.from_dict({"prompt": rows, "flavor": list("wxyz")})
    trainer = make_trainer(tmp_path, data=data, reward=reward)
    trainer.train()
    prompt, completion, flavor = seen[-1]
    assert prompt == rows[0] and completion[0]["role"] == "assistant"
    assert flavor == ["w"] * 4 + ["x"] * 4
    first = records(tmp_path)[0]
    expected = tiny_tokenizer().apply_chat_template(rows[0], add_generation_prompt=True)
    ids = expected["input_ids"]
    assert first["completion_ids"] == script(ids, 0)


def test_evaluation(tmp_path):
    trainer = make_trainer(
        tmp_path,
        eval_dataset=dataset(["xy", "z", "w"]),
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        beta=0.1,
    )
    trainer.train()
    logged = next(e for e in trainer.state.log_history if "eval_reward" in e)
    rows = records(tmp_path, "eval")
    assert len(rows) == 6 and sorted({r["prompt"] for r in rows}) == ["w", "xy", "z"]
    rewards = token_sum([r["completion_ids"] for r in rows])
    batches = [rewards[:4], rewards[4:]]
    expected = sum(sum(b) / len(b) for b in batches) / 2
    assert logged["eval_reward"] == pytest.approx(expected, abs=1e-5)
    assert "eval_kl" in logged and "eval_entropy" in logged
    assert not any(name.startswith("eval_") for e in trainer.state.log_history[:1] for name in e)
    assert trainer.model.training is False or trainer.state.global_step == 1


def test_best_model_by_reward(tmp_path):
    trainer = make_trainer(
        tmp_path,
        eval_dataset=dataset(["xy"]),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="reward",
        max_steps=2,
    )
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(
        next(e["eval_reward"] for e in trainer.state.log_history if "eval_reward" in e)
    )


def test_evaluate_by_hand_checks_groups(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_dataset=dataset(), num_generations_eval=3, per_device_eval_batch_size=4
    )
    with pytest.raises(ValueError, match="per_device_eval_batch_size=3 or 6"):
        trainer.evaluate()


def test_eval_with_one_completion(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_dataset=dataset(), num_generations_eval=1, per_device_eval_batch_size=4
    )
    assert trainer.evaluate()["eval_loss"] == 0.0
    assert {r["advantage"] for r in records(tmp_path, "eval")} == {0.0}


@pytest.mark.parametrize("setting", [{}, {"per_device_train_batch_size": 4}])
def test_non_finite_log_probability_names_the_row(tmp_path, setting):
    def unique(ids, place):
        return [75, 76, 1] if (len(ids), place) == (3, 2) else script(ids, place)

    trainer = make_trainer(tmp_path, script=unique, gradient_accumulation_steps=2, **setting)
    before = weights(trainer.model)
    _poison(trainer.model, token=75)
    poisoned = weights(trainer.model)
    with pytest.raises(NonFiniteError, match="Step 1: log-probability of row 6 on rank 0 is NaN"):
        trainer.train()
    after = weights(trainer.model)
    assert torch.equal(after[poisoned.isfinite()], before[poisoned.isfinite()])


def _poison(model, token):
    """Make the embedding of one token NaN: rows that contain it have NaN log-probabilities."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan


def test_non_finite_updates_can_be_skipped_and_are_counted(tmp_path):
    trainer = make_trainer(
        tmp_path, non_finite="skip", max_steps=2, data=dataset(["cde", "f", "ab", "ghij"])
    )
    written = [
        {token for place in range(4) for token in script(tiny_tokenizer()(p)["input_ids"], place)}
        | set(tiny_tokenizer()(p)["input_ids"])
        for p in ("cde", "f", "ab", "ghij")
    ]
    token = min((written[0] | written[1]) - written[2] - written[3])
    _poison(trainer.model, token)
    before = weights(trainer.model)
    trainer.train()
    logged = [e["frac_skipped_updates"] for e in trainer.state.log_history if "loss" in e]
    assert logged == [1.0, 0.0]
    finite = before.isfinite()
    assert not torch.equal(weights(trainer.model)[finite], before[finite]), "the second counts"


def test_non_finite_reference_is_no_unscorable_row(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1)
    _poison(trainer.reference.model, token=script(tiny_tokenizer()("ab")["input_ids"], 0)[0])
    with pytest.raises(NonFiniteError, match="log-probability of the reference of row"):
        trainer.train()


def test_skipping_a_round_with_a_bad_reference(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, non_finite="skip")
    _poison(trainer.reference.model, token=script(tiny_tokenizer()("ab")["input_ids"], 0)[0])
    assert step_direction(trainer).abs().max() == 0.0
    assert trainer.state.log_history[0]["frac_skipped_updates"] == 1.0


def test_dropout_is_off_while_scoring(tmp_path):
    """With dropout in the policy, on-policy ratios stay 1 and the KL at the start stays 0."""
    trainer = make_trainer(tmp_path, model=tiny_model(attention_dropout=0.5), beta=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0.0


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain = step_direction(make_trainer(tmp_path / "a"))
    recomputed = step_direction(make_trainer(tmp_path / "b", gradient_checkpointing=True))
    assert (plain - recomputed).norm() / plain.norm() < 1e-6


def test_several_stop_ids(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = [30, 31]
    trainer = make_trainer(
        tmp_path, model=model, script=lambda ids, place: [[12, 1], [12, 30, 5], [31], [9, 9]][place]
    )
    trainer.train()
    found = [(r["completion_ids"], r["finish"]) for r in records(tmp_path)[:4]]
    assert found == [([12, 1], "stop"), ([12, 30], "stop"), ([31], "stop"), ([9, 9], "length")]
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0.25


def test_checkpoint_has_a_model_card(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1).train()
    card = (tmp_path / "checkpoint-1" / "README.md").read_text()
    assert "2402.14740" in card and "- rloo" in card


def test_uploads_are_refused_while_the_hub_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="push_to_hub=True cannot be used: HF_HUB_OFFLINE=1 "):
        make_trainer(tmp_path, push_to_hub=True, hub_model_id="me/model")
    trainer = make_trainer(tmp_path)
    with pytest.raises(OfflineModeIsEnabled, match="nothing was uploaded, as HF_HUB_OFFLINE=1 "):
        trainer.push_to_hub()


def test_model_by_name(tmp_path):
    name = save_tiny(tmp_path / "model")
    trainer = RLOOTrainer(name, token_sum, config(tmp_path / "out"), dataset())
    assert trainer.model.dtype == torch.float32
    assert trainer.processing_class.padding_side == "left"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train_dataset": None}, ValueError, "train_dataset is required"),
        ({"train_dataset": [{"prompt": "a"}]}, TypeError, "not list"),
        (
            {"train_dataset": Dataset.from_dict({"text": ["a"]})},
            ValueError,
            "no 'prompt' column; it has text",
        ),
        ({"train_dataset": dataset(["a"])}, ValueError, "1 row.* 2 prompts x 4 completions"),
        ({"model": 3}, TypeError, "not int"),
        ({"processing_class": "gpt2"}, TypeError, "not str"),
        ({"processing_class": None}, ValueError, "processing_class"),
        ({"peft_config": 1}, TypeError, "peft.PeftConfig"),
    ],
)
def test_bad_arguments(tmp_path, changes, error, words):
    arguments = {
        "model": tiny_model(),
        "reward_funcs": token_sum,
        "args": config(tmp_path),
        "train_dataset": dataset(),
        "processing_class": tiny_tokenizer(),
    } | changes
    with pytest.raises(error, match=words):
        RLOOTrainer(**arguments)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_prompts_are_checked_before_training(tmp_path, split):
    bad = dataset(["a", "b" * 300, "c", "d"])
    data = {"data": bad} if split == "train" else {"eval_dataset": {"x": bad}}
    name = "train_dataset" if split == "train" else r"eval_dataset\['x'\]"
    with pytest.raises(ValueError, match=f"row 1 of {name} .*300 tokens; at most 255 are possible"):
        make_trainer(tmp_path, **data)


def test_long_prompts_are_dropped_or_cut_and_counted(tmp_path):
    data = dataset(["ab", "x" * 50, "cd", "ef", "gh"])
    limits = {"max_prompt_length": 9, "max_steps": 2, "data": data}
    dropping = make_trainer(tmp_path, long_prompts="drop", **limits)
    assert dropping.train_dataset["prompt"] == ["ab", "cd", "ef", "gh"]
    dropping.train()
    assert dropping.state.log_history[0]["prompts/dropped"] == 1
    cutting = make_trainer(tmp_path, long_prompts="cut-left", **limits | {"max_steps": 1})
    cutting.train()
    assert cutting.state.log_history[0]["prompts/cut"] == 1
    assert [len(ids) for ids in cutting.buffer.longest().rows.prompt_ids] == [2] * 4 + [9] * 4
    with pytest.raises(ValueError, match="train_dataset has 1 row,"):
        make_trainer(
            tmp_path, long_prompts="drop", max_prompt_length=9, data=dataset(["a", "x" * 20])
        )


def test_a_stream_is_checked_as_it_is_read_and_resumes_exactly(tmp_path):
    def stream():
        return dataset(["ab", "x" * 50, "cd", "ef", "y" * 60, "gh"]).to_iterable_dataset()

    options = {
        "max_prompt_length": 9,
        "long_prompts": "drop",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = make_trainer(tmp_path / "a", data=stream(), **options)
    whole.train()
    for step in (1, 3):
        resumed = make_trainer(tmp_path / "a", data=stream(), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
        for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, two)
    assert whole.state.log_history[-2]["prompts/dropped"] >= 2
    with pytest.raises(ValueError, match="row 4 of train_dataset .* 60 tokens; at most 55"):
        make_trainer(
            tmp_path / "b",
            data=stream(),
            max_prompt_length=55,
            per_device_train_batch_size=4,
            max_steps=4,
        ).train()


def test_a_tokenizer_without_an_end_is_told_once(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    model = tiny_model()
    model.generation_config.eos_token_id = None
    words = "no completion ends before it has 8 tokens"
    with pytest.warns(UserWarning, match=words) as caught:
        RLOOTrainer(model, token_sum, config(tmp_path), dataset(), None, tokenizer)
    assert sum(words in str(warning.message) for warning in caught) == 1


def test_missing_pad_token_falls_back_to_eos(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    trainer = RLOOTrainer(tiny_model(), token_sum, config(tmp_path), dataset(), None, tokenizer)
    assert trainer.scorer.pad_id == tokenizer.eos_token_id == trainer.model.config.pad_token_id


def test_the_first_row_is_tried_before_training(tmp_path):
    """Its prompt, by the chat template; and rewards with the columns that training will pass."""
    messages = [[{"role": "user", "content": p}] for p in PROMPTS]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="The tokenizer has no chat template"):
        RLOOTrainer(tiny_model(), token_sum, config(tmp_path), dataset(messages), None, tokenizer)

    def needs(completions, answer, **kwargs):
        return [1.0] * len(answer)

    data = dataset(answer=["1"] * len(PROMPTS))
    make_trainer(tmp_path, reward=needs, data=data)
    with pytest.raises(ValueError, match="needs the column 'answer', .* a trial on the first"):
        make_trainer(tmp_path, reward=needs, data=data, remove_unused_columns=True)


def test_an_earlier_run_in_the_same_folder_is_said(tmp_path, log):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    make_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert "of an earlier run" not in log.text
    make_trainer(tmp_path).train()
    assert "has checkpoint-1 of an earlier run" in log.text


def token_credit(reward, row, place):
    """Grows along a completion; every third row has none, so that it may be left out."""
    return 0.0 if row % 3 == 2 else float(reward) * (place + 1) / 4 - 1


class TokenAlgorithm(Algorithm[TokenScores]):
    """Clipped ratios of tokens, each with an advantage of its own: (B, C)."""

    needs = Needs(ratio="token", only_advantages=True)

    def credit(self, step, metrics):
        batch = step.batch
        advantages = torch.zeros(batch.loss_mask.shape)
        for row, reward in enumerate(step.ranks.local(step.rewards.total)):
            for place in range(len(batch.rows.completion_ids[row])):
                advantages[row, place] = token_credit(reward, row, place)
        return step.with_batches([batch.with_columns(advantages=advantages)])

    def loss(self, scores, batch, metrics):
        columns = batch.columns
        losses = clipped_surrogate(columns["ratio"], columns["advantages"], 0.2, 0.2)
        total = masked_sum(batch.weighted(losses), batch.loss_mask)
        return {"policy": (total, batch.totals.tokens)}


class TokenCredit(OnlineTrainer):
    """What trains by it."""

    config_class = OnlineConfig
    method = Method("token credit", "token-credit")

    def make_algorithm(self):
        return TokenAlgorithm()


def steps_of_a_loop(rows, count, rate):
    """The change of the weights by `count` steps on the same rows, one token after the other."""
    model, old = tiny_model(), None
    before = weights(model)
    rewards = token_sum([completion for _, completion in rows])
    tokens = sum(len(completion) for _, completion in rows)
    for _ in range(count):
        logps = [completion_logps(model, *row) for row in rows]
        old = [x.detach() for x in logps] if old is None else old
        loss = 0.0
        for row, reward in enumerate(rewards):
            for place, logp in enumerate(logps[row]):
                credit = token_credit(reward, row, place)
                ratio = (logp - old[row][place]).exp()
                loss = loss - torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit)
        model.zero_grad()
        (loss / tokens).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    return weights(model) - before


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"shared_prefix": False, "skip_zero_advantages": False},
    ],
    ids=["at once", "in micro-batches", "plain rows"],
)
def test_advantages_of_tokens_reach_the_gradient(tmp_path, changes, passes):
    """The second pass has ratios that are not 1."""
    settings = {"num_iterations": passes, "max_steps": passes}
    trainer = make_trainer(tmp_path, TokenCredit, **settings, **changes)
    before = weights(trainer.model)
    trainer.train()
    rows = rows_of(PROMPTS[:2], 4)
    expected = steps_of_a_loop(rows, passes, rate=trainer.args.learning_rate)
    assert relative(weights(trainer.model) - before, expected) <= 1e-5
    for row, record in enumerate(records(tmp_path)):
        credits = [token_credit(record["reward"], row, t) for t in range(len(rows[row][1]))]
        assert record["advantage"] == pytest.approx(sum(credits) / len(credits), rel=1e-5)
