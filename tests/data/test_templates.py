import pytest
from bpe import CHATML, MARKED, THINKING, bpe_tokenizer
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from trl.data.encode import TextEncoder
from trl.data.templates import (
    clone_chat_template,
    get_training_chat_template,
    has_generation_markers,
    naming_template,
    read_response,
    read_template,
    reads_responses,
)

USER = {"role": "user", "content": "ask"}


def test_markers_are_seen():
    assert has_generation_markers(MARKED) and has_generation_markers("{%- generation -%}")
    assert has_generation_markers({"default": MARKED, "other": ""})
    assert not has_generation_markers(CHATML)
    with pytest.raises(TypeError, match="no chat template"):
        has_generation_markers(None)


def test_a_training_template_renders_alike_and_marks_what_the_assistant_writes():
    tokenizer = bpe_tokenizer(CHATML)
    template = get_training_chat_template(tokenizer)
    assert tokenizer.chat_template == CHATML and has_generation_markers(template)
    said = [{"role": "assistant", "content": text} for text in ("one", "<two> ", "three")]
    user = {"role": "user", "content": "hi"}
    talk = [{"role": "system", "content": "s"}, user, said[0], user, *said[1:], user]
    plain = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    options = {"chat_template": template, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(talk, tokenize=False, **options) == plain
    found = tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    trained = tokenizer.decode([token for token, kept in pairs if kept])
    assert trained == "".join(m["content"] + "<|im_end|>" for m in said)


def test_training_templates_that_are_not_needed_or_cannot_be_made():
    assert get_training_chat_template(tokenizer=bpe_tokenizer(MARKED)) is None
    with pytest.raises(ValueError, match="later messages change how a turn"):
        get_training_chat_template(bpe_tokenizer(THINKING))
    with pytest.raises(TypeError, match="no chat template"):
        get_training_chat_template(bpe_tokenizer(None))
    with pytest.raises(TypeError, match="processing_class alone"):
        get_training_chat_template(tiny_tokenizer(), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(("multiple", "size"), [(None, 100), (64, 128), (50, 100)])
def test_clone_chat_template(tmp_path, multiple, size):
    source = bpe_tokenizer(CHATML, eos_token="<|im_end|>")
    source.save_pretrained(tmp_path)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    known = len(tokenizer)
    before = model.get_input_embeddings().weight[:known].clone()
    size = size if multiple else known + len({*source.get_added_vocab()} - {*tokenizer.get_vocab()})
    model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path), multiple)
    assert tokenizer.chat_template == CHATML and tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings == size
    assert added == list(range(known, size))
    assert (model.get_input_embeddings().weight[:known] == before).all()


def test_a_source_without_template_is_refused(tmp_path):
    source = tiny_tokenizer()
    source.chat_template = None
    source.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chat_template"):
        clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))


def test_a_cloned_checkpoint_speaks_the_template(tmp_path):
    path = save_tiny(tmp_path)
    _, tokenizer, added = clone_chat_template(tiny_model(), bpe_tokenizer(), path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<user>a<end>" and len(added) > 0


READABLE = {
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"content": "text"},
    },
}


def tiny_ids(text):
    return tiny_tokenizer()(text)["input_ids"]


def test_the_parts_of_a_turn():
    tokenizer = tiny_tokenizer()
    assert not reads_responses(tokenizer)
    tokenizer.response_template = READABLE
    assert reads_responses(tokenizer)
    prompt = tiny_ids("<user>hi<end><assistant>")
    message = {"role": "assistant", "reasoning_content": "2+2", "content": "4"}
    assert read_response(tokenizer, prompt, tiny_ids("(2+2)4")) == message
    assert read_response(tokenizer, prompt, tiny_ids("(2+2)"))["content"] == ""


def test_a_broken_file_of_a_template_names_its_line(tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}\n{{ m['content'] }\n{% endfor %}")
    with pytest.raises(ValueError) as caught:
        read_template(str(path))
    assert str(caught.value) == f"chat_template_path='{path}': line 2 is broken: unexpected '}}'"
    path.write_text("{{ raise_exception('begin with a system message') }}")
    assert read_template(str(path)) == path.read_text(), "it may refuse a conversation"


def test_errors_of_a_template_name_its_file_and_line(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}\n{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("\n\n{{ messages[0]['content'] + 1 }}")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError) as caught:
        TextEncoder(loaded).render_all([[USER]], [{}])
    file = tmp_path / "chat_template.jinja"
    assert str(caught.value).startswith(f"line 3 of the chat template {file}: TypeError: can only")
    loaded.chat_template = "\n{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="^line 2 of the chat template: roles must alternate"):
        TextEncoder(loaded).render_all([[USER]], [{}])
    with pytest.raises(KeyError), naming_template(loaded):  # not of the template
        raise KeyError
