"""The application on a socket, until a signal: what has come in is still answered."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from cfprm_jax.errors import UserError
from cfprm_jax.serving.app import Service


class Server(uvicorn.Server):
    """uvicorn, which drains at SIGTERM or Ctrl-C and then returns; a second Ctrl-C does not wait."""

    def __init__(self, service: Service, drain_seconds: int) -> None:
        config = uvicorn.Config(
            service.app(),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=drain_seconds,
        )
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handlers of the main thread; uvicorn's own raise the signal again, which would end the command by it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain."""
        self._service.draining = True
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
      UserError: the address is taken, is none of this machine, or is no address or name at all.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)  # clients wait for the model to load
        except OSError:
            listener.close()
            raise
    except (OSError, ValueError) as error:  # ValueError: a name that no encoding of names takes, as "a..b"
        reason = (error.strerror or error) if isinstance(error, OSError) else "no name or address of a machine"
        raise UserError(f"--host={host:.80} --port={port}: {reason}") from error
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """Where clients find it: http://host:port, an IPv6 address in brackets."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
