from trl.generation.base import cut_at_stop, row_seeds


def test_seeds_do_not_depend_on_how_rows_are_dealt():
    whole = row_seeds((42, "train", 7, 0), 0, 8)
    assert row_seeds((42, "train", 7, 0), 4, 4) == whole[4:]
    assert len(set(whole)) == 8 and all(0 <= seed < 2**63 for seed in whole)


def test_seeds_differ_between_rounds():
    keys = [
        (s, mode, step, sub)
        for s in (1, 2)
        for mode in ("train", "eval")
        for step in (0, 1)
        for sub in (0, 1)
    ]
    assert len({row_seeds(key, 0, 1) for key in keys}) == len(keys)


def test_cut_behind_the_first_stop_token():
    assert cut_at_stop([5, 9, 7, 1, 7], (7, 9), 10) == ([5, 9], "stop")
    assert cut_at_stop([7, 7], (7,), 10) == ([7], "stop")
    assert cut_at_stop([5, 6, 8], (7,), 3) == ([5, 6, 8], "length")
    assert cut_at_stop([5, 6, 7], (7,), 2) == ([5, 6], "length")
    assert cut_at_stop([5, 6, 7], (7,), 3) == ([5, 6, 7], "stop")
    assert cut_at_stop([], (7,), 3) == ([], "length")
