from trl.generation.scripted import ScriptedBackend
from trl.types import Prompts, Sampling


def test_replays_by_prompt_and_place():
    backend = ScriptedBackend(lambda ids, place: [ids[0] + place, 1, 99])
    prompts = Prompts(messages=["a", "a", "b", "b"], token_ids=[[10], [10], [20], [20]])
    found = backend.generate(prompts, Sampling(max_tokens=5, stop_ids=(1,)), group_size=2)
    assert found.completion_ids == [[10, 1], [11, 1], [20, 1], [21, 1]]
    assert found.finish == ["stop"] * 4


def test_groups_that_span_ranks():
    backend = ScriptedBackend(lambda ids, place: [place], first_row=lambda count: count)
    prompts = Prompts(messages=["a"] * 3, token_ids=[[10]] * 3)
    found = backend.generate(prompts, Sampling(max_tokens=5), group_size=6)
    assert found.completion_ids == [[3], [4], [5]]
    assert found.finish == ["length"] * 3
