from trl.text import as_text, count, did_you_mean


def test_closest_name_or_nothing():
    assert did_you_mean("rlo", ["grpo", "rloo"]) == " Did you mean rloo?"
    assert did_you_mean("xyz", ["grpo", "rloo"]) == ""
    assert did_you_mean("xyz", {"a": 1}, " Names: a.") == " Names: a."


def test_messages_are_lines():
    messages = [{"role": "user", "content": "hi"}, {"role": "tool"}]
    assert as_text(messages) == "user: hi\ntool: None"
    assert as_text("plain") == "plain"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "so", "tool_calls": [call, call["function"]]}]
    assert as_text(messages) == "assistant: so add({'a': 1}) add({'a': 1})"


def test_numbers_of_things():
    assert [count(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert (count(1, "entry", "entries"), count(1234, "entry", "entries")) == (
        "1 entry",
        "1,234 entries",
    )
