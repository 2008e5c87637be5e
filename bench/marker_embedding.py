"""A copy of a model whose marker has the embedding of the text that separates steps.

    python bench/marker_embedding.py --model=DIRECTORY --output_dir=DIRECTORY

Reserved tokens have embeddings that were never trained. A run that trains the embedding learns the marker's; with
--frozen_layers it keeps it, and what the layers above read at the markers is what the frozen ones made of that vector.
The separator in whose place the marker stands is a token that they know. Nothing else of the files changes.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys

from cfprm_jax import flags
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.safetensors_files import DTYPES, StoredTensor, list_directory
from cfprm_jax.model_directory.tokenizer_files import MARKER, load_tokenizer, marker_id
from cfprm_jax.options import Options, option

_TABLES = ("model.embed_tokens.weight", "embed_tokens.weight")


@dataclasses.dataclass(frozen=True)
class MarkerConfig(Options):
    """Where the model is, and what the marker begins as."""

    model: str = option("", "Hugging Face directory.")
    output_dir: str = option("", "Directory of the copy, which must not exist.")
    marker: str = option(MARKER, "Text of the marker.")
    step_separator: str = option("\n\n", "A text that is one token of the model.")


def table_of(directory: pathlib.Path) -> StoredTensor:
    """The input embedding of a directory."""
    tensors = {tensor.name: tensor for tensor in list_directory(directory).tensors}
    for name in _TABLES:
        if name in tensors:
            return tensors[name]
    raise UserError(f"{directory}: expected a tensor {' or '.join(_TABLES)}")


def main(config: MarkerConfig) -> int:
    """Copies the directory, then writes one row of its table."""
    source, target = pathlib.Path(config.model), pathlib.Path(config.output_dir)
    table = table_of(source)
    tokenizer = load_tokenizer(source, config.marker, table.shape[0])
    separator = tokenizer.encode(config.step_separator, add_special_tokens=False)
    if len(separator) != 1:
        raise UserError(f"--step_separator={config.step_separator!r}: expected one token, found {len(separator)}")
    marker = marker_id(tokenizer, config.marker)
    if target.exists():
        raise UserError(f"{target}: exists")
    shutil.copytree(source, target)
    (row,) = [rows[0].copy() for _, rows in table.chunks(separator[0], separator[0] + 1)]
    copied = table_of(target)
    with copied.file.open("r+b") as file:
        file.seek(copied.offset + marker * DTYPES[copied.dtype].itemsize * copied.shape[1])
        file.write(row.tobytes())
    print(f"token {marker} has the embedding of token {separator[0]}, {config.step_separator!r}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(MarkerConfig, main))
