import pytest
from bpe import bpe_tokenizer
from datasets import Dataset
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.examples import answers_of
from trl.data.preference_rows import FEATURES, prepare_preferences

ENCODER = TextEncoder(tiny_tokenizer())
USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("yes", "no"))
OTHER_USER = {"role": "user", "content": "ho"}
PAIR = {"prompt": "ask", "chosen": " yes", "rejected": " no"}
CHAT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
SHOWN = ("<user>hi<end><assistant>", "yes<end>", "no<end>")


def prepare(*rows, encoder=ENCODER, **options):
    return prepare_preferences(Dataset.from_list(list(rows)), encoder, **options)


def texts(row):
    return tuple(map(ENCODER.tokenizer.decode, (row["prompt_ids"], *answers_of(row))))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PAIR, ("ask", " yes<eos>", " no<eos>")),
        ({"chosen": "ask yes", "rejected": "ask no"}, ("ask", " yes<eos>", " no<eos>")),
        (CHAT, SHOWN),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, SHOWN),
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, SHOWN),
        (CHAT | {"tools": None, "chat_template_kwargs": None}, SHOWN),
    ],
)
def test_pairs(row, expected):
    assert texts(prepare(row)[0]) == expected


@pytest.mark.parametrize(
    "names",
    [
        ("prompt_ids", "chosen_ids", "rejected_ids"),
        ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
    ],
)
def test_tokenized_pairs(names):
    row = prepare(dict(zip(names, ([7, 8], [9], [10, 11]), strict=True)))[0]
    assert (row["prompt_ids"], answers_of(row)) == ([7, 8], [[9], [10, 11]])


def test_tokenized_pairs_without_a_prompt_share_their_beginning():
    row = prepare({"input_ids_chosen": [7, 8, 9], "input_ids_rejected": [7, 8]})[0]
    assert (row["prompt_ids"], answers_of(row)) == ([7], [[8, 9], [8]])


def test_margins_are_kept():
    assert [row["margin"] for row in prepare(PAIR | {"margin": 0.5}, PAIR)] == [0.5, 0.0]


def test_a_merged_boundary_is_an_answer_of_both():
    encoder = TextEncoder(bpe_tokenizer())
    row = prepare(
        {"prompt": "tell me hel", "chosen": "lo", "rejected": " no"}, PAIR, encoder=encoder
    )
    assert row["merged"][:] == [1, 0]
    for answer, text in zip(answers_of(row[0]), ("tell me hello", "tell me hel no"), strict=True):
        assert row[0]["prompt_ids"] + answer[:-1] == encoder.ids([text])[0]


def test_labelled_answers():
    row = {"prompt": "ask", "completion": " yes", "label": 1}
    found = prepare(row)[0]
    assert texts(found) == ("ask", " yes<eos>")
    assert found["label"] is True


def test_pairs_become_labelled_answers_next_to_each_other():
    found = prepare(PAIR, PAIR | {"prompt": "say"}, unpaired=True)
    assert found["label"][:] == [True, False, True, False]
    assert found["source"][:] == [0, 0, 1, 1]
    shown = [texts(row) for row in found]
    assert shown == [(p, a) for p in ("ask", "say") for a in (" yes<eos>", " no<eos>")]


def test_ranked_answers():
    row = {"prompt": [USER], "answers": [[GOOD], [BAD], [GOOD]], "ranks": [1, 2, 1]}
    found = prepare(row)[0]
    assert texts(found)[1:] == ("yes<end>", "no<end>", "yes<end>") and found["ranks"] == [1, 2, 1]
    with pytest.raises(ValueError, match="3 answers need as many ranks, not 1"):
        prepare(row | {"ranks": [1]})


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"words": "a"}, ValueError, r"have the columns \['words'\]"),
        ({"chosen": "a", "rejected": [BAD]}, TypeError, "and 'rejected' must both be text or"),
        ({"chosen": "a", "rejected": None}, ValueError, "'rejected' is missing"),
        ({"prompt": "a", "answers": None, "ranks": [1]}, ValueError, "'answers' is None"),
        (
            {"prompt": [USER], "chosen": [OTHER_USER, GOOD], "rejected": [BAD]},
            ValueError,
            "'chosen' begins with a message of the user that 'prompt' does not have",
        ),
    ],
)
def test_what_is_not_a_preference_is_refused(row, error, message):
    with pytest.raises(error, match=message):
        prepare(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": "no"},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [GOOD], "rejected": "no"},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "answers": [[USER, GOOD], [BAD]], "ranks": [0, 1]},
        {"prompt": [USER], "answers": ["yes", "no"], "ranks": [0, 1]},
        {
            "prompt": [{"from": "human", "value": "hi"}],
            "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
            "rejected": [{"from": "gpt", "value": "no"}],
        },
    ],
)
def test_the_prompt_stands_once_in_front_of_each_answer(row):
    assert texts(prepare(row)[0]) == SHOWN


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": "yes"},
        {"prompt": "hi", "completion": [GOOD]},
        {"prompt": [USER], "completion": [USER, GOOD]},
    ],
)
def test_labelled_answers_have_their_prompt_once(row):
    assert texts(prepare(row | {"label": True})[0]) == SHOWN[:2]


def test_equal_pairs_for_any_number_of_processes():
    rows = [PAIR | {"prompt": f"ask {i}"} for i in range(40)]
    one, two = (prepare(*rows, unpaired=True, num_proc=n) for n in (1, 2))
    assert one[:] == two[:]


RANKED = {"prompt_ids": [7], "answers_ids": [[8], [9]], "ranks": [1, 0]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (PAIR, "pair"),
        (RANKED, "ranked"),
        ({"prompt": "a", "completion": "b", "label": True}, "labelled"),
    ],
)
def test_a_prepared_dataset_is_not_encoded_again(row, kind):
    prepared = prepare(row, row)
    assert prepared.column_names == list(FEATURES[kind])
    assert prepare_preferences(prepared, ENCODER) is prepared
    derived = prepared.add_column("ref_logps", [1.0, 2.0]).add_column(
        "kl_completion_ids", [[1], [2]]
    )
    assert prepare_preferences(derived, ENCODER)[:] == prepared[:]


def test_prepared_pairs_become_labelled_answers():
    found = prepare_preferences(prepare(PAIR), ENCODER, unpaired=True)
    assert found[:] == prepare(PAIR, unpaired=True)[:]
