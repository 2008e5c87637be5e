"""The tokenizer of a model directory: validation of its files, its tokens by tokenizer.json, and its capabilities.

tokenizer.json is the whole tokenizer: what cuts text, vocabulary, merges, added tokens. It is read as it stands, by the
library that defines it, whatever class tokenizer_config.json names: some classes of transformers 5 rebuild another
tokenizer from parts of the file, so that a marker that only tokenizer.json has is no token, and one text has other
tokens in a directory with a config.json than in one without. Of the other files only names of special tokens, the chat
template and further added tokens count.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers
import transformers

from cfprm_jax.config import MARKER
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import chat_template, file_schemas, reserved_tokens, schema
from cfprm_jax.model_directory.json_files import MIB, read_bytes, read_object

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
# Files besides tokenizer.json that may name a special token. vocab.json and merges.txt are left behind on purpose:
# tokenizer.json holds both, and a loader that rebuilt the tokenizer from them would lose the new name.
_BESIDE = {
    CONFIG: file_schemas.TOKENIZER_CONFIG,
    SPECIAL: file_schemas.SPECIAL_TOKENS,
    "added_tokens.json": file_schemas.ADDED_TOKENS,
}
# From which a tokenizer.json can be made.
_SOURCES = (("vocab.json", "merges.txt"), ("tokenizer.model",))
_MOST_BYTES = 256 * MIB
# Each of these has ids of its own in every tokenizer of a language model.
_CHARACTERS = string.ascii_letters + string.digits + "+-*/=^(){}[]<>.,:;$%&|_!?"
_QUESTION = "QUESTION7f3b61d2PLACEHOLDER"

T = TypeVar("T")


def load_tokenizer(
    directory: str | pathlib.Path, marker: str | None = MARKER, vocab_size: int | None = None
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory, in which marker is exactly one token.

    A tokenizer that has the marker is used unchanged. For the default marker, a token that the tokenizer keeps in
    reserve is renamed to it (:mod:`.reserved_tokens`; :func:`marker_origin` gives its name): in Qwen2.5 and Qwen3 the
    one at id 151651, where Qwen2.5-Math-PRM has its marker. Every other text keeps its ids.

    Args:
      marker: None takes the tokenizer as it is: no marker, and a chat template only if it has one.
      vocab_size: embeddings of the model that is to read the ids; None does not look.

    Raises:
      UserError: no tokenizer there, a file that is not what it should be, no chat template or one that does not show
        the question, a marker that is not one token, a token without an embedding, texts without ids of their own.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory with a tokenizer")
    with tempfile.TemporaryDirectory(prefix="cfprm_tokenizer_") as scratch:
        source = directory
        _check_beside(directory)
        if not (directory / TOKENIZER).exists():
            source = pathlib.Path(scratch) / "converted"
            _convert(directory, source)
        description = read_object(source / TOKENIZER, _MOST_BYTES, repeats=True)
        schema.check(description, file_schemas.TOKENIZER, str(directory / TOKENIZER))
        added = description.get("added_tokens") or ()
        known = marker in {token["content"] for token in added} or _in_vocabulary(marker, description["model"]["vocab"])
        if marker == MARKER and not known:
            source = _renamed(source, pathlib.Path(scratch) / "renamed", description, marker)
        tokenizer = _from_pretrained(source, directory)
    tokenizer.name_or_path = str(directory)
    _check_ids(tokenizer, directory, added, vocab_size)
    if marker is not None:
        marker_id(tokenizer, marker)
        check_chat_template(tokenizer)
    if tokenizer.chat_template:
        prompt = render_chat(tokenizer, [{"role": "user", "content": _QUESTION}], True)
        if _QUESTION not in prompt:
            raise UserError(f"the chat template of {directory} does not show the question: it gives {prompt[:80]!r}")
    _check_texts(tokenizer, directory)
    return tokenizer


def save_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, directory: str | pathlib.Path) -> None:
    """Write the tokenizer's files; AutoTokenizer loads them anywhere, marker and chat template included.

    The chat template goes into tokenizer_config.json, which every version of every reader supports. The class there
    exists in transformers 4 and 5 and loads tokenizer.json unchanged.
    """
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    path = pathlib.Path(directory) / CONFIG
    if not path.is_file():
        return
    described = {**json.loads(path.read_text(encoding="utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def marker_id(tokenizer: transformers.PreTrainedTokenizerBase, marker: str) -> int:
    """The id of the marker.

    Raises:
      UserError: the marker is unknown to the tokenizer, or its text is not exactly one token.
    """
    found = tokenizer.backend_tokenizer.token_to_id(marker)
    ids = tokenizer.backend_tokenizer.encode(marker, add_special_tokens=False).ids
    if found is None or ids != [found]:
        reserve = ", and it has no reserved token to rename" if marker == MARKER else ""
        raise UserError(
            f"--marker={marker!r} is not exactly one token of the tokenizer in {tokenizer.name_or_path}: it gives the "
            f"ids {ids}{reserve}. Name one of its added tokens, or add {marker!r} to its tokenizer "
            "(docs/encodings.md#marker)"
        )
    return found


def marker_origin(tokenizer: transformers.PreTrainedTokenizerBase) -> str | None:
    """The name of the reserved token that was renamed to the marker; None where the tokenizer had the marker."""
    return tokenizer.init_kwargs.get(reserved_tokens.RENAMED_FROM)


def check_chat_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """UserError if there is none."""
    if not tokenizer.chat_template:
        file = pathlib.Path(tokenizer.name_or_path or ".") / CONFIG
        raise UserError(f'{file}: no "chat_template" (and no {TEMPLATE} beside it), by which questions become prompts')


def render_chat(
    tokenizer: transformers.PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
) -> str:
    """The conversation as the tokenizer's chat template writes it, within the limits of :mod:`.chat_template`.

    Raises:
      UserError: the template fails, or computes or prints too much.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    try:
        return chat_template.render(template, messages, tokenizer.special_tokens_map, add_generation_prompt)
    except UserError as error:
        raise UserError(f"the chat template of {tokenizer.name_or_path} {error}") from error


def _check_beside(directory: pathlib.Path) -> None:
    """Raise UserError unless the files beside tokenizer.json are of their kinds."""
    for name, fields in _BESIDE.items():
        if (directory / name).exists():
            schema.check(read_object(directory / name, repeats=True), fields, str(directory / name))
    if (directory / TEMPLATE).exists():
        data = read_bytes(directory / TEMPLATE, 4 * chat_template.MOST_CHARACTERS)
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{directory / TEMPLATE}: not UTF-8: {error.reason} at byte {error.start}") from error


def _convert(directory: pathlib.Path, target: pathlib.Path) -> None:
    """Have a tokenizer.json made from the files of an older kind of tokenizer."""
    if not any(all((directory / name).is_file() for name in names) for names in _SOURCES):
        known = ", or ".join(" and ".join(names) for names in _SOURCES)
        raise UserError(f"{directory}: no tokenizer: expected {TOKENIZER} (or {known})")
    if (directory / "vocab.json").exists():
        vocabulary = {"vocab": read_object(directory / "vocab.json", _MOST_BYTES, repeats=True)}
        schema.check(vocabulary, {"vocab": schema.required(file_schemas.VOCABULARY)}, str(directory / "vocab.json"))
        read_bytes(directory / "merges.txt", _MOST_BYTES)

    def convert() -> None:
        # The class that the directory names: only it can build a tokenizer from its files.
        transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        ).save_pretrained(target)

    _guarded(convert, f"{directory} has no tokenizer that loads")


def _from_pretrained(source: pathlib.Path, directory: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
    return _guarded(
        lambda: transformers.PreTrainedTokenizerFast.from_pretrained(str(source), local_files_only=True),
        f"{directory} has no tokenizer that loads",
    )


def _guarded(load: Callable[[], T], what: str) -> T:
    """Call load, and convert any error of the libraries to a UserError that begins with what."""
    try:
        return load()
    # Parsers raise what they like, and panics of the Rust library are no Exceptions.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise UserError(f"{what}: {' '.join(str(error).split())[:500] or type(error).__name__}") from error


def _in_vocabulary(marker: str | None, vocabulary: Any) -> bool:
    if isinstance(vocabulary, dict):
        return marker in vocabulary
    return any(piece == marker for piece, _ in vocabulary)


def _check_ids(
    tokenizer: transformers.PreTrainedTokenizerBase,
    directory: pathlib.Path,
    added: Sequence[Mapping[str, Any]],
    vocab_size: int | None,
) -> None:
    """Raise UserError unless every token has one unique id, that of the files, and an embedding."""
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"{directory / TOKENIZER}: model.vocab: expected tokens, found none")
    for token in added:
        name = token["content"]
        # The marker may stand under the stock name here.
        if name in vocabulary and vocabulary[name] != token["id"]:
            raise UserError(
                f"{directory / TOKENIZER}: added_tokens: {name!r} has id {token['id']}, expected {vocabulary[name]}, "
                "by its place in the vocabulary"
            )
    largest = max(vocabulary.values())
    if vocab_size is not None and largest >= vocab_size:  # JAX would read another token's embedding without a word
        raise UserError(f"{directory}: the tokenizer has a token {largest}, but the model's vocab_size is {vocab_size}")
    if len(set(vocabulary.values())) < len(vocabulary):
        owner: dict[int, str] = {}
        first, second = next(
            (owner[index], name) for name, index in sorted(vocabulary.items()) if owner.setdefault(index, name) != name
        )
        raise UserError(f"{directory / TOKENIZER}: {first!r} and {second!r} have the same id {vocabulary[first]}")
    config = directory / CONFIG
    declared = read_object(config, repeats=True).get("added_tokens_decoder") or {} if config.exists() else {}
    for index, token in declared.items():
        name = token["content"]
        if name in vocabulary and str(vocabulary[name]) != index:
            raise UserError(
                f"{config}: added_tokens_decoder: {name!r} has id {index}, but {vocabulary[name]} in {TOKENIZER}"
            )


def _check_texts(tokenizer: transformers.PreTrainedTokenizerBase, directory: pathlib.Path) -> None:
    """Raise UserError unless texts have tokens, and different texts different ones."""
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer

    def encode() -> list[list[int]]:
        # One by one: what fills up or cuts batches does not count here.
        backend.no_padding()
        backend.no_truncation()
        return [backend.encode(text, add_special_tokens=False).ids for text in _CHARACTERS]

    owner: dict[tuple[int, ...], str] = {}
    encoded = _guarded(encode, f"{directory}: the tokenizer fails")
    for text, ids in zip(_CHARACTERS, encoded, strict=True):
        if not ids:
            raise UserError(f"{directory}: the tokenizer makes no token of {text!r}, so scores would not depend on it")
        if (other := owner.setdefault(tuple(ids), text)) != text:
            raise UserError(
                f"{directory}: the tokenizer makes the same tokens {ids} of {other!r} and {text!r}; expected "
                "different ids"
            )


def _renamed(source: pathlib.Path, target: pathlib.Path, description: dict[str, Any], marker: str) -> pathlib.Path:
    """A copy of the tokenizer's files in which a reserved token has the marker's name; source itself if it has none."""
    beside = {name: read_object(source / name, repeats=True) for name in _BESIDE if (source / name).is_file()}
    config = beside.setdefault(CONFIG, {})
    template = json.dumps(config.get("chat_template") or "", ensure_ascii=False)
    if (source / TEMPLATE).is_file():
        template += (source / TEMPLATE).read_text(encoding="utf-8")
    old = reserved_tokens.reserved_token(description, {**beside.get(SPECIAL, {}), **config}, template)
    if old is None:
        return source
    target.mkdir()
    described = reserved_tokens.renamed(description, old, marker)
    (target / TOKENIZER).write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    for name, value in beside.items():
        new = reserved_tokens.replaced(value, old, marker)
        if name == CONFIG:
            new[reserved_tokens.RENAMED_FROM] = old
        (target / name).write_text(json.dumps(new, ensure_ascii=False, indent=2), encoding="utf-8")
    if (source / TEMPLATE).is_file():
        shutil.copy(source / TEMPLATE, target / TEMPLATE)
    return target
