"""Between text and token ids: the chat template, hostile input, and text that grows token by token without broken characters."""

import functools
import re
import threading

from tokenizers.decoders import DecodeStream

from river_core.errors import InputError


def clean(text: str) -> tuple[str, str | None]:
    """Replace unpaired surrogates, which no encoding can carry, by U+FFFD; also returns a notice if there were any."""
    cleaned = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if cleaned == text:
        return text, None
    return cleaned, "The prompt held characters that are not valid text (unpaired surrogates); they were replaced by \ufffd."


def encode(tokenizer, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt, as `encode_prompt` makes them."""
    return encode_prompt(tokenizer, prompt, chat)[0]


def encode_prompt(tokenizer, prompt: str, chat: bool, rows: int | None = None) -> tuple[list[int], list[str]]:
    """Token ids of a prompt, and sentences for the user about it.

    Control markers that the user typed, such as <|im_end|>, are text and not control tokens; a prompt without any is encoded as transformers does.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: as typed.
        chat: wrap it as a user's turn in the tokenizer's chat template, if it has one that works; otherwise encode it as it is.
        rows: of the embedding, if ids beyond it are to be refused.

    Raises:
        InputError: a prompt of which the tokenizer makes nothing, or a token that the model has no row for.
    """
    notices, ids = [], []
    if chat and tokenizer.chat_template:
        try:
            ids, notices = _in_template(tokenizer, prompt)
            if not ids:
                raise ValueError("it renders nothing")
        except Exception as error:  # a template is a program in the checkpoint, and may raise or be anything
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            notices = [f"This model's chat template cannot be used ({why}); the prompt was used as it is."]
    if not ids:
        typed = _typed(tokenizer, prompt)
        ids = _ids(tokenizer, prompt, beginning=True, plain=bool(typed))
        notices += _told(tokenizer, prompt, typed)
    if not ids:
        raise InputError("This model's tokenizer makes no tokens of the prompt. Type something else.")
    beyond = next((token for token in ids if rows is not None and token >= rows), None)
    if beyond is not None:
        name = tokenizer.convert_ids_to_tokens(beyond)
        raise InputError(f"The prompt needs the token {name!r} ({beyond:,}), and this model's embedding has {rows:,} rows. Leave it out.")
    return ids, notices


def _in_template(tokenizer, prompt):
    """Ids of a prompt as a user's turn, and notices."""

    def rendered(content):
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)

    text = rendered(prompt)
    typed = _typed(tokenizer, prompt)
    if not typed:
        return _ids(tokenizer, text), []  # the template writes the special tokens itself
    # Where the user's text lies in the turn is seen with a text that no template holds.
    before, found, after = rendered(_PLACE).partition(_PLACE)
    body = next((body for body in (prompt, prompt.strip()) if found and text == before + body + after), None)
    ids = None
    if body is not None:
        # The template's own markers stay whole; all between the last of them before the text and the first after it is plain.
        controls = re.compile("|".join(re.escape(name) for name in sorted(_controls(tokenizer).values(), key=len, reverse=True)))
        first = max((match.end() for match in controls.finditer(before)), default=0)
        first += len(before[first:]) - len(before[first:].lstrip()) if before[:first] and _strips(tokenizer, before[:first]) else 0
        last = next((match.start() for match in controls.finditer(after)), len(after))

        def in_parts(content, lead):
            middle = _ids(tokenizer, lead + before[first:] + content + after[:last], plain=True)[len(_ids(tokenizer, lead, plain=True)) :]
            return _ids(tokenizer, before[:first]) + middle + _ids(tokenizer, after[last:])

        # Some tokenizers put a blank before the first part of a text only: they need something in front that is taken off again.
        plain = "words that hold no marker"
        whole = _ids(tokenizer, before + plain + after)
        lead = next((lead for lead in ("", "\n") if in_parts(plain, lead) == whole), None)
        ids = None if lead is None else in_parts(body, lead)
    if ids is None:
        return _ids(tokenizer, text), [_still_control(typed.values())]
    return ids, _told(tokenizer, prompt, typed)


_PLACE = "\ue000the text of the user\ue001"
_ENCODING = threading.Lock()  # whether markers are plain is a switch on the tokenizer itself


def _ids(tokenizer, text, beginning=False, plain=False):
    """Ids of a text; `beginning`: with what the tokenizer puts around a text; `plain`: markers in it are text."""
    if not text:
        return []
    with _ENCODING:
        try:
            return tokenizer.encode(text, add_special_tokens=beginning, split_special_tokens=plain)
        finally:
            tokenizer.backend_tokenizer.encode_special_tokens = False


def _controls(tokenizer) -> dict[int, str]:
    """Tokens that steer the model rather than stand for text, by id: special ones, and those that the chat template writes."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in template)
    }


def _typed(tokenizer, prompt) -> dict[int, str]:
    """Control tokens that the prompt would be read as, by id."""
    controls = _controls(tokenizer)
    found = {token: controls[token] for token in _ids(tokenizer, prompt) if token in controls}
    if found.get(tokenizer.unk_token_id, prompt) not in prompt:  # it stands for characters that the tokenizer does not know
        del found[tokenizer.unk_token_id]
    return found


def _told(tokenizer, prompt, typed) -> list[str]:
    """What to say of the control markers `typed` in a prompt that was encoded as plain text."""
    ids = set(_ids(tokenizer, prompt, plain=True)) if typed else set()
    plain = [name for token, name in typed.items() if token not in ids]
    kept = [name for token, name in typed.items() if token in ids]
    told = [f"Control markers in the prompt ({', '.join(plain)}) were read as plain text."] if plain else []
    return told + ([_still_control(kept)] if kept else [])


def _still_control(names) -> str:
    return f"{', '.join(names)} in the prompt: control tokens of this model, and read as such."


def _strips(tokenizer, text) -> bool:
    """Whether the control token that `text` ends with takes the blanks after it with it."""
    return any(token.rstrip and text.endswith(token.content) for token in tokenizer.added_tokens_decoder.values())


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
        if self.stream is not None:
            try:
                piece = self.stream.step(self.backend, token_id) or ""
            except Exception:  # bytes that are no character change the text before them, and the stream gives up
                self.stream = None
        if self.stream is None:
            piece = self._behind()
            if piece.endswith("\ufffd"):
                return ""
        self.written += piece
        return piece

    def rest(self) -> str:
        """What an unfinished character leaves behind at the end: replacement characters, or "" if all text is out."""
        return self._behind()

    def _behind(self) -> str:
        """What the whole of the tokens has beyond the text that is out; text that is out stays as it is, even where the whole has changed."""
        return self.backend.decode(self.ids, skip_special_tokens=self.skip_special_tokens)[len(self.written) :]


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
