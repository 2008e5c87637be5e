"""All options of `prepare`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import EncodingConfig, GranularityConfig, ReadConfig
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class FilesConfig(Options):
    """Input and output files."""

    input: tuple[str, ...] = option((), "Corpora: files or glob patterns.", kind="list")
    output: str = option("", "Output file of stepwise JSON lines; compressed if its name ends in .gz.")
    report: str = option("", "JSON report; by default in the directory of the output.")
    exclude_questions: tuple[str, ...] = option(
        (), "Test sets (rows with problem or question) whose questions are excluded.", kind="list"
    )
    tokenizer: str = option("", "Tokenizer directory, for token statistics.")


@dataclasses.dataclass(frozen=True)
class PrepareConfig(Options):
    """Read labelled corpora, merge steps into windows, write stepwise JSON lines and a report.

    python -m cfprm_jax.prepare --input=CORPUS.jsonl --output=NAME.jsonl.gz

    Writes the output, NAME.report.json with counts and NAME.flags with the resolved flags. --epochs_per_granularity and
    --schedule apply to training only.
    """

    MAIN_FLAGS: ClassVar = (
        *("input", "output", "data_format", "c_max", "granularities"),
        *("neutral", "exclude_questions", "tokenizer", "max_length", "max_bad_rows"),
    )

    files: FilesConfig = dataclasses.field(default_factory=FilesConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    windows: GranularityConfig = dataclasses.field(default_factory=GranularityConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
