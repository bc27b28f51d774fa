import pytest

from trl.online.judges import JudgeReward


class Fixed:
    def __init__(self, places):
        self.places, self.asked = places, []

    def judge(self, prompts, completions):
        self.asked.append((prompts, completions))
        return self.places


def test_decisions_become_rewards():
    judge = Fixed([1, -1, 0])
    rewards = JudgeReward(judge)(list("aabbcc"), ["1", "2", "3", "4", "5", "6"], answer=None)
    assert rewards == [0.0, 1.0, None, None, 1.0, 0.0]
    assert judge.asked == [(["a", "b", "c"], [["1", "2"], ["3", "4"], ["5", "6"]])]


@pytest.mark.parametrize(
    ("places", "words"), [([1], "decided on 1 of 2 pairs"), ([0, 2], "returned 2")]
)
def test_judges_must_decide_on_every_pair(places, words):
    with pytest.raises(ValueError, match=words):
        JudgeReward(Fixed(places))(["a"] * 4, ["b"] * 4)
