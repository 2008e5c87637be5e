"""The server of step scores, from its options to its end."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import os
from collections.abc import Callable

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference.load import encoding_of, limited, open_configured, require_one_prm
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.runtime import devices
from cfprm_jax.serving.options import TOKEN_VARIABLE, ServeConfig
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class ServeSummary:
    """What a server did.

    Attributes:
      batches: number of scored batches.
      requested, computed, reused: tokens of all requests, those that the network computed, and cached ones.
      failed: whether the worker ended by an error.
    """

    batches: int
    requested: int
    computed: int
    reused: int
    failed: bool


def serve(config: ServeConfig, log: Callable[[str], None]) -> ServeSummary:
    """Serves until SIGTERM or Ctrl-C, then drains.

    Args:
      log: receives lines about devices, model and address.

    Raises:
      UserError: invalid options, a package of the extra is missing, or the address is in use.
    """
    require_one_prm(config.model, config.checkpoint)
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install '.[serve]'")
    # Imported here, because they are of the extra.
    from cfprm_jax.serving.app import Limits, Service
    from cfprm_jax.serving.batching import BatchPolicy
    from cfprm_jax.serving.server import Server, address_of, listen

    model = local_directory(config.model) if config.model else config.checkpoint
    encoding = encoding_of(model, config.encoding, config.step_separator)
    token = config.api_key or os.environ.get(TOKEN_VARIABLE, "")
    with session.opened(config.device) as (chosen, mesh), listen(config.host, config.port) as listener:
        log(f"devices     {devices.describe(chosen)}")
        opened = open_configured(model, config, mesh, log=lambda line: log(f"checkpoint  {line}"))
        loaded = limited(opened, config.max_length)
        scorer = PrefixScorer(loaded, config.prefix_cache_tokens, config.batch_tokens, mesh)
        step = loaded.meta.get("step")
        log(
            f"model       {model}{'' if step is None else f', step {step:,}'}, {loaded.config.dtype}, up to "
            f"{loaded.encoding.max_length:,} tokens a solution\n"
            f"encoding    {encoding.name} ({encoding.reason})\n"
            f"cache       {config.prefix_cache_tokens:,} tokens, {scorer.cache_bytes / 2**30:,.2f} GiB"
        )
        shapes = scorer.compile(config.warmup)
        log(f"compiled    {shapes} shapes of a batch")
        service = Service(
            config.served_model_name or config.model or config.checkpoint,
            loaded,
            scorer,
            policy=BatchPolicy(config.batch_tokens, config.max_wait_ms / 1000),
            limits=Limits(config.max_queue, config.max_body_bytes, sequences=config.max_solutions),
            token=token,
        )
        if not token and not _is_loopback(config.host):
            log(
                f"note        anyone who reaches {config.host} may use the server: --api_key or {TOKEN_VARIABLE} sets "
                "a token"
            )
        log(f"listening   {address_of(listener, config.host)} as {service.name!r}; SIGTERM or Ctrl-C drains")
        Server(service, config.drain_seconds).run(sockets=[listener])
        service.close(config.drain_seconds)
    counts = scorer.counts
    return ServeSummary(
        batches=service.worker.batches,
        requested=counts.requested,
        computed=counts.computed,
        reused=counts.reused,
        failed=service.worker.failure is not None,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
