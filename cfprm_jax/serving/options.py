"""All options of `serve`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import ATTENTIONS, LONGEST_WAIT, MOST_COUNT, MOST_TOKENS, ScoringConfig
from cfprm_jax.options import option

TOKEN_VARIABLE = "CFPRM_API_KEY"
"""Environment variable of the bearer token."""


@dataclasses.dataclass(frozen=True)
class ServeConfig(ScoringConfig):
    """Serve step scores over HTTP.

    python -m cfprm_jax.serve --checkpoint=RUN --port=8000

    Routes: /v1/steps (a question and steps), /pooling and /classify as vLLM's, OpenR's worker protocol, /v1/models,
    /health and /metrics (docs/guide/serve.md). Needs the extra: pip install '.[serve]'.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "host", "port", "api_key"),
        *("max_length", "prefix_cache_tokens", "batch_tokens", "max_wait_ms", "platform"),
    )

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces.")
    port: int = option(8000, "Port to listen on; 0 selects a free one.", lower=0, upper=65535)
    api_key: str = option(
        "", f"Bearer token that requests must carry; empty is the environment variable {TOKEN_VARIABLE}, if set."
    )
    served_model_name: str = option("", "Name of the model in requests; empty is what --model or --checkpoint names.")
    attention: str = option("auto", "Attention implementation for tokens without a cached prefix.", choices=ATTENTIONS)
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
