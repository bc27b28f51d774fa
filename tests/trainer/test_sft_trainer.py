"""What one step of supervised fine-tuning computes, whatever the rows are laid out like."""

import copy
import itertools

import pytest
import torch
from datasets import Dataset, DatasetDict
from sft_runs import (
    EOS,
    PAIRS,
    by_hand,
    config,
    direction,
    encoded,
    logged,
    make_trainer,
    pairs,
    relative,
    texts,
    weights,
)
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

ENCODER = TextEncoder(tiny_tokenizer())

SPLITS = {
    "one micro-batch": {},
    "single rows": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "three, three, two": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "padded rows": {"shared_prefix": False},
    "padded to 16": {"shared_prefix": False, "pad_to_multiple_of": 16},
    "padded, in twos": {
        "shared_prefix": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "packs": {"packing": True, "per_device_train_batch_size": 4},
    "packs, one at a time": {
        "packing": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 3,
    },
    "token budget": {"max_tokens_per_micro_batch": 40, "gradient_accumulation_steps": 8},
    "shuffled": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "tiles of logits": {"logits_chunk_size": 64},
    "all logits": {"logits_chunk_size": 0},
    "checkpointing": {"gradient_checkpointing": True},
    "pieces": {"max_tokens_per_piece": 40},
    "pieces of single rows": {"max_tokens_per_piece": 1, "packing": True},
    "selective checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
    },
    "tokenized while training": {"lazy_tokenization": True},
}


@pytest.fixture(scope="module")
def reference():
    return by_hand(tiny_model(), [encoded(*pair) for pair in PAIRS])


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_are_those_of_rows_computed_singly(tmp_path, reference, split):
    trainer = make_trainer(tmp_path, **SPLITS[split])
    assert relative(direction(trainer), reference[1]) <= 5e-6
    assert trainer.state.log_history[0]["loss"] == pytest.approx(reference[0], rel=1e-6)
    assert trainer.state.global_step == 1
    assert logged(trainer, "entropy") == [pytest.approx(reference[2], rel=1e-5)]
    assert logged(trainer, "mean_token_accuracy") == [pytest.approx(reference[3], rel=1e-6)]


def test_dft_weighs_tokens_with_their_probability(tmp_path):
    expected = by_hand(tiny_model(), [encoded(*pair) for pair in PAIRS], weigh=lambda p: p)
    trainer = make_trainer(tmp_path, loss_type="dft", learning_rate=100.0)
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]


def test_prompts_are_trained_where_asked(tmp_path):
    rows = [(encoded(*pair)[0], 0) for pair in PAIRS]
    trainer = make_trainer(tmp_path, completion_only_loss=False)
    assert relative(direction(trainer), by_hand(tiny_model(), rows)[1]) <= 5e-6


@pytest.mark.parametrize("changes", [{}, {"packing": True}, {"eval_packing": True}])
def test_evaluation_of_the_training_rows_gives_the_training_loss(tmp_path, reference, changes):
    """For any size of the batches: the loss is the mean over tokens, not over batches."""
    trainer = make_trainer(
        tmp_path,
        eval_dataset=pairs(),
        per_device_eval_batch_size=3,
        **{"per_device_train_batch_size": 8} | changes,
    )
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(reference[0], rel=1e-6)
    assert found["eval_entropy"] == pytest.approx(reference[2], rel=1e-5)
    assert found["eval_mean_token_accuracy"] == pytest.approx(reference[3], rel=1e-6)
    assert trainer.predict(pairs()).metrics["test_loss"] == pytest.approx(reference[0], rel=1e-6)


def test_several_evaluation_sets(tmp_path):
    sets = {"short": pairs(PAIRS[:3]), "long": pairs(PAIRS[3:])}
    trainer = make_trainer(tmp_path, eval_dataset=sets)
    found = trainer.evaluate()
    for name, rows in (("short", PAIRS[:3]), ("long", PAIRS[3:])):
        expected = by_hand(tiny_model(), [encoded(*pair) for pair in rows])
        assert found[f"eval_{name}_loss"] == pytest.approx(expected[0], rel=1e-6)
    assert trainer.evaluate(pairs(PAIRS[:3]))["eval_loss"] == found["eval_short_loss"]


@pytest.mark.parametrize("changes", [{}, {"packing": True}])
def test_documents_do_not_see_each_other(tmp_path, changes):
    """Another document of the same lengths beside it leaves every log-probability as it is."""
    trainer = make_trainer(tmp_path, **changes)
    others = pairs([("x", "yz"), ("Say", " something else, just as long!!!!"), *PAIRS[2:]])
    found = []
    for data in (pairs(), others):
        items = trainer.prepare_dataset(data, ENCODER, trainer.args, "train")
        batch = trainer.collate([items[i] for i in range(len(items))])
        with torch.no_grad():
            found.append(trainer.scorer(trainer.model, batch.rows).logps[2:])
    width = min(logps.shape[1] for logps in found)
    # Places move, so the same values come from other blocks of the same kernels.
    assert torch.allclose(found[0][:, :width], found[1][:, :width], rtol=0, atol=2e-6)


def test_a_document_changed_in_place_moves_no_bit_of_the_others(tmp_path):
    trainer = make_trainer(tmp_path)
    found = []
    for completion in (" something much longer than that.", " SOMETHING MUCH LONGER THAN THIS!"):
        rows = [PAIRS[0], ("Say", completion), *PAIRS[2:]]
        items = trainer.prepare_dataset(pairs(rows), ENCODER, trainer.args, "train")
        batch = trainer.collate([items[i] for i in range(len(items))])
        with torch.no_grad():
            found.append(trainer.scorer(trainer.model, batch.rows).logps)
    reader = trainer.scorer.token_reader(trainer.model)
    assert trainer.scorer.packs(trainer.model, batch.rows, [reader])
    kept = [0, *range(2, len(PAIRS))]
    assert torch.equal(found[0][kept], found[1][kept])
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        {"padding_free": True},
        {"shared_prefix": False},
        {"shared_prefix": False, "packing": True},
        {"shared_prefix": False, "per_device_train_batch_size": 1, "max_steps": 2},
    ],
)
@pytest.mark.parametrize("sizes", [[9] * 8, [4, 30, 9, 17, 2, 12, 5, 6]])
def test_no_mask_of_ones_alone_is_handed_to_the_model(tmp_path, changes, sizes):
    """With one, transformers looks for no documents in a row: all tokens would see each other."""
    model, calls = tiny_model(), []

    def look(module, args, given):
        if torch.is_grad_enabled():
            calls.append(given)

    model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    rows = [list(range(2 + i, 2 + i + size)) for i, size in enumerate(sizes)]
    make_trainer(tmp_path, Dataset.from_dict({"input_ids": rows}), model=model, **changes).train()
    assert calls
    for given in calls:
        mask = given.get("attention_mask")
        if mask is None or mask.dim() == 2:  # each row is one document
            assert (given["position_ids"].diff() == 1).all()
            assert mask is None or not mask.all()
        else:  # the attention reads the layout of documents instead
            assert mask.shape == (1, 1, 1, 1)


@pytest.mark.parametrize("across", [False, True])
def test_blocks_of_wrapped_documents_are_isolated_unless_they_are_to_attend(tmp_path, across):
    """By value: the gradient is that of blocks computed as one row, or of their documents."""
    size = 16
    tokenizer = tiny_tokenizer()
    documents = [[*tokenizer(text)["input_ids"], EOS] for text in texts()["text"]]
    flat = [token for ids in documents for token in ids]
    ends = {0, *range(0, len(flat), size), len(flat)}
    if not across:
        ends |= set(itertools.accumulate(map(len, documents)))
    rows = [(flat[a:b], 0) for a, b in itertools.pairwise(sorted(ends))]
    expected = by_hand(tiny_model(), [row for row in rows if len(row[0]) > 1])
    options = {"packing": True, "packing_strategy": "wrapped", "wrapped_attends_across": across}
    options |= {"per_device_train_batch_size": 100}
    trainer = make_trainer(tmp_path, texts(), max_length=size, **options)
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss")[0] == pytest.approx(expected[0], rel=1e-6)


def test_streams_have_no_blocks_that_attend_across(tmp_path):
    options = {"packing": True, "packing_strategy": "wrapped", "wrapped_attends_across": True}
    with pytest.raises(ValueError, match="wrapped_attends_across=True cannot be used with a str"):
        make_trainer(tmp_path, texts().to_iterable_dataset(), **options)


def test_losses_of_the_datasets_of_a_mixture(tmp_path):
    origins = ["sums", "texts", "texts", "sums", "texts", "texts", "texts", "texts"]
    data = pairs().add_column("dataset_source", origins)
    splits = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = make_trainer(tmp_path, data, **splits)
    trainer.train()
    for name in ("sums", "texts"):
        rows = [
            encoded(*pair) for pair, origin in zip(PAIRS, origins, strict=True) if origin == name
        ]
        expected = by_hand(tiny_model(), rows)[0]
        assert logged(trainer, f"loss/{name}") == [pytest.approx(expected, rel=1e-6)]


def test_tokens_are_counted(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=pairs(PAIRS[:2]), max_steps=2)
    trainer.train()
    every = sum(len(encoded(*pair)[0]) for pair in PAIRS)
    assert logged(trainer, "num_tokens") == [every, 2 * every]
    assert trainer.evaluate()["eval_num_tokens"] == 2 * every


def test_the_last_update_of_an_epoch_may_have_fewer_rows(tmp_path):
    """Seven rows in updates of four: the second has three, all of which weigh the same."""
    rows = PAIRS[:7]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, pairs(rows), **options, max_steps=-1, num_train_epochs=1)
    trainer.train()
    model = tiny_model()
    for part in (rows[:4], rows[4:]):
        gradient = by_hand(model, [encoded(*pair) for pair in part])[1]
        with torch.no_grad():
            moved = weights(model) - 0.1 * gradient
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
    assert trainer.state.global_step == 2
    assert relative(weights(trainer.model), weights(model)) <= 1e-6


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, 2),
        ({"max_tokens_per_micro_batch": 64}, 8),
        ({"packing": True}, 1),
        ({"packing": True, "packing_strategy": "bfd_split", "max_length": 16}, 3),
    ],
)
def test_an_epoch_of_a_stream_trains_on_every_row(tmp_path, options, updates):
    """The tokens of a stream are those of the dataset it comes from, as are the updates."""
    data = texts(24)
    wanted = options | {"max_steps": updates, "per_device_train_batch_size": 12}
    trainer = make_trainer(tmp_path, data.to_iterable_dataset(), **wanted)
    trainer.train()
    whole = make_trainer(tmp_path, data, **wanted | {"max_steps": -1, "num_train_epochs": 1})
    whole.train()
    assert whole.state.global_step == updates
    assert logged(trainer, "num_tokens")[-1] == logged(whole, "num_tokens")[-1]


def backward_passes(trainer):
    """Train, and count how many pieces had a pass of their own."""
    counted, step = [], trainer.compute_loss
    trainer.compute_loss = lambda *a, **options: counted.append(1) or step(*a, **options)
    trainer.train()
    return len(counted)


def test_micro_batches_are_cut_by_default(tmp_path, monkeypatch, reference):
    monkeypatch.setattr(SFTConfig, "piece_on_cpu", 20)
    whole, cut = make_trainer(tmp_path, max_tokens_per_piece=0), make_trainer(tmp_path)
    assert backward_passes(whole) == 1 < backward_passes(cut)
    assert cut.state.log_history[0]["loss"] == pytest.approx(reference[0], rel=1e-6)


def test_experts_are_balanced_over_whole_micro_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(SFTConfig, "piece_on_cpu", 20)
    balanced = make_trainer(tmp_path, model=experts(), router_aux_loss_coef=0.1)
    free = make_trainer(tmp_path, model=experts(), router_aux_loss_coef=0.0)
    assert backward_passes(balanced) == 1 < backward_passes(free)


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    peft_config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, peft_config=peft_config, learning_rate=5.0, max_steps=6)
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0] - 0.05
    now = dict(trainer.model.named_parameters())
    assert before and all(torch.equal(now[name], value) for name, value in before.items())


def experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    settings = tiny_model().config.to_dict() | {"num_local_experts": 4, "num_experts_per_tok": 2}
    for name in ("model_type", "architectures", "rope_parameters"):
        settings.pop(name, None)
    return MixtralForCausalLM(MixtralConfig(**settings))


def test_a_mixture_of_experts_is_balanced(tmp_path):
    model = experts()
    trainer = make_trainer(tmp_path, model=model, router_aux_loss_coef=0.1)
    trainer.train()
    (aux,) = logged(trainer, "aux_loss")
    loss = by_hand(model, [encoded(*pair) for pair in PAIRS])[0]
    assert aux > 0 and logged(trainer, "loss")[0] != pytest.approx(loss, rel=1e-3)
    with pytest.raises(ValueError, match="is not a mixture of experts"):
        make_trainer(tmp_path, router_aux_loss_coef=0.1)


def test_conversations_with_a_stream_and_a_formatting_function(tmp_path):
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
    ]
    data = Dataset.from_dict({"messages": chats})
    trainer = make_trainer(tmp_path, data, assistant_only_loss=True)
    labels = [[x for x in row["labels"] if x != -100] for row in trainer.train_dataset]
    trained = list(map(tiny_tokenizer().decode, labels))
    assert trained == ["hello<end>", "4<end>"]
    trainer.train()
    named = make_trainer(
        tmp_path,
        Dataset.from_dict({"question": ["a", "b"]}),
        formatting_func=lambda row: f"Q {row['question']}",
    )
    ids = named.train_dataset[0]["input_ids"]
    assert tiny_tokenizer().decode(ids) == "Q a<eos>"


def test_what_was_decoded_is_shown(tmp_path, capsys):
    make_trainer(tmp_path).train()
    shown = capsys.readouterr().out.splitlines()
    assert "row 0, 2 of 6 tokens trained (marked): 2+3=⟪5<eos>⟫" in shown
    assert len([line for line in shown if line.startswith("row ")]) == 2


def test_rows_cut_and_rows_left_without_a_trained_token_are_counted(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl.data.cutting.logger.warning", said.append)
    rows = [("a" * 20, "b"), ("a", "b" * 20), ("a", "b"), ("c" * 30, "d")]
    trainer = make_trainer(tmp_path, pairs(rows), max_length=10)
    assert len(trainer.train_dataset) == 2
    assert "3 of 4 rows longer than max_length=10 (long_rows='keep_start')" in said[0]
    assert "2 of 4 rows left with nothing to train on: 0, 3." in said[1]
    with pytest.raises(ValueError, match="None of the 2 rows has a token to train on with max_le"):
        make_trainer(tmp_path, pairs([rows[0], rows[3]]), max_length=10)


def test_long_rows_of_streams(tmp_path):
    rows = [("a", "b" * 20), ("a" * 20, "b"), ("a", "c")]
    for long_rows, expected in (("cut", 2), ("drop", 1), ("split", 5)):
        stream = pairs(rows).to_iterable_dataset()
        trainer = make_trainer(tmp_path, stream, max_length=10, long_rows=long_rows)
        found = list(trainer.train_dataset)
        whole = make_trainer(tmp_path, pairs(rows), max_length=10, long_rows=long_rows)
        assert len(found) == len(whole.train_dataset) == expected
        names = whole.train_dataset.column_names
        assert trainer.train_dataset.column_names == names
        assert [row["input_ids"] for row in found] == whole.train_dataset["input_ids"][:]
    stream = make_trainer(
        tmp_path, pairs(rows).to_iterable_dataset(), max_length=10, long_rows="error"
    ).train_dataset
    with pytest.raises(ValueError, match="2 of 3 rows have more than max_length=10 tokens, among"):
        list(stream)


def test_a_model_by_name_is_saved_with_a_card(tmp_path):
    name = save_tiny(tmp_path / "base")
    trainer = SFTTrainer(name, config(tmp_path / "run"), train_dataset=pairs())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "SFT." in card and "- sft" in card and "[](" not in card and "bibtex" not in card
    assert (tmp_path / "run" / "model.safetensors").exists()


def one(**changes):
    return lambda folder: make_trainer(folder, **changes)


def with_argument(name):
    def make(folder):
        return SFTTrainer(
            tiny_model(),
            config(folder),
            train_dataset=pairs(),
            processing_class=tiny_tokenizer(),
            **{name: lambda *args: None},
        )

    return make


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (with_argument("data_collator"), ValueError, "data_collator cannot be used: rows are"),
        (with_argument("compute_loss_func"), ValueError, "override `loss`. Leave it out."),
        (with_argument("preprocess_logits_for_metrics"), ValueError, "preprocess_logits_for_"),
        (one(data=[{"text": "a"}]), TypeError, "train_dataset must be a datasets.Dataset or"),
        (
            one(data=DatasetDict(a=texts(), b=texts())),
            TypeError,
            "Choose one of a, b.",
        ),
        (one(eval_dataset=["a"]), TypeError, "eval_dataset must be a datasets.Dataset or Itera"),
        (one(data=Dataset.from_dict({"x": [1]})), ValueError, "have the columns \\['x'\\]"),
        (
            one(data=Dataset.from_dict({"text": ["a"], "image": ["b"]})),
            NotImplementedError,
            "train_dataset has the column 'image': images are not available",
        ),
        (one(data=texts().to_iterable_dataset(), max_steps=-1), ValueError, "set max_steps above"),
        (one(eos_token="<nope>"), ValueError, "eos_token='<nope>' is not in the tokenizer's"),
        (one(assistant_only_loss=True), ValueError, "assistant_only_loss=True needs conversations"),
        (
            one(dataset_kwargs={"skip_prepare_dataset": True}),
            ValueError,
            "skip_prepare_dataset needs a column 'input_ids'; the dataset has prompt, completion",
        ),
    ],
)
def test_what_cannot_be_used_is_said_at_once(tmp_path, make, error, words):
    with pytest.raises(error, match=words):
        make(tmp_path)


def test_options_of_another_class_are_refused(tmp_path):
    args = DPOConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="must be an instance of SFTConfig, not of DPOConfig"):
        SFTTrainer(tiny_model(), args, train_dataset=pairs(), processing_class=tiny_tokenizer())
    with pytest.raises(ValueError, match="train_dataset is required"):
        SFTTrainer(tiny_model(), config(tmp_path), processing_class=tiny_tokenizer())


def test_tokenized_rows_with_labels(tmp_path):
    rows = {"input_ids": [[10, 11, 12], [13, 14]], "labels": [[-100, 11, -100], [-100, 14]]}
    data = Dataset.from_dict(rows)
    trainer = make_trainer(tmp_path, data, dataset_kwargs={"skip_prepare_dataset": True})
    assert trainer.train_dataset["labels"][:] == rows["labels"]
    trainer.train()
    assert logged(trainer, "num_tokens") == [4]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that predicts some of the targets of `PAIRS`."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(folder, max_steps=30, learning_rate=0.02, optim="adamw_torch")
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("split", ["one micro-batch", "padded rows", "single rows"])
def test_virtual_tokens_do_not_count(tmp_path, trained, split):
    """Prompt tuning puts tokens before each row, which are neither targets nor predictions."""
    peft = pytest.importorskip("peft")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(copy.deepcopy(trained), tuning)
    reference = by_hand_with_virtual_tokens(model)
    assert 0.1 < reference[2] < 1
    trainer = make_trainer(tmp_path, model=model, eval_dataset=pairs(), **SPLITS[split])
    evaluated = trainer.evaluate()
    trainer.train()
    names = ("loss", "entropy", "mean_token_accuracy")
    assert [evaluated[f"eval_{name}"] for name in names] == pytest.approx(reference, rel=1e-5)
    assert [logged(trainer, name)[0] for name in names] == pytest.approx(reference, rel=1e-5)


def by_hand_with_virtual_tokens(model):
    """Mean loss, entropy and share of hits, from embeddings that are put together here."""
    embed = model.get_base_model().get_input_embeddings()
    virtual = model.get_prompt(batch_size=1)[0].detach()
    loss, entropy, hits, count = 0.0, 0.0, 0, 0
    for ids, first in (encoded(*pair) for pair in PAIRS):
        states = torch.cat([virtual, embed(torch.tensor(ids))])[None]
        with torch.no_grad():
            logps = model.get_base_model()(inputs_embeds=states).logits[0].log_softmax(-1)
        for place in range(max(first, 1), len(ids)):
            row = logps[len(virtual) + place - 1]
            loss -= float(row[ids[place]])
            entropy -= float((row.exp() * row).sum())
            hits += int(row.argmax()) == ids[place]
            count += 1
    return [loss / count, entropy / count, hits / count]
