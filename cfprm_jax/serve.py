"""python -m cfprm_jax.serve: a server of step scores."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import importlib.util
import ipaddress
import os
import sys
from typing import ClassVar

from cfprm_jax import flags
from cfprm_jax.config import (
    ATTENTIONS,
    CHECKPOINT_HELP,
    DTYPE_HELP,
    ENCODING_HELP,
    ENCODINGS,
    LONGEST_WAIT,
    MOST_COUNT,
    MOST_TOKENS,
    STEP_SEPARATOR_HELP,
    DeviceConfig,
)
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference.load import encoding_of, limited, open_prm
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import devices
from cfprm_jax.sharding import session

_TOKEN = "CFPRM_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServeConfig(Options):
    """Serve step scores over HTTP.

    python -m cfprm_jax.serve --checkpoint=RUN --port=8000

    Routes: /v1/steps (a question and steps), /pooling and /classify as vLLM's, OpenR's worker protocol, /v1/models,
    /health and /metrics (docs/guide/serve.md). Needs the extra: pip install "cfprm-jax[serve]".
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "host", "port", "api_key"),
        *("max_length", "prefix_cache_tokens", "batch_tokens", "max_wait_ms", "platform"),
    )

    model: str = option("", "Hugging Face directory of a PRM, or its name on the hub. Exclusive with --checkpoint.")
    checkpoint: str = option("", CHECKPOINT_HELP)
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces.")
    port: int = option(8000, "Port to listen on; 0 selects a free one.", lower=0, upper=65535)
    api_key: str = option(
        "", f"Bearer token that requests must carry; empty is the environment variable {_TOKEN}, if set."
    )
    served_model_name: str = option("", "Name of the model in requests; empty is what --model or --checkpoint names.")
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", STEP_SEPARATOR_HELP)
    dtype: str = option("auto", DTYPE_HELP, choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", "Attention implementation for tokens without a cached prefix.", choices=ATTENTIONS)
    max_length: int = option(
        0,
        "Maximum length of a solution in tokens. 0 is the maximum of training.",
        lower=8,
        upper=MOST_TOKENS,
        also=0,
    )
    prefix_cache_tokens: int = option(
        65536,
        "Capacity in tokens of the cache of keys and values; the least recently used are evicted first. 0 is no cache.",
        lower=0,
        upper=MOST_COUNT,
    )
    batch_tokens: int = option(8192, "Maximum number of tokens per batch.", lower=1, upper=MOST_TOKENS)
    max_wait_ms: float = option(
        5.0, "Maximum time in milliseconds that a request waits for others to fill a batch.", lower=0.0, upper=60000.0
    )
    max_queue: int = option(256, "Maximum number of waiting requests; more get status 429.", lower=1, upper=1 << 20)
    max_body_bytes: int = option(
        16 << 20, "Maximum size in bytes of the body of a request.", lower=1 << 10, upper=1 << 32
    )
    max_solutions: int = option(4096, "Maximum number of solutions per request.", lower=1, upper=MOST_COUNT)
    drain_seconds: int = option(
        60, "Timeout in seconds for finishing requests after SIGTERM.", lower=1, upper=LONGEST_WAIT
    )
    warmup: bool = option(
        False, "Compile every shape of a batch before listening; later starts find them in the compile cache."
    )
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: ServeConfig) -> int:
    """Runs the command."""
    if bool(config.model) == bool(config.checkpoint):
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'serve needs {", ".join(missing)}: pip install "cfprm-jax[serve]"')
    from cfprm_jax.serving.app import Limits, Service  # the extra
    from cfprm_jax.serving.batching import BatchPolicy
    from cfprm_jax.serving.server import Server, listen

    model = local_directory(config.model) if config.model else config.checkpoint
    encoding = encoding_of(model, config.encoding, config.step_separator)
    token = config.api_key or os.environ.get(_TOKEN, "")
    with session.opened(config.device) as (chosen, mesh), listen(config.host, config.port) as listener:
        print(f"devices     {devices.describe(chosen)}", flush=True)
        opened = open_prm(
            model,
            config.dtype,
            config.attention,
            mesh,
            encoding=encoding.name,
            step_separator=config.step_separator,
            log=_log_of_checkpoint,
        )
        loaded = limited(opened, config.max_length)
        scorer = PrefixScorer(loaded, config.prefix_cache_tokens, config.batch_tokens, mesh)
        step = loaded.meta.get("step")
        print(
            f"model       {model}{'' if step is None else f', step {step:,}'}, {loaded.config.dtype}, up to "
            f"{loaded.encoding.max_length:,} tokens a solution\n"
            f"encoding    {encoding.name} ({encoding.reason})\n"
            f"cache       {config.prefix_cache_tokens:,} tokens, {scorer.cache_bytes / 2**30:,.2f} GiB",
            flush=True,
        )
        shapes = scorer.compile(config.warmup)
        print(f"compiled    {shapes} shapes of a batch", flush=True)
        service = Service(
            config.served_model_name or config.model or config.checkpoint,
            loaded,
            scorer,
            policy=BatchPolicy(config.batch_tokens, config.max_wait_ms / 1000),
            limits=Limits(config.max_queue, config.max_body_bytes, sequences=config.max_solutions),
            token=token,
        )
        port = listener.getsockname()[1]
        if not token and not _is_loopback(config.host):
            print(
                f"note        anyone who reaches {config.host} may use the server: --api_key or {_TOKEN} sets a token"
            )
        print(f"listening   http://{config.host}:{port} as {service.name!r}; SIGTERM or Ctrl-C drains", flush=True)
        Server(service, config.drain_seconds).run(sockets=[listener])
        service.close(config.drain_seconds)
    counts = scorer.counts
    print(
        f"done        {service.worker.batches:,} batches, {counts.requested:,} tokens: {counts.computed:,} computed, "
        f"{counts.reused:,} cached"
    )
    return 0 if service.worker.failure is None else 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _log_of_checkpoint(line: str) -> None:
    print(f"checkpoint  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(flags.run(ServeConfig, main))
