import torch

from trl.types import Media, Prefix, RewardTable, Rows, TokenScores, prefixes_of


def test_select_keeps_rows():
    rows = Rows.of([([0], [1]), ([0], [1, 2, 3]), ([5], [4, 5]), ([5], [6, 7, 8, 9])])
    picked = rows.select([2, 0])
    assert picked.completion_ids == [[4, 5], [1]]
    assert picked.row_ids == [2, 0] and picked.prompt_ids == [[5], [0]]


def test_scores_of_some_rows_among_others():
    ones = torch.ones(1, 2)
    found = TokenScores(logps=-ones, entropies=ones, log_mass=-2 * ones).spread(
        [1], torch.full((2, 3), -5.0)
    )
    assert found.logps.tolist() == [[-5.0, -5.0, -5.0], [-1.0, -1.0, 0.0]]
    assert found.entropies.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert found.log_mass.tolist() == [[0.0, 0.0, 0.0], [-2.0, -2.0, 0.0]]
    assert TokenScores(logps=ones).spread([0], torch.zeros(1, 2)).log_mass is None


def test_reward_table_without_rows():
    table = RewardTable(
        per_function=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        weights=torch.ones(2),
        total=torch.tensor([3.0, 7.0]),
        names=("a", "b"),
        group_size=2,
    )
    kept = table.without(torch.tensor([False, True]))
    assert kept.total[0] == 3 and kept.total[1].isnan()
    assert kept.per_function[1].isnan().all() and table.total[1] == 7
    assert table.has_ended.all()


def test_completions_that_were_cut_off_lose_a_penalty():
    table = RewardTable(
        per_function=torch.tensor([[1.0], [2.0]]),
        weights=torch.ones(1),
        total=torch.tensor([1.0, 2.0]),
        names=("a",),
        group_size=2,
        ended=torch.tensor([True, False]),
    )
    assert table.with_truncation_penalty(0.5).tolist() == [1.0, 1.5]
    assert table.with_truncation_penalty(None).tolist() == [1.0, 2.0]


def test_rows_that_are_token_ids_alone():
    rows = Rows.of([([1], [2, 3]), ([], [4]), ([1], [])])
    assert len(rows) == 3 and list(rows.row_ids) == [0, 1, 2]
    part = rows.select([2, 0])
    assert part.prompt_ids == [[1], [1]] and part.completion_ids == [[], [2, 3]]
    assert part.row_ids == [2, 0]


def test_prefixes_are_equal_by_ids_and_by_the_content_of_media():
    first, second = (Media(content, {}) for content in (b"a cat", b"a dog"))
    plain, cat = Prefix([1, 2, 2, 3]), Prefix((1, 2, 2, 3), (first,))
    assert plain == Prefix((1, 2, 2, 3)) and len({plain, Prefix([1, 2, 2, 3])}) == 1
    assert cat == Prefix([1, 2, 2, 3], (Media(b"a cat", {"pixels": torch.ones(2)}),))
    assert len({plain, cat, Prefix([1, 2, 2, 3], (second,)), Prefix([1, 2, 2])}) == 4
    assert plain != [1, 2, 2, 3]


def test_rows_with_equal_ids_and_other_media_share_nothing():
    media = [(Media(content, {}),) for content in (b"a cat", b"a cat", b"a dog")]
    rows = Rows(
        prefixes=[Prefix([7, 7, 7], shown) for shown in media],
        completion_ids=[[1], [2], [3]],
        row_ids=range(3),
    )
    assert rows.computed_tokens() == [4, 1, 4]


def test_equal_neighbors_among_prompts_are_one_prefix():
    prefixes = prefixes_of([[1, 2], [1, 2], [3], [1, 2]])
    assert prefixes[0] is prefixes[1] and prefixes[0] is not prefixes[3]
    assert prefixes[0] == prefixes[3] != prefixes[2]
