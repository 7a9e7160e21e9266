"""Whatever is typed, written into a file or read from a config: a right answer or a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig, Ministral3Config, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from river_core import Trace, compare
from river_core.cli import main
from river_core.decoder import Decoder
from river_core.errors import InputError
from river_core.kernels import choose_kernels
from river_core.kv_cache import BACKBONE
from river_core.loading import cache_dir
from river_core.measure.prompts import read_prompts
from river_core.measure.record import FIELDS, HEADLINES, read_recipes
from river_core.measure.sweep import read_taus
from river_core.methods import METHODS, RULES, parse_methods
from river_core.native import NATIVE
from tests.properties import cases, is_sentence
from tests.tiny import random_model, tiny_model

# -- prompts and options ------------------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(), max_size=60)  # any code point: surrogates, controls and unassigned ones too
MARKERS = st.sampled_from(
    ["<|eos|>", "<|start|>", "<|end|>", "<|im_end|>", "\ufeff", "\u2028", "\x00", "\u202e", "{{ x }}", "\\", "\ud800", "é" * 30]
)
PROMPTS = st.one_of(ANY_TEXT, st.lists(st.one_of(ANY_TEXT, MARKERS), max_size=6).map("".join))
HUGE = st.tuples(st.text(st.characters(), min_size=1, max_size=3), st.integers(1, 10_000)).map(lambda pair: pair[0] * pair[1])


def run(model, prompt, methods=("river:0.5",), **options) -> Trace | None:
    """The trace of a run, None if the input was refused with a sentence; anything else that is raised is a defect."""
    events = []
    try:
        for event in compare(model, prompt, methods, **options):
            events.append(event)
    except InputError as error:
        assert not events, "input is judged before anything is decoded"
        assert is_sentence(error), str(error)
        return None
    failed = [event for event in events if event["type"] == "error"]
    assert not failed, failed
    trace = Trace.from_events(events)
    again = Trace.from_bytes(json.dumps(trace.to_dict()).encode())
    assert again.to_dict() == trace.to_dict()
    assert trace.done["reason"] == "finished"
    return trace


def check_lanes(trace: Trace, layers: int) -> None:
    wanted = trace.header["max_new_tokens"]
    for lane in trace.lanes.values():
        assert 1 <= len(lane.tokens) <= wanted
        assert len(lane.tokens) == wanted or lane.end["reason"] == "eos", lane.end
        assert all(0 <= token["exit_layer"] <= layers for token in lane.tokens)
        assert [token["i"] for token in lane.tokens] == list(range(len(lane.tokens)))
        lane.text.encode()  # what a terminal or a file can carry


@cases(60)
@given(prompt=st.one_of(PROMPTS, PROMPTS, HUGE), chat=st.booleans(), prefill=st.sampled_from(["full", "sequence"]))
@example(prompt="", chat=True, prefill="full")
@example(prompt="\ud83d", chat=False, prefill="full")
@example(prompt="\ud83d\ude00 \udc00", chat=True, prefill="full")
@example(prompt="a" * 300_000, chat=True, prefill="full")
def test_any_prompt_is_answered_or_refused_with_a_sentence(tiny, prompt, chat, prefill):
    trace = run(tiny, prompt, max_new_tokens=3, chat=chat, prefill=prefill)
    if trace is None:
        assert not prompt.strip() or len(prompt.encode("utf-8", "surrogatepass")) > 120  # the context holds 256 bytes
        return
    check_lanes(trace, 6)
    if not any(0xD800 <= ord(character) < 0xE000 for character in prompt):
        assert trace.header["prompt"] == prompt


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.floats(0, 1),
    st.sampled_from([None, "", "0.9", "0,9", "1e999", "nan", "-inf", "²", "١٢", True, 1e-40, 5e-324, [], {}, "x" * 1000]),
)


@cases(60)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tau": NUMBERS,
            "max_new_tokens": NUMBERS.filter(lambda value: not isinstance(value, int) or not 20 < value < 10**6),
            "temperature": NUMBERS,
            "top_k": NUMBERS,
            "top_p": NUMBERS,
            "seed": NUMBERS,
            "prefill": st.sampled_from(["full", "sequence", "", None, 3]),
            "timing": st.sampled_from(["race", "sequential", "in step", None]),
            "mode": st.sampled_from(["free", "same-text", "same-exits", "other", None]),
        },
    )
)
@example({"temperature": 1e-40, "max_new_tokens": 3})
@example({"max_new_tokens": 1, "mode": "same-exits"})
def test_any_value_of_an_option_runs_or_is_refused_with_a_sentence(tiny, options):
    options = {"max_new_tokens": 4} | options
    if (
        options["max_new_tokens"] not in (4, None)
        and isinstance(options["max_new_tokens"], (int, float))
        and options["max_new_tokens"] > 20
    ):
        options["max_new_tokens"] = 20
    trace = run(tiny, "Hello", ("backbone", "river:0.5"), **options)
    if trace:
        check_lanes(trace, 6)


# -- methods -------------------------------------------------------------------------------------------------------------

SMALL = st.one_of(
    st.integers(-2, 8).map(str), st.floats(-1, 1).map(lambda value: f"{value:.3g}"), st.sampled_from(["", "nan", "1e9", "²", "3/5", "x"])
)
OPTIONS = st.sampled_from(["cap", "k", "depth", "head", "n_min", "n_max", "warm_up", "horizon", "floor", "layers", "depths", "what"])
DEPTHS = st.lists(st.integers(-1, 8), min_size=1, max_size=3).map(lambda depths: "/".join(map(str, depths)))
WRITTEN = st.builds(
    lambda name, rule, value, pairs: name + rule + value + "".join(f"+{option}={given}" for option, given in pairs),
    st.sampled_from([*METHODS, "rivr", ""]),
    st.one_of(st.just(""), st.sampled_from([*RULES, "other", ""]).map(lambda rule: f"@{rule}")),
    st.one_of(st.just(""), SMALL.map(lambda value: f":{value}")),
    st.lists(st.tuples(OPTIONS, st.one_of(SMALL, DEPTHS)), max_size=2),
)


@pytest.fixture(scope="module")
def compiled_tiny():
    """The tiny model with compiled layers; where nothing can be compiled, with plain ones."""
    model = tiny_model()
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        NATIVE.start(cache_dir() / "native")
        model.compiled = None
        model.compile(wait=True)
    return model


@cases(120)
@given(text=st.one_of(WRITTEN, WRITTEN, WRITTEN, ANY_TEXT), tau=st.floats(-0.2, 1), prefill=st.sampled_from(["full", "full", "sequence"]))
@example(text="replay:0.95", tau=0.5, prefill="full")
@example(text="backbone@fixed:1", tau=0.5, prefill="full")
@example(text="int4@similarity:0.5", tau=0.5, prefill="full")
@example(text="recompute+cap=-4", tau=0.5, prefill="full")
@example(text="verified+k=-1", tau=0.5, prefill="full")
def test_a_method_that_can_be_written_runs_and_any_other_gets_a_sentence(tiny, compiled_tiny, text, tau, prefill):
    try:
        (method,) = parse_methods((text,), tau, tiny)
    except InputError as error:
        assert is_sentence(error), str(error)
        return
    for model in (tiny, compiled_tiny):
        trace = run(model, "Hello there", (text,), tau=tau, max_new_tokens=5, prefill=prefill)
        assert trace is not None, "what is parsed can be run"
        check_lanes(trace, 6)
        (lane,) = trace.lanes.values()
        depths = {token["exit_layer"] for token in lane.steps}
        if method.method == "backbone":
            assert depths <= {6}, "the backbone is the reference: all layers, whatever is written behind its name"
        if method.method == "int4":
            assert depths <= {0}, "every layer is a 4-bit one"
        if method.rule["name"] == "fixed" and method.method in ("river", "propagation", "masking"):
            assert depths <= {method.rule["depth"]}


@cases(60)
@given(texts=st.lists(WRITTEN, min_size=1, max_size=4), mode=st.sampled_from(["same-text", "same-exits"]))
def test_methods_together_on_the_same_text_run_or_are_refused(tiny, texts, mode):
    trace = run(tiny, "Hello there", ["backbone", "river:0.5", *texts], max_new_tokens=4, mode=mode)
    if trace:
        check_lanes(trace, 6)
        assert len({tuple(lane.token_ids) for lane in trace.lanes.values()}) <= len(trace.lanes)
        fed = {len(lane.tokens) for lane in trace.lanes.values()}
        assert len(fed) == 1, "every lane is fed the same text"


# -- the command line ------------------------------------------------------------------------------------------------------


def command(model, monkeypatch, arguments) -> tuple[int, str]:
    """Exit status and standard error of a command on a model that is there already."""
    monkeypatch.setattr("river_core.model.load", lambda *args, **kwargs: model)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            status = main(arguments)
        except SystemExit as ended:  # argparse, with its own sentence
            assert ended.code == 2
            return 2, error.getvalue()
    return status, error.getvalue()


WORDS = st.one_of(
    st.text(st.characters(), max_size=12),
    st.sampled_from(
        ["0", "1", "4", "-1", "²", "0.5", "nan", "1e999", "river", "backbone,river:0.5", "replay", "0,95", "1;2", "same-text", "sequence"]
    ),
)


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        yield context


@cases(60)
@given(
    prompt=PROMPTS,
    options=st.dictionaries(
        st.sampled_from(["--tau", "--temperature", "--top-k", "--top-p", "--seed", "--prefill", "--methods", "--mode", "--timing"]),
        WORDS,
        max_size=3,
    ),
    tokens=st.sampled_from(["1", "2", "4", "0", "x", "²"]),
    as_json=st.booleans(),
)
def test_compare_ends_with_an_answer_or_a_sentence(tiny, patch, prompt, options, tokens, as_json):
    flags = [f"{name}={value}" for name, value in options.items()]
    status, said = command(tiny, patch, ["compare", f"--max-new-tokens={tokens}", *flags, *(["--json"] if as_json else []), "--", prompt])
    assert status in (0, 1, 2)
    if status == 1:
        assert "error: " in said and is_sentence(InputError(said.split("error: ")[-1].strip())), said


@cases(30)
@given(taus=st.one_of(WORDS, st.text("0123456789.,; -e", max_size=12)))
@example(taus="0,95")
def test_thresholds_of_a_sweep_are_read_or_refused(taus):
    try:
        read = read_taus(taus)
    except InputError as error:
        assert is_sentence(error)
        return
    assert all(math.isfinite(tau) for tau in read) and list(read) == sorted(set(read))
    assert all(-1 <= tau <= 2 for tau in read), "a cosine, or a value that none reaches"


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
LINE_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("properties")


@cases(60)
@given(
    prompts=st.lists(LINE_TEXT, min_size=1, max_size=5),
    keys=st.sampled_from(["prompt", "question", "null prompt"]),
    escape=st.booleans(),
    ends=st.sampled_from(["\n", "\r\n", "\n\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
)
@example(prompts=["a\u2028b"], keys="prompt", escape=False, ends="\n", encoding="utf-8")
@example(prompts=["a\u0085b"], keys="question", escape=False, ends="\n", encoding="utf-8-sig")
@example(prompts=["a"], keys="null prompt", escape=True, ends="\r\n", encoding="utf-8")
def test_prompts_come_back_as_they_were_written(folder, prompts, keys, escape, ends, encoding):
    records = [{"prompt": None, "question": text} if keys == "null prompt" else {keys: text} for text in prompts]
    path = folder / "prompts.jsonl"
    path.write_bytes((ends.join(json.dumps(record, ensure_ascii=escape) for record in records) + ends).encode(encoding))
    assert read_prompts(path) == prompts


@cases(60)
@given(
    raw=st.one_of(
        st.binary(max_size=80), st.lists(st.one_of(JSON, st.dictionaries(st.sampled_from(["prompt", "question"]), JSON)), max_size=4)
    )
)
@example(raw=b"\xff\xfe{\x00")
@example(raw=b'{"prompt": "\xed\xa0\xbd"}')
@example(raw=[{"prompt": "\ud800"}])
@example(raw=b"[" * 100_000)
def test_a_prompts_file_of_any_content_is_read_or_refused(folder, raw):
    path = folder / "any.jsonl"
    path.write_bytes(raw if isinstance(raw, bytes) else "\n".join(map(json.dumps, raw)).encode())
    try:
        prompts = read_prompts(path)
    except InputError as error:
        assert is_sentence(error), str(error)
        return
    assert prompts and all(isinstance(prompt, str) and prompt.strip() for prompt in prompts)


RECIPE = {name: "x" for name in FIELDS} | {
    "headline": HEADLINES[0],
    "prompt": "Hello",
    "methods": ["river:0.5"],
    "options": {"max_new_tokens": 2},
}


@cases(40)
@given(
    raw=st.one_of(
        st.binary(max_size=60),
        JSON,
        st.lists(st.dictionaries(st.sampled_from([*RECIPE, "other"]), JSON, max_size=3).map(lambda change: RECIPE | change), max_size=2),
    )
)
@example(raw=[3])
@example(raw=[RECIPE | {"headline": []}])
@example(raw=[RECIPE | {"options": 3}])
@example(raw=[RECIPE | {"slug": "../up"}])
@example(raw=[RECIPE | {"methods": None}])
def test_recipes_of_any_content_are_recorded_or_refused(tiny, patch, folder, raw):
    path, out = folder / "recipes.json", folder / "recorded"
    shutil.rmtree(out, ignore_errors=True)
    path.write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    try:
        recipes = read_recipes(path)
    except InputError as error:
        assert is_sentence(error), str(error)
        return
    if sum(len(str(recipe)) for recipe in recipes) > 2000:
        return
    status, said = command(tiny, patch, ["record", str(path), "--out", str(out), "--repeats", "1"])
    assert status in (0, 1), said
    assert all(inner.parent == out for inner in folder.rglob("*.json.gz")), "recordings stay in their folder"


# -- decoders -----------------------------------------------------------------------------------------------------------------

FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": Phi3Config,
    "ministral3": Ministral3Config,
}
ORIGINAL = 16
"""Positions of the original context of rope types that have one: within what is read below."""
WINDOWS = st.integers(2, 30)  # at 1 transformers' own cache keeps every key, and its steps differ from its own prompt


@st.composite
def any_config(draw):
    """A config of a supported family: any number of heads, sizes off the vector width, every rope type, windows, biases, tied or not."""
    family = draw(st.sampled_from(list(FAMILIES)))
    keys = draw(st.integers(1, 3))
    heads = keys * draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([4, 6, 8, 10, 14, 16, 18, 20, 24, 30, 32, 34, 40, 48, 64, 66, 80, 96, 128]))
    free = family in ("llama", "mistral", "qwen3", "ministral3")  # the others have no head_dim of their own
    values = {
        "vocab_size": draw(st.integers(20, 90)),
        "hidden_size": heads * (draw(st.integers(1, 12)) if free else head_dim),
        "intermediate_size": draw(st.integers(1, 150)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": draw(st.sampled_from([24, 128])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "hidden_act": draw(st.sampled_from(["silu", "silu", "silu", "gelu_pytorch_tanh", "relu"])),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if free:
        values["head_dim"] = head_dim
    if family == "llama":
        values |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if family == "qwen3":
        values["attention_bias"] = draw(st.booleans())
    if family in ("mistral", "phi3", "ministral3"):
        values["sliding_window"] = draw(st.one_of(st.none(), WINDOWS))
    if family in ("qwen2", "qwen3") and draw(st.booleans()):
        values |= {"use_sliding_window": True, "sliding_window": draw(WINDOWS), "max_window_layers": draw(st.integers(0, 3))}
    values["rope_parameters"] = draw(rope(family, head_dim, values["max_position_embeddings"]))
    if values["rope_parameters"]["rope_type"] == "longrope":
        values["original_max_position_embeddings"] = ORIGINAL
    return FAMILIES[family](**values)


@st.composite
def rope(draw, family, head_dim, positions):
    base = {"rope_theta": draw(st.sampled_from([10_000.0, 500_000.0]))}
    kinds = ["default", "linear", "dynamic", "yarn", "llama3"]
    kind = draw(st.sampled_from({"phi3": ["default", "longrope"], "ministral3": ["yarn"]}.get(family, kinds)))
    if family == "phi3":
        base["partial_rotary_factor"] = draw(
            st.sampled_from([share for share in (0.5, 0.75, 1.0) if int(head_dim * share) % 2 == 0 and int(head_dim * share)] or [1.0])
        )
    if kind == "longrope":
        half = int(head_dim * base["partial_rotary_factor"]) // 2
        factors = st.lists(st.floats(1, 8), min_size=half, max_size=half)
        return base | {
            "rope_type": kind,
            "short_factor": draw(factors),
            "long_factor": draw(factors),
            "original_max_position_embeddings": ORIGINAL,
        }
    if kind == "linear":
        return base | {"rope_type": kind, "factor": draw(st.sampled_from([1.0, 2.5, 8.0]))}
    if kind == "dynamic":
        return base | {"rope_type": kind, "factor": draw(st.sampled_from([1.5, 4.0]))}
    if kind == "yarn":
        more = {"rope_type": kind, "factor": draw(st.sampled_from([2.0, 8.0])), "original_max_position_embeddings": ORIGINAL}
        if family == "ministral3":
            more |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        return base | more
    if kind == "llama3":
        more = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
        return base | {"rope_type": kind} | more
    return base | {"rope_type": kind}


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=2e-4 * max(1.0, float(expected.abs().max())), rtol=0)


@cases(40)
@given(config=any_config(), prompt=st.integers(1, 45), steps=st.integers(1, 8), seed=st.integers(0, 5))
@torch.inference_mode()
def test_any_config_of_a_family_computes_what_transformers_computes(compiled_tiny, config, prompt, steps, seed):
    reference = random_model(config, seed)
    plan = choose_kernels("cpu", config.hidden_size, config.intermediate_size, torch.float32)
    decoder = Decoder(config, reference.state_dict(), plan)
    ids = torch.randint(0, config.vocab_size, (1, prompt + steps), generator=torch.Generator().manual_seed(seed))
    expected = reference(ids[:, :prompt], use_cache=True)
    held, found = expected.cache, [expected.logits[0]]
    for step in range(steps):
        answer = reference(ids[:, prompt + step : prompt + step + 1], cache=held, use_cache=True)
        found.append(answer.logits[0])
    for ours in (None, True, False):
        decoder.blocks.stack = None
        if ours is not None:
            decoder.blocks.stack = NATIVE.stack(decoder, decoder.blocks, ours)
            assert decoder.blocks.stack is not None or NATIVE.state != "ready" or config.hidden_act != "silu"
        cache = decoder.new_cache(prompt + steps)
        close(decoder.head(decoder.forward(ids[0, :prompt].tolist(), 0, cache)), found[0])
        for step, logits in enumerate(found[1:]):
            rows = decoder.rows(prompt + step, 1, cache)
            states = decoder.run_blocks(
                decoder.blocks, 0, len(decoder.blocks), decoder.embed([int(ids[0, prompt + step])]), rows, cache, BACKBONE
            )
            cache.length = rows.stop
            close(decoder.head(states[-1]), logits)
