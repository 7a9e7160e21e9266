"""The packaged model, for real: the same greedy text as transformers, through the same files that a user has."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from river_core.decoder import Decoder
from river_core.exit_rules import Never
from river_core.kernels import choose_kernels
from river_core.loading import load_checkpoint
from river_core.strategies.river import RiverStrategy
from river_core.text import encode

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "A farmer has 12 baskets with 15 apples in each. He sells 7 baskets. How many apples are left?",
    "Write a short poem about a river that forgets its way.",
    "List five European capitals and their countries.",
    "def fibonacci(n):",
]


@pytest.fixture(scope="module")
def pair():
    """transformers' model and our decoder over one checkpoint, both float32."""
    checkpoint = load_checkpoint()
    reference = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    reference.load_state_dict(checkpoint.weights, strict=False)
    reference.tie_weights()
    plan = choose_kernels("cpu", checkpoint.config.hidden_size, checkpoint.config.intermediate_size, torch.float32)
    return checkpoint, reference, Decoder(checkpoint.config, checkpoint.weights, plan)


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers_generate(pair, prompt):
    """Fed transformers' own text, so that a near tie on some processor ends in one other token and not in another answer."""
    checkpoint, reference, decoder = pair
    ids = encode(checkpoint.tokenizer, prompt, chat=True)
    inputs = torch.tensor([ids])
    options = {"max_new_tokens": 64, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = reference.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    expected, logits = made.sequences[0, len(ids) :].tolist(), [row[0] for row in made.logits]
    assert len(expected) == 64 or expected[-1] in checkpoint.eos_token_ids
    plain = RiverStrategy(SimpleNamespace(decoder=decoder, river=None), Never(decoder.config.num_hidden_layers))
    cache = decoder.new_cache(len(ids) + 64)
    step = plain.prefill(ids, cache)
    for i, (token, theirs) in enumerate(zip(expected, logits, strict=True)):
        ours = step.logits.flatten()
        assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()
        assert theirs[token] - theirs[int(ours.argmax())] < 1e-3, f"token {i}: not even a near tie"
        if i + 1 < len(expected):
            step = plain.step(token, len(ids) + i, i + 1, cache)


def test_the_chat_templates_end_token_ends_an_answer(default_model):
    ends = {default_model.tokenizer.convert_ids_to_tokens(token) for token in default_model.eos_token_ids}
    assert "<|im_end|>" in ends


def test_the_default_model_has_its_own_presets_and_says_what_it_is(default_model):
    assert default_model.calibrated and default_model.default_tau == 0.97
    assert default_model.tau_presets == {"fast": 0.95, "balanced": 0.97, "careful": 0.98}
    facts = default_model.describe()
    assert facts["n_layers"] == 30 and len(facts["sha256"]) == 64 and facts["reasons"]


def test_river_leaves_early_on_real_text_and_later_with_a_higher_tau(exact_model):
    from river_core import Trace, compare

    options = {"max_new_tokens": 24, "methods": ("river:0.95", "river:0.97", "river:0.98")}
    lanes = Trace.from_events(compare(exact_model, PROMPTS[0], **options)).lanes
    fast, balanced, careful = (lanes[name].mean_depth for name in ("river", "river-2", "river-3"))
    assert 1 < fast < balanced < careful <= 30


def test_what_is_pinned_is_used_and_said_in_every_header():
    from river_core import compare, load

    pins = {"dtype": "float16", "kv_dtype": "bfloat16", "river_kernel": "int4", "products": "aten", "screen_head": True}
    model = load(**pins)
    compiled = model.compile(wait=True)
    header = next(compare(model, PROMPTS[0], ("backbone",), max_new_tokens=1))["header"]
    assert (header["dtype"], header["kv_dtype"], header["kernels"]["river"]) == ("float16", "bfloat16", "int4")
    assert {"dtype", "kv_dtype", "river_kernel", "products", "head"} <= set(header["kernels"]["pinned"])
    assert header["kernels"]["native"]["state"] == ("ready" if compiled else "failed")
    assert header["kernels"]["loops"] == (dict.fromkeys(("backbone", "river"), "ATen's") if compiled else {})
    assert header["kernels"]["head"].startswith("screened" if compiled else "full")
