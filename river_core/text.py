"""Between text and token ids: the chat template, hostile input, and text that grows token by token without broken characters."""

import functools

from tokenizers.decoders import DecodeStream

from river_core.errors import InputError


def clean(text: str) -> tuple[str, str | None]:
    """Replace unpaired surrogates, which no encoding can carry, by U+FFFD; also returns a notice if there were any."""
    cleaned = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if cleaned == text:
        return text, None
    return cleaned, "The prompt held characters that are not valid text (unpaired surrogates); they were replaced by \ufffd."


def encode(tokenizer, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: as typed.
        chat: wrap it as a user's turn in the tokenizer's chat template, if it has one; otherwise encode it as it is.
    """
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(prompt)


def check_prompt(prompt) -> str:
    """The prompt, if it is text and holds more than blanks; else InputError."""
    if not isinstance(prompt, str):
        raise InputError(f"The prompt must be text, not {type(prompt).__name__}.")
    if not prompt.strip():
        raise InputError("The prompt is empty. Type a question or pick an example.")
    return prompt


class TextStream:
    """Turns one lane's tokens into text as they come; a character that spans several tokens appears with its last one."""

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.backend = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.ids: list[int] = []
        self.written = ""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; "" while one is still open."""
        self.ids.append(token_id)
        piece = self.stream.step(self.backend, token_id) or ""
        self.written += piece
        return piece

    def rest(self) -> str:
        """What an unfinished character leaves behind at the end: replacement characters, or "" if all text is out."""
        whole = self.backend.decode(self.ids, skip_special_tokens=self.skip_special_tokens)
        return whole[len(self.written) :] if whole.startswith(self.written) else ""


def pieces(tokenizer, token_ids: list[int]) -> list[str]:
    """The text of each token of a prompt, special tokens included; parts of one character come with its last token."""
    stream = TextStream(tokenizer, skip_special_tokens=False)
    return [stream.push(token_id) for token_id in token_ids]


def token_text(tokenizer, token_id: int) -> str:
    """One token by itself, for lists of candidates; bytes that are no character alone show as U+FFFD."""
    return _token_text(tokenizer.backend_tokenizer, token_id)


@functools.lru_cache(maxsize=65536)
def _token_text(backend, token_id):
    return backend.decode([token_id], skip_special_tokens=False)
