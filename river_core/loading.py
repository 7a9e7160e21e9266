"""From a model's name to its config, weights and tokenizer: hub id, local folder, GGUF file, or the packaged default.

Weights come from safetensors or GGUF only, and no code from a checkpoint is ever run.
"""

import errno
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

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
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GgufConfig
from transformers.utils import logging

from river_core.default_model import GGUF_SHA256, NAME, default_gguf, need_disk, sha256_of
from river_core.errors import LoadError
from river_core.files import appears_whole

# Not by the environment variable: huggingface_hub reads that when it is first imported, which may be long before this line.
hub_constants.HF_HUB_DISABLE_TELEMETRY = True
CONVERSION_VERSION = 1  # raise it when the layout of converted folders changes
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
HUB_COPIES = ["consolidated*", "*/*"]  # the same weights once more, in other layouts
STALE_SECONDS = 2 * 3600  # a temporary folder that nobody wrote to for so long belongs to a process that was killed
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
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "river-explorer"


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


def _from_folder(folder: Path, source: str, name: str, report, check) -> Checkpoint:
    config = _checked_config(folder, name, check)
    text_config = _text_config(config)
    files = [file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]
    if not files:
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        why = "its weights are in a pickle format, which can run code" if other else "it holds no weights in .safetensors files"
        raise LoadError(f"{name}: {why}; model weights must be .safetensors (or a .gguf file).")
    _need_memory(name, sum(file.stat().st_size for file in files))
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
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise LoadError(f"{name} has no usable tokenizer ({_first_line(error)}).") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise LoadError(f"{name} has no tokenizer.json; a fast tokenizer is needed.")
    # The text config of a larger model need not say what the larger one does: whether the head is tied is seen on the model.
    text_config.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return Checkpoint(
        name=name.split("/")[-1],
        source=source,
        config=text_config,
        weights=_text_weights(model.state_dict(), text_config),
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(tokenizer, text_config, model.generation_config),
        path=folder,
    )


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
    cache = _make_cache()
    sha256 = _known_sha256(path, cache, report)
    folder = cache / "converted" / f"{sha256[:32]}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        try:
            checkpoint = _from_folder(folder, source, name, report, check)
        except LoadError:
            if not _damaged(folder):
                raise
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted disk, not an interrupted conversion: those never get here
            checkpoint = None
    else:
        checkpoint = None
    if checkpoint is None:
        _convert(path, folder, sha256, name, report, check)
        checkpoint = _from_folder(folder, source, name, report, check)
    checkpoint.sha256 = sha256
    return checkpoint


def _damaged(folder: Path) -> bool:
    """Whether a converted folder has lost a file or part of one since it was written."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
    except (OSError, ValueError):
        return True
    return any(not (folder / file).is_file() or (folder / file).stat().st_size != size for file, size in sizes.items())


def _convert(path: Path, folder: Path, sha256: str, name: str, report, check) -> None:
    architecture, elements = _gguf_header(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    need_disk(folder.parent, int(elements * 4 * 1.05))
    _need_memory(name, elements * 4 * 2)
    report("convert", 0.1, f"unpacking {name} (once)")
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as temporary:
        part = Path(temporary) / "model"
        try:
            config = _quietly(AutoConfig.from_pretrained, path.parent, gguf_file=path.name)
            if check:
                check(config)
            report("convert", 0.25, f"unpacking {name}: tokenizer")
            tokenizer = _quietly(AutoTokenizer.from_pretrained, path.parent, gguf_file=path.name)
            report("convert", 0.4, f"unpacking {name}: weights")
            model = _quietly(
                AutoModelForCausalLM.from_pretrained,
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
        except LoadError:
            raise
        except Exception as error:  # the reader raises whatever a damaged or foreign field makes it raise
            raise LoadError(f"{path.name} (architecture {architecture}) cannot be read: {_first_line(error)}") from error
        report("convert", 0.85, f"unpacking {name}: writing")
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config  # the weights are plain float32 now
        try:
            _quietly(model.save_pretrained, part)
        except SafetensorError as error:  # safetensors' own kind for a full disk
            raise LoadError(
                f"The unpacked model cannot be written to {folder.parent} ({_first_line(error)}). "
                "Free some disk space, or set RIVER_CACHE to another folder."
            ) from error
        tokenizer.save_pretrained(part)
        sizes = {file.name: file.stat().st_size for file in part.iterdir()}
        note = {"source": path.name, "sha256": sha256, "transformers": transformers.__version__, "conversion": CONVERSION_VERSION}
        (part / "sizes.json").write_text(json.dumps(sizes))
        (part / "converted.json").write_text(json.dumps(note))
        try:
            os.replace(part, folder)
        except OSError:
            if not folder.is_dir():  # else another process converted the same file meanwhile; its folder is as good
                raise
    report("convert", 1.0, f"unpacked {name}")


def _gguf_header(path: Path) -> tuple[str, int]:
    """Architecture and number of weights of a GGUF file, after checking that it is one and is whole."""
    import gguf

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path.name} is not a GGUF file.")
    try:
        reader = gguf.GGUFReader(path)
        field_ = reader.get_field("general.architecture")
        architecture = field_.contents() if field_ else "unknown"
        end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise LoadError(f"{path.name} is damaged or cut off: its header cannot be read ({_first_line(error)}).") from error
    if not elements or end > path.stat().st_size:
        raise LoadError(f"{path.name} is cut off: it ends before its last weights. Download it again.")
    return str(architecture), elements


def _known_sha256(path: Path, cache: Path, report) -> str:
    """The file's SHA-256; remembered by path, size and time, since hashing gigabytes at every start would take a minute."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    memory = cache / "sha256.json"
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = sha256_of(path, lambda f: report("weights", f, f"checking {path.name}, {round(100 * f)} %"))
        with appears_whole(memory) as partial:
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
        folder = Path(snapshot_download(name, allow_patterns=["config.json"], tqdm_class=Bar))
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


def _need_memory(name: str, needed: int) -> None:
    """LoadError unless about `needed` bytes are available to this process."""
    available = available_memory()
    if available is not None and needed > available:
        raise LoadError(
            f"{name} needs about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available. Choose a smaller model."
        )


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and by the container's limit; None where neither says."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        # What is used counts cached files too, which the kernel gives back when memory is asked for.
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        limits.append(int(text) - int(used.read_text()) + int(stat["inactive_file"]) + int(stat["active_file"]))
    return min(limits) if limits else None


def _quietly(function, *args, **kwargs):
    """Call into transformers without its progress bars; ours are shown instead."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return function(*args, **kwargs)
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
