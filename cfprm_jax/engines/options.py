"""Where a policy runs: flags, and the engine that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import transformers

from cfprm_jax.config import LONGEST_WAIT, DeviceConfig
from cfprm_jax.data.formats.files import expand
from cfprm_jax.engines.batch import BatchEngine
from cfprm_jax.engines.engine import Engine, open_tokenizer
from cfprm_jax.engines.local import LocalEngine
from cfprm_jax.engines.protocol import NEUTRAL
from cfprm_jax.engines.server import ServerEngine
from cfprm_jax.errors import UserError
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.inference.sampler import Sampler, Sampling
from cfprm_jax.options import Options, option, refuse_unused
from cfprm_jax.runtime import output_paths
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class EngineConfig(Options):
    """Policies that run elsewhere.

    --model then names a directory with their config.json and tokenizer.
    """

    engine: str = option(
        "",
        "Server with OpenAI's completions API, http://HOST:PORT/v1, such as vLLM or SGLang; empty samples in this "
        "process.",
    )
    engine_model: str = option("", "Name of the policy in requests; empty is the only model of the server.")
    concurrency: int = option(64, "--engine: number of concurrent requests.", lower=1, upper=1 << 12)
    request_seconds: float = option(600.0, "--engine: timeout in seconds of a reply.", lower=0.1, upper=LONGEST_WAIT)
    request_retries: int = option(
        5, "--engine: number of retries of a request, with exponential backoff.", lower=0, upper=1000
    )
    omit_neutral: bool = option(
        False,
        "Leave top_k, min_p and repetition_penalty out of requests where they would change nothing, for servers that "
        "refuse these fields; vLLM and SGLang then take them from the model's generation_config.json.",
    )
    write_requests: str = option(
        "", "Write the requests that --completions lacks into this file in batch format, in place of sampling."
    )
    completions: tuple[str, ...] = option((), "Files with the results of all requests written so far.", kind="list")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine and (self.write_requests or self.completions):
            raise UserError("--engine samples at once, --write_requests and --completions work with files: give one")
        if not self.engine:
            refuse_unused(self, ["concurrency", "request_seconds", "request_retries"], "policies behind --engine")
        if not self.elsewhere:
            names = ["engine_model", "omit_neutral"]
            refuse_unused(self, names, "policies elsewhere: --engine, --write_requests or --completions")

    def check_shard(self, shard: str) -> None:
        """UserError where all shares would write their requests into one file."""
        if shard and self.write_requests:
            raise UserError("--write_requests writes the requests of all questions: leave out --shard")

    def check_sampling(self, config: Options) -> None:
        """UserError where a command's options of sampling in this process are set, and the policy is elsewhere."""
        if self.elsewhere:
            purpose = "sampling in this process, not by --engine, --write_requests or --completions"
            refuse_unused(config, ["batch_rows", "dtype"], purpose)

    def check_requests(self, **inputs: Iterable[pathlib.Path]) -> None:
        """UserError where --write_requests would replace a file that is read, or the output.

        Args:
          inputs: the files of each other flag.
        """
        if self.write_requests:
            completions = expand(self.completions, "completions") if self.completions else ()
            own = {"completions": [file.path for file in completions]}
            output_paths.require_no_input("--write_requests", self.write_requests, **inputs, **own)

    @property
    def batch(self) -> bool:
        """Whether rollouts come from files."""
        return bool(self.write_requests or self.completions)

    @property
    def kind(self) -> str:
        """What completions depend on: completions of equal kind may be appended to one file, wherever they are made."""
        if not self.elsewhere:
            return "this process"
        # Without the neutral fields a server's defaults count; earlier versions never sent them.
        return "requests" if self.omit_neutral else f"requests with {', '.join(NEUTRAL)}"

    @property
    def elsewhere(self) -> bool:
        """Whether the policy does not run in this process."""
        return bool(self.engine) or self.batch


class Opened(NamedTuple):
    """An engine, and what turns texts into its tokens.

    Attributes:
      longest: most tokens of a sequence, and the key of config.json that bounds them.
      text: lines that describe it.
    """

    engine: Engine
    tokenizer: transformers.PreTrainedTokenizerBase
    longest: tuple[int, str]
    text: str


def open_server(config: EngineConfig, sampling: Sampling, log: Callable[[str], None]) -> ServerEngine:
    """The policy of --engine.

    Raises:
      UserError: no server there, or no such model.
    """
    return ServerEngine(
        config.engine,
        config.engine_model,
        sampling,
        concurrency=config.concurrency,
        seconds=config.request_seconds,
        retries=config.request_retries,
        omit_neutral=config.omit_neutral,
        log=log,
    )


@contextlib.contextmanager
def opened(
    config: EngineConfig,
    model: str,
    sampling: Sampling,
    *,
    device: DeviceConfig,
    batch_rows: int,
    dtype: str,
    log: Callable[[str], None],
) -> Iterator[Opened]:
    """The engine that flags name; devices are looked for only where it samples in this process.

    Raises:
      UserError: no such model, engine, or files.
    """
    if config.elsewhere:
        tokenizer, longest = open_tokenizer(model)
        engine: Engine
        if config.engine:
            engine = open_server(config, sampling, log)
            text = f"model       {engine.name} at {config.engine}, {config.concurrency} requests at once"
        else:
            engine = BatchEngine(config.engine_model or model, sampling, config.completions, config.omit_neutral, log)
            text = f"model       {engine.name}, by files of requests and completions"
        yield Opened(engine, tokenizer, longest, text)
        return
    with session.opened(device, log) as (_, mesh):
        policy = open_policy(model, dtype, mesh)
        sampler = Sampler(policy, sampling, batch_rows, mesh)
        text = (
            f"model       {model}, {policy.config.dtype}, end-of-turn tokens {', '.join(map(str, policy.stops))}\n"
            f"rows        {sampler.rows} in parallel"
        )
        yield Opened(LocalEngine(model, policy, sampler), policy.tokenizer, policy.config.backbone.longest, text)
