from trl.transcripts import transcript


def test_messages_are_lines():
    messages = [{"role": "user", "content": "hi"}, {"role": "tool"}]
    assert transcript(messages) == "user: hi\ntool: None"
    assert transcript("plain") == "plain"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "so", "tool_calls": [call, call["function"]]}]
    assert transcript(messages) == "assistant: so add({'a': 1}) add({'a': 1})"
