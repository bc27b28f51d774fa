from trl.suggestions import did_you_mean


def test_closest_name_or_nothing():
    assert did_you_mean("rlo", ["grpo", "rloo"]) == " Did you mean rloo?"
    assert did_you_mean("xyz", ["grpo", "rloo"]) == ""
    assert did_you_mean("xyz", {"a": 1}, " Names: a.") == " Names: a."
