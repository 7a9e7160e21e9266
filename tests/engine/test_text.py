"""Text grows token by token, and no character is ever shown broken."""

import pytest

from river_core.text import TextStream, clean, encode, pieces
from tests.tiny import tokenizer

TEXTS = [
    "plain words",
    "naïve café, Ærø",
    "你好，世界",
    "family 👨‍👩‍👧 flag 🇩🇰 done",
    "a\n\n  b\tc",
    "${x} {{y}} <b>&amp;</b> `q` C:\\users",
    "\x00nul",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_hold_a_broken_character(text):
    tiny = tokenizer()
    parts = pieces(tiny, tiny.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) == len(text.encode())  # a byte a token: characters of several bytes come with their last one
    assert parts[0] == (text[0] if len(text[0].encode()) == 1 else "")


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_tokenizer_too(default_model, text):
    tokens = default_model.tokenizer.encode(text)
    stream = TextStream(default_model.tokenizer)
    parts = [stream.push(token) for token in tokens]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + stream.rest() == default_model.tokenizer.decode(tokens)


def test_an_answer_cut_inside_a_character_ends_in_a_replacement_character():
    tiny = tokenizer()
    stream = TextStream(tiny)
    out = [stream.push(token) for token in tiny.encode("ok 😀")[:-1]]
    assert "".join(out) == "ok " and stream.rest() == "\ufffd"


def test_unpaired_surrogates_are_replaced_and_paired_ones_joined():
    assert clean("a\ud800b") == ("a\ufffdb", clean("\udfff")[1])
    assert clean("\udfff")[1].startswith("The prompt held characters")
    assert clean("\ud83d\ude00")[0] == "😀"
    assert clean("fine") == ("fine", None)


def test_the_chat_template_wraps_and_raw_leaves_alone():
    tiny = tokenizer()
    assert tiny.decode(encode(tiny, "hi", chat=True)) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tiny.decode(encode(tiny, "hi", chat=False)) == "hi"
    tiny.chat_template = None
    assert tiny.decode(encode(tiny, "hi", chat=True)) == "hi"
