"""A share of a command's rows for each of several processes: by a stable hash of the question."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping

import jax

from cfprm_jax.config import DistributedConfig
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import digests, distributed

MOST = 10**5
# The ending of a file's name: .jsonl, .jsonl.gz, .gz; and no ".5" or ".5-7B" of a version.
_ENDING = r"(?:\.[A-Za-z]+)?(?:\.gz)?$"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Share number index, from 0, of count."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def owns(self, question: str) -> bool:
        """Whether the rows of a question are in this share; those of one question always are in one."""
        return self.of(question, self.count) == self.index

    @staticmethod
    def of(question: str, count: int) -> int:
        """The share, of count, of a question: by SHA-256, the same on every machine."""
        return int.from_bytes(digests.raw(question)[:8], "big") % count

    def path(self, output: str | pathlib.Path) -> pathlib.Path:
        """Where this share's part of an output goes: scored.jsonl.gz becomes scored.00002-of-00008.jsonl.gz."""
        output = pathlib.Path(output)
        name = re.sub(_ENDING, lambda ending: f".{self.index:05}-of-{self.count:05}{ending[0]}", output.name, count=1)
        return output.with_name(name)

    def beside(self, part: pathlib.Path) -> pathlib.Path:
        """Where this share's part goes, going by the name of another share's."""
        known = r"(.*)\.\d{5,6}-of-\d{5,6}(?=\.|$)"
        own = rf"\1.{self.index:05}-of-{self.count:05}"
        return part.with_name(re.sub(known, own, part.name, count=1))


def parse(text: str) -> Shard | None:
    """The share that --shard names; None for no sharing.

    Raises:
      UserError: neither empty, "auto" nor INDEX/COUNT with an index below the count.
    """
    if not text:
        return None
    if text == "auto":
        raise ValueError("auto is resolved first")
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if found is None or not int(found[1]) < int(found[2]) <= MOST:
        raise UserError(
            f"--shard={text:.80} is not INDEX/COUNT with an index from 0 to COUNT - 1 and at most {MOST:,} shares, "
            "such as 0/8; nor auto"
        )
    return Shard(int(found[1]), int(found[2]))


def resolve(text: str, environ: Mapping[str, str]) -> str:
    """--shard with "auto" replaced: the index and number of this process.

    They are those of jax.distributed where it runs, else those of a launcher's variables (see
    :func:`cfprm_jax.runtime.distributed.detect`); a process alone is 0/1. Each process computes on its own devices:
    where several see all GPUs of a node, this one takes its own. To be called before JAX initializes any device.

    Raises:
      UserError: the variables contradict themselves.
    """
    if text != "auto":
        return text
    if jax.distributed.is_initialized():
        return f"{jax.process_index()}/{jax.process_count()}"
    layout = distributed.detect(DistributedConfig(), environ)
    if layout is None:
        return "0/1"
    if layout.local_device_ids is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, layout.local_device_ids)))
    return f"{layout.process_id}/{layout.num_processes}"
