"""From a model's name to its config, weights and tokenizer: hub id, local folder, GGUF file, or the packaged default.

Weights come from safetensors or GGUF only, and no code from a checkpoint is ever run.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import platformdirs
import psutil
import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GgufConfig
from transformers.utils import logging

from river_core.default_model import GGUF_SHA256, NAME, default_gguf, need_disk, sha256_of
from river_core.errors import LoadError
from river_core.files import STALE_SECONDS, appears_whole, one_at_a_time, to_disk
from river_core.gguf_file import check_tensors, complete_config, open_gguf

# Not by the environment variable: huggingface_hub reads that when it is first imported, which may be long before this line.
hub_constants.HF_HUB_DISABLE_TELEMETRY = True
CONVERSION_VERSION = 2  # raise it when the layout of converted folders changes
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
HUB_COPIES = ["consolidated*", "*/*"]  # the same weights once more, in other layouts
LFS_POINTER = b"version https://git-lfs"
# Files of one set of weights, as save_pretrained names them: one file, or parts.
SET = re.compile(r"model(?:-(\d{5})-of-(\d{5}))?\.safetensors")
# Names under which chat templates close a turn; a token counts only if the model's own template writes it.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<end_of_turn>")


@dataclass
class Checkpoint:
    """A model as it lies on disk, ready for `Decoder` and `River`.

    config: transformers text config. weights: tensors under transformers' names ("model.layers.0.self_attn.q_proj.weight"); the head is missing
    where it is tied. tokenizer: transformers tokenizer. eos_token_ids: any of them ends an answer. path: folder that transformers can load.
    """

    name: str
    source: str
    config: object
    weights: dict[str, torch.Tensor]
    tokenizer: object
    eos_token_ids: frozenset[int]
    revision: str | None = None
    sha256: str | None = None
    path: Path | None = None
    notes: list[str] = field(default_factory=list)


def cache_dir() -> Path:
    """The user's cache folder for this program; the environment variable RIVER_CACHE overrides it."""
    if os.environ.get("RIVER_CACHE"):
        return Path(os.environ["RIVER_CACHE"]).expanduser()
    return Path(platformdirs.user_cache_dir("river-explorer", appauthor=False, opinion=False))


def load_checkpoint(name: str | None = None, *, progress=None, check=None) -> Checkpoint:
    """Find a model and read it.

    Args:
        name: None = the packaged default; otherwise a .gguf file, a local folder, or a hub id such as "HuggingFaceTB/SmolLM2-360M-Instruct".
        progress: callable (stage, fraction or None, message); stages "download", "convert", "weights".
        check: called with the text config before weights are read; raises LoadError for a model that cannot be used.

    Returns:
        Checkpoint, weights in the checkpoint's own dtype (GGUF: float32).

    Raises:
        LoadError: one or two sentences: what is wrong, and what to do.
    """
    report = progress or (lambda stage, fraction, message: None)
    try:
        return _load_default(report, check) if name is None else _load_named(str(name).strip(), report, check)
    except OSError as error:  # a full or failing disk, or a file that this user may not read or write
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LoadError(f"The disk is full ({cache_dir()}). Free some space, or set RIVER_CACHE to another folder.") from error
        place = f" ({error.filename})" if error.filename else ""
        raise LoadError(
            f"{name or NAME} cannot be read or unpacked: {error.strerror or _first_line(error)}{place}. "
            "Check that the file can be read, or set RIVER_CACHE to a folder that can be written."
        ) from error


def _load_default(report, check) -> Checkpoint:
    cache = _make_cache()
    path = default_gguf(cache, report)
    if _known_sha256(path, cache, report) != GGUF_SHA256:
        with contextlib.suppress(FileNotFoundError):  # another process has seen it too
            path.unlink()  # right in size and wrong in content: a damaged disk or a meddled file
        path = default_gguf(cache, report)
    return _from_gguf(path, "default", NAME, report, check)


def _load_named(name: str, report, check) -> Checkpoint:
    nowhere = f"There is no model at {name[:200]!r}: give a folder, a .gguf file, or a hub id such as owner/name."
    try:
        path = Path(name).expanduser()
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a path, or the home folder of nobody
        raise LoadError(nowhere) from error
    if is_folder:
        return _from_folder(path, "folder", path.resolve().name, report, check)
    if is_file:
        return _from_gguf(path, "gguf", path.stem, report, check)
    if name.lower().endswith(".gguf") or name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        raise LoadError(nowhere)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise LoadError(nowhere) from error
    folder, revision = _from_hub(name, report, check)
    checkpoint = _from_folder(folder, "hub", name, report, check)
    checkpoint.revision = revision
    return checkpoint


def _make_cache() -> Path:
    """The cache folder, rid of what killed processes left in it."""
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(
            f"The cache folder {cache} cannot be made ({error.strerror}); set RIVER_CACHE to a folder that can be written."
        ) from error
    for path in (*cache.glob(".download-*"), *cache.glob("converted/.convert-*")):
        newest = max((_modified(inner) for inner in (path, *path.rglob("*"))), default=0)
        if time.time() - newest > STALE_SECONDS:  # a younger one may be another process at work
            shutil.rmtree(path, ignore_errors=True)
    return cache


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its owner is alive and has just moved it
        return time.time()


# -- folders -----------------------------------------------------------------------------------------------------------


def _from_folder(folder: Path, source: str, name: str, report, check, converted: dict | None = None) -> Checkpoint:
    """Read a folder of safetensors.

    converted: of a folder that `_convert` wrote, the sums of its tensors, which were finite when it did; None for everybody else's.
    """
    _refuse_foreign(folder, name)
    config = _checked_config(folder, name, check)
    text_config = _text_config(config)
    files, notes = _weight_files(folder, name)
    report("weights", None, f"reading {name}")
    whole = AutoModelForImageTextToText if text_config is not config else AutoModelForCausalLM
    try:
        options = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        model, found = _quietly(whole.from_pretrained, folder, **options)
    except MemoryError as error:
        raise LoadError(f"{name} does not fit into this machine's memory.") from error
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds for damaged files
        raise LoadError(f"{name}: its weights cannot be read ({_first_line(error)}). Is the download complete?") from error
    if found["missing_keys"]:  # transformers fills them with noise and a warning
        raise LoadError(f"{name}: its weights lack {sorted(found['missing_keys'])[0]}. Is the download complete?")
    strangers = sorted(key for key in found["unexpected_keys"] if ".layers." in key and not key.endswith("rotary_emb.inv_freq"))
    if strangers and ".visual." not in strangers[0] and "vision" not in strangers[0]:
        raise LoadError(
            f"{name}: its weights hold {strangers[0]}{f' and {len(strangers) - 1} more' if strangers[1:] else ''}, for which the model that config.json "
            "describes has no place. They belong to another model, or config.json does."
        )
    # The text config of a larger model need not say what the larger one does: whether the head is tied is seen on the model.
    text_config.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    weights = _text_weights(model.state_dict(), text_config)
    if converted is None:
        check_finite(name, weights)
    elif any(_sum(weights[key]) != total for key, total in converted.items() if key in weights):
        raise LoadError(f"{name}: its unpacked weights have changed on the disk.")
    tokenizer = _tokenizer(folder, name)
    rows = text_config.vocab_size
    beyond = sorted((token for token in tokenizer.get_vocab().items() if token[1] >= rows), key=lambda token: token[1])
    if len(beyond) > rows:
        raise LoadError(
            f"{name}: its tokenizer has {len(tokenizer):,} tokens and its embedding {rows:,} rows; the tokenizer is another model's."
        )
    if beyond:
        notes.append(
            f"The tokenizer has tokens beyond the {rows:,} rows of the embedding, from {beyond[0][0]!r} on; a prompt that needs one is refused."
        )
    return Checkpoint(
        name=name.split("/")[-1],
        source=source,
        config=text_config,
        weights=weights,
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(tokenizer, text_config, model.generation_config),
        path=folder,
        notes=notes,
    )


def _refuse_foreign(folder: Path, name: str) -> None:
    """LoadError for a folder whose files are not what their names say."""
    for file in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.model"))):
        refuse_pointer(file)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        raise LoadError(
            f"{name} is an adapter (LoRA){f' for {base}' if base else ''}, or holds one beside a model. Merge it into its base model "
            "(peft: model.merge_and_unload().save_pretrained(FOLDER)), or take adapter_config.json out of the folder to load the model alone."
        )


def refuse_pointer(file: Path) -> None:
    """LoadError for a git-lfs pointer, the three lines that stand where a large file should."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise LoadError(f"{file} is a git-lfs pointer, not the file itself. Run git lfs install and git lfs pull where it was cloned.")


def _weight_files(folder: Path, name: str) -> tuple[list[Path], list[str]]:
    """The files of the one set of weights in a folder, and notes on what else lies there; LoadError if there is none, or more than one, or half of one."""
    sets: dict[str | None, dict[str, Path]] = {}
    for file in folder.glob("*.safetensors"):
        if named := SET.fullmatch(file.name):
            sets.setdefault(named[2], {})[file.name] = file
    pickled = next((file for pattern in ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))), None)
    index = folder / "model.safetensors.index.json"
    if not sets:
        others = [file.name for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("consolidated")]
        if others:
            raise LoadError(
                f"{name}: its weights must be called model.safetensors, or model-00001-of-0000N.safetensors in parts; it holds {others[0]}."
            )
        if index.is_file():
            raise LoadError(f"{name}: its index names weights that are not in the folder. Is the download complete?")
        why = "its weights are in a pickle format, which can run code" if pickled else "it holds no weights in .safetensors files"
        raise LoadError(f"{name}: {why}; model weights must be .safetensors (or a .gguf file).")
    if len(sets) > 1:
        first, second = (sorted(files)[0] for files in list(sets.values())[:2])
        raise LoadError(
            f"{name} holds two sets of weights, {first} and {second}, of which one is older. Take one of them out of the folder."
        )
    (total, files), notes = sets.popitem(), []
    if total is not None:
        absent = [part for i in range(1, int(total) + 1) if (part := f"model-{i:05}-of-{total}.safetensors") not in files]
        if absent:
            raise LoadError(
                f"{name}: {absent[0]} is not in the folder{f', nor are {len(absent) - 1} more' if absent[1:] else ''}. Is the download complete?"
            )
        _check_index(index, files, name)
    if pickled:
        notes.append(f"{pickled.name} beside the .safetensors files was not read.")
    return sorted(files.values()), notes


def _check_index(index: Path, files: dict[str, Path], name: str) -> None:
    """LoadError unless the index of weights in parts says of every tensor the part that holds it."""
    if not index.is_file():
        raise LoadError(
            f"{name}: its weights are in parts, and {index.name}, which says what lies where, is not in the folder. Is the download complete?"
        )
    try:
        said = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        held = {}
        for file in files.values():
            with safe_open(file, "pt") as opened:
                held |= dict.fromkeys(opened.keys(), file.name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise LoadError(f"{name}: its weights cannot be read ({_first_line(error)}). Is the download complete?") from error
    wrong = sorted(tensor for tensor in said.keys() | held.keys() if said.get(tensor) != held.get(tensor))
    if wrong:
        raise LoadError(
            f"{name}: {index.name} says of {wrong[0]} that it lies in {said.get(wrong[0], 'no file')}, and it lies in {held.get(wrong[0], 'none')}. "
            "The index and the weights are of different versions; fetch both again."
        )


def check_finite(name: str, weights: dict[str, torch.Tensor]) -> None:
    """LoadError, naming the tensor, if a weight is NaN or infinite."""
    for key, tensor in weights.items():
        # A sum is one pass without a mask in memory; NaN and infinity never leave it. That it overflowed by itself is told apart afterwards.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise LoadError(f"{name}: {key} holds NaN or infinity; the file is damaged, or its training or conversion failed.")


def _tokenizer(folder: Path, name: str):
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a model type or a field that it does not know
        why = _first_line(error)
        if "untagged enum" in why or "unknown variant" in why:
            kind = _tokenizer_kind(folder)
            raise LoadError(
                f"{name}: its tokenizer.json is of a kind{kind} that the installed tokenizers library ({version('tokenizers')}) does not know. "
                "Try pip install --upgrade tokenizers transformers."
            ) from error
        raise LoadError(f"{name} has no usable tokenizer ({why}).") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise LoadError(f"{name} has no tokenizer.json; a fast tokenizer is needed.")
    return tokenizer


def _tokenizer_kind(folder: Path) -> str:
    try:
        return f" ({json.loads((folder / 'tokenizer.json').read_text(encoding='utf-8'))['model']['type']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _checked_config(folder: Path, name: str, check):
    """The config of a checkpoint folder, after everything that can be refused without its weights."""
    if not (folder / "config.json").is_file():
        raise LoadError(f"{name} is not a model: there is no config.json in {folder}.")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise LoadError(f"{name}: its config.json cannot be used ({_first_line(error)}).") from error
    text_config = _text_config(config)
    if check:
        check(text_config)
    if getattr(config, "quantization_config", None) or getattr(text_config, "quantization_config", None):
        raise LoadError(f"{name} is quantised already; load the original 16-bit checkpoint, the river is quantised here.")
    return config


def _text_config(config):
    """The language model's part of a config that may be a larger model's, as Ministral 3's is."""
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def _text_weights(weights, config) -> dict[str, torch.Tensor]:
    """Tensors under the names of a plain causal language model; a tied head is left out."""
    named = {key.replace("model.language_model.", "model."): tensor for key, tensor in weights.items()}
    kept = {key: tensor for key, tensor in named.items() if key.startswith("model.layers.") or key in _TOP}
    if config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    return kept


_TOP = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def _end_tokens(tokenizer, config, generation_config) -> frozenset[int]:
    """Tokens that end an answer: those of the config, and the one with which the chat template closes an assistant's turn."""
    ids: set[int] = set()
    for holder in (config, generation_config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        ids |= set(value) if isinstance(value, (list, tuple)) else {value} - {None}
    if tokenizer.chat_template:
        marker = "an answer that no template holds"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": marker}]
        try:
            after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(marker)[2]
        except Exception as error:  # a template is a program in the checkpoint; whatever it raises, EOS still ends the answer
            logging.get_logger(__name__).info("the chat template cannot render an answer: %s", error)
            after = ""
        vocabulary = tokenizer.get_vocab()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        found = [text for text in special.union(TURN_ENDS) if text in after and text in vocabulary]
        if found:
            ids.add(vocabulary[min(found, key=lambda text: (after.index(text), -len(text)))])
    return frozenset(token for token in ids if isinstance(token, int) and token >= 0)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path, source: str, name: str, report, check) -> Checkpoint:
    """Read a GGUF file by way of a converted folder in the cache: transformers takes many seconds for a file, and half of one for the folder."""
    refuse_pointer(path)
    cache = _make_cache()
    sha256 = _known_sha256(path, cache, report)
    # Another version of a library may read the same file differently: what an older one made of it is made again.
    made_by = f"v{CONVERSION_VERSION}-{version('transformers')}-{version('gguf')}"
    folder = cache / "converted" / f"{sha256[:32]}-{made_by}"
    checkpoint = _converted(folder, source, name, report, check)
    if checkpoint is None:

        def waiting():
            report("convert", None, f"waiting for another process that unpacks {name}")

        with one_at_a_time(cache / "locks" / f"{folder.name}.lock", waiting):
            checkpoint = _converted(folder, source, name, report, check)
            if checkpoint is None:
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                _convert(path, folder, sha256, name, report, check)
                for older in folder.parent.glob(f"{sha256[:32]}-*"):
                    if older != folder:
                        shutil.rmtree(older, ignore_errors=True)
        if checkpoint is None:
            checkpoint = _from_folder(folder, source, name, report, check, _sums(folder))
    checkpoint.sha256 = sha256
    return checkpoint


def _converted(folder: Path, source: str, name: str, report, check) -> Checkpoint | None:
    """What an earlier conversion left; None if there is none, or if it is not what it was when it was written."""
    if not folder.is_dir() or _damaged(folder):
        return None
    try:
        return _from_folder(folder, source, name, report, check, _sums(folder))
    except LoadError as error:
        if isinstance(error.__cause__, MemoryError):
            raise
        if check:
            check(_text_config(_checked_config(folder, name, None)))  # too large, or not supported: no fault of the folder
        return None


def _damaged(folder: Path) -> bool:
    """Whether a converted folder has lost a file or part of one since it was written."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return not sizes or any(not (folder / file).is_file() or (folder / file).stat().st_size != size for file, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return True


def _sum(tensor: torch.Tensor) -> int:
    """Of a tensor's bits, as whole numbers: one pass at the speed of memory, and another number where a disk has lost a page."""
    words = tensor.contiguous().view(torch.uint8).numpy().ravel()
    return int(words.view(np.uint64 if words.size % 8 == 0 else np.uint8).sum(dtype=np.uint64))


def _sums(folder: Path) -> dict[str, int]:
    try:
        return json.loads((folder / "converted.json").read_text())["sums"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{folder} is damaged.") from error


def _convert(path: Path, folder: Path, sha256: str, name: str, report, check) -> None:
    file = open_gguf(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    need_disk(folder.parent, int(file.elements * 4 * 1.05))
    need_memory(name, file.elements * 4 * 2)
    report("convert", 0.1, f"unpacking {name} (once)")
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as temporary:
        part = Path(temporary) / "model"
        try:
            config = _quietly(AutoConfig.from_pretrained, path.parent, gguf_file=path.name)
            if check:
                check(config)
            complete_config(file, config)
            _quietly(check_tensors, file, config)
            report("convert", 0.25, f"unpacking {name}: tokenizer")
            tokenizer = _quietly(AutoTokenizer.from_pretrained, path.parent, gguf_file=path.name)
            report("convert", 0.4, f"unpacking {name}: weights")
            model, found = _quietly(
                AutoModelForCausalLM.from_pretrained,
                path.parent,
                gguf_file=path.name,
                config=config,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
        except LoadError:
            raise
        except Exception as error:  # the reader raises whatever a damaged or foreign field makes it raise
            raise LoadError(f"{path.name} (architecture {file.architecture}) cannot be read: {_first_line(error)}") from error
        if found["missing_keys"]:  # transformers fills them with noise
            raise LoadError(f"{path.name}: transformers finds no {sorted(found['missing_keys'])[0]} in it, so it cannot be read.")
        weights = model.state_dict()
        check_finite(path.name, weights)
        report("convert", 0.85, f"unpacking {name}: writing")
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config  # the weights are plain float32 now
        try:
            _quietly(model.save_pretrained, part, max_shard_size="1000TB")
        except SafetensorError as error:  # safetensors' own kind for a full disk
            raise LoadError(
                f"The unpacked model cannot be written to {folder.parent} ({_first_line(error)}). "
                "Free some disk space, or set RIVER_CACHE to another folder."
            ) from error
        tokenizer.save_pretrained(part)
        note = {"source": path.name, "sha256": sha256, "transformers": transformers.__version__, "conversion": CONVERSION_VERSION}
        note["sums"] = {key: _sum(tensor) for key, tensor in weights.items()}
        (part / "converted.json").write_text(json.dumps(note))
        sizes = {written.name: written.stat().st_size for written in part.iterdir()}
        (part / "sizes.json").write_text(json.dumps(sizes))
        for written in part.iterdir():
            to_disk(written)
        try:
            os.replace(part, folder)
        except OSError:
            if not folder.is_dir():  # else another process converted the same file meanwhile; its folder is as good
                raise
    report("convert", 1.0, f"unpacked {name}")


def _known_sha256(path: Path, cache: Path, report) -> str:
    """The file's SHA-256; remembered by path, size and time, since hashing gigabytes at every start would take a minute."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    memory = cache / "sha256.json"
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict) or not isinstance(known.get(key), str):
        known = known if isinstance(known, dict) else {}
        known[key] = sha256_of(path, lambda f: report("weights", f, f"checking {path.name}, {round(100 * f)} %"))
        # In a cache that cannot be written it is not remembered, and taken again at the next start.
        with contextlib.suppress(OSError), appears_whole(memory) as partial:
            partial.write_text(json.dumps(known))
    return known[key]


# -- hub ---------------------------------------------------------------------------------------------------------------


def _from_hub(name: str, report, check) -> tuple[Path, str]:
    """Download (or find in the hub's own cache) the safe files of a repository; returns its folder and revision.

    The config comes first and alone, so that a model which cannot be used is refused before gigabytes are fetched.
    """

    class Bar(tqdm):
        """Feeds the page's progress instead of the terminal."""

        def __init__(self, *args, **kwargs):
            kwargs["disable"] = False
            kwargs["file"] = io.StringIO()
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def update(self, n=1):
            shown = super().update(n)
            if self.unit == "B" and self.total and self.total > 1e6:  # the config alone is not worth a bar
                report("download", self.n / self.total, f"downloading {name}, {self.n / 1e6:.0f} of {self.total / 1e6:.0f} MB")
            return shown

    report("download", 0.0, f"looking for {name}")
    try:
        folder = Path(snapshot_download(name, allow_patterns=["config.json", "adapter_config.json"], tqdm_class=Bar))
        _refuse_foreign(folder, name)
        _checked_config(folder, name, check)
        snapshot_download(name, revision=folder.name, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES, tqdm_class=Bar)
    except GatedRepoError as error:
        raise LoadError(f"{name} is gated: accept its licence on the hub and set HF_TOKEN, or choose another model.") from error
    except RepositoryNotFoundError as error:
        raise LoadError(f"The hub has no model {name}, or it is private: check the spelling, or set HF_TOKEN.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == 28:
            raise LoadError(f"There is no room on the disk for {name}; free some space.") from error
        raise LoadError(
            f"{name} is not on this machine, and the model hub cannot be reached. Connect to the network, or name a local folder or .gguf file."
        ) from error
    return folder, folder.name


# -- memory and messages -----------------------------------------------------------------------------------------------


def need_memory(name: str, needed: float) -> None:
    """LoadError unless about `needed` bytes are available to this process."""
    available = available_memory()
    if available is not None and needed > available:
        raise LoadError(
            f"{name} needs about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available. Close other programs, or choose a smaller model."
        )


OVERHEAD = 250e6  # libraries that are loaded on the way, the tokenizer, and the matrices on which kernels are measured


def bytes_to_load(
    sizes, tied: bool, itemsize: int = 2, bits: int = 4, threads: int = 1, keeps_codes: bool = False, resident: int | None = None
) -> float:
    """The most memory that building a model from its weights takes, beside the weights themselves, which stay on the disk until they are read.

    Args:
        sizes: `DecoderConfig`. tied: the head is the embedding. itemsize: of the backbone's dtype; 4 = the exact mode, whose river is dequantised.
        bits: of the river. threads: layers that are quantised at the same time. keeps_codes: they are held until they can be written to the cache.
        resident: backbone layers that are in memory at the same time; None = all.
    """
    d, wide = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    layer = d * (2 * queries + 2 * keys + 3 * wide)
    layers, backbone = (layer * (sizes.num_hidden_layers if count is None else count) for count in (None, resident))
    embedding = sizes.vocab_size * d * (1 if tied else 2)
    group = 8 / 32  # a float32 scale and zero, for the smallest group that is usual
    # Packed for the kernel, and once more while compiled code takes them over; 8 bits have one layout.
    river = 4 if itemsize == 4 else 1.1 if bits == 4 else 1.0 + group
    codes = 1 + group + (0.5 if bits == 4 else 0) if keeps_codes else 0  # as they were made, and packed to be written
    scratch = min(threads, sizes.num_hidden_layers) * d * max(2 * wide, queries + 2 * keys) * 12
    return OVERHEAD + itemsize * (backbone + embedding) + layers * (river + codes) + scratch


def available_memory() -> int:
    """Bytes that this process may still take, by the system and by the limits of the containers that it is in."""
    return max(0, min([psutil.virtual_memory().available, *_container_room()]))


def _container_room():
    """What is left under each memory limit of this process's control groups, of either version."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    roots = [(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current") for _, kinds, path in lines if not kinds]
    roots += [
        (Path("/sys/fs/cgroup/memory"), path, "memory.limit_in_bytes", "memory.usage_in_bytes")
        for _, kinds, path in lines
        if "memory" in kinds.split(",")
    ]
    for root, path, most, used in roots:
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit = (folder / most).read_text().strip()
                if limit == "max" or int(limit) >= 1 << 60:
                    continue
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # What is used counts cached files too, which the kernel gives back when memory is asked for.
                cached = sum(int(stat.get(f"total_{key}", stat.get(key, 0))) for key in ("inactive_file", "active_file"))
                yield int(limit) - int((folder / used).read_text()) + cached
            except (OSError, ValueError):  # a folder that this container does not see
                continue


def _quietly(function, *args, **kwargs):
    """Call into transformers without its progress bars; ours are shown instead. One thread at a time: while it makes a model, transformers swaps functions
    of PyTorch's and of its own, and two threads that do so leave them swapped."""
    with _IN_TRANSFORMERS:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            return function(*args, **kwargs)
        finally:
            if shown:
                logging.enable_progress_bar()


_IN_TRANSFORMERS = threading.Lock()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
