"""A server under load: many clients, some of which leave in the middle; every answer checked, memory watched.

    python bench/serving.py --model=DIRECTORY --seconds=120 --clients=64 --output=serving.json

The server is a process of its own. Each client requests step scores of random solutions, step by step as a search does,
and compares them with those that the server gave before, when it was quiet. serving_vllm.py compares it with vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import common

TOLERANCE = 1e-5
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven"]


def problems(count: int, steps: int, seed: int = 0) -> list[tuple[str, list[str]]]:
    """Questions with a solution each, of random arithmetic."""
    generator = random.Random(seed)

    def line() -> str:
        return "+".join(generator.choice(_WORDS) for _ in range(generator.randint(3, 9)))

    return [(f"start={line()}", [f"{line()}={generator.choice(_WORDS)}" for _ in range(steps)]) for _ in range(count)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def ask(address: tuple[str, int], path: str, body: Any) -> Any:
    """One POST; RuntimeError unless its status is 200."""
    connection = http.client.HTTPConnection(*address, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {content[:300]!r}")
        return json.loads(content)


def leave(address: tuple[str, int], body: Any) -> None:
    """Send a request and close the connection without its answer."""
    content = json.dumps(body).encode()
    with socket.create_connection(address) as raw:
        raw.sendall(f"POST /v1/steps HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)


def resident(process: int) -> int:
    """Bytes of memory of a process."""
    pages = pathlib.Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Load:
    """Clients for some seconds.

    Attributes:
      latencies: seconds of each answered request.
      wrong: answers that differ from the reference; errors: requests without an answer; left: requests given up.
    """

    def __init__(self, address: tuple[str, int], given: list, wanted: list[list[float]], kills: float) -> None:
        self._address, self._given, self._wanted, self._kills = address, given, wanted, kills
        self.latencies: list[float] = []
        self.wrong, self.errors, self.left = 0, list[str](), 0

    def client(self, seed: int, end: float) -> None:
        """Searches: a solution, scored again after every step."""
        generator = random.Random(seed)
        while time.monotonic() < end:
            number = generator.randrange(len(self._given))
            question, steps = self._given[number]
            for kept in range(1, len(steps) + 1):
                if time.monotonic() >= end:
                    return
                body = {"question": question, "steps": steps[:kept]}
                if generator.random() < self._kills:
                    leave(self._address, body)
                    self.left += 1
                    break
                started = time.monotonic()
                try:
                    scores = ask(self._address, "/v1/steps", body)["scores"]
                except (OSError, RuntimeError, http.client.HTTPException) as error:
                    self.errors.append(str(error))
                    continue
                self.latencies.append(time.monotonic() - started)
                same = zip(scores, self._wanted[number], strict=False)
                self.wrong += len(scores) != kept or any(abs(a - b) > TOLERANCE for a, b in same)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=common.positive, default=64)
    parser.add_argument("--kills", type=float, default=0.1, help="share of requests whose client leaves")
    parser.add_argument("--questions", type=common.positive, default=200)
    parser.add_argument("--steps", type=common.positive, default=8)
    parser.add_argument("--cache", type=int, default=16384)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "cfprm_jax.serve", f"--model={options.model}", f"--port={port}", "--dtype=float32"]
    command += ["--served_model_name=bench", f"--prefix_cache_tokens={options.cache}", "--max_queue=1024"]
    server = subprocess.Popen(command)
    address = ("127.0.0.1", port)
    try:
        given = problems(options.questions, options.steps)
        while True:
            try:
                ask(address, "/v1/steps", {"question": given[0][0], "steps": given[0][1]})
                break
            except ConnectionRefusedError:
                if server.poll() is not None:
                    raise SystemExit("the server ended") from None
                time.sleep(0.2)
        wanted = [ask(address, "/v1/steps", {"question": q, "steps": steps})["scores"] for q, steps in given]
        load = Load(address, given, wanted, options.kills)
        started = time.monotonic()
        end = started + options.seconds
        threads = [threading.Thread(target=load.client, args=(seed, end)) for seed in range(options.clients)]
        for thread in threads:
            thread.start()
        memory = []
        while any(thread.is_alive() for thread in threads):
            memory.append(resident(server.pid))
            time.sleep(min(2.0, options.seconds / 20))
        seconds = time.monotonic() - started
        latencies = sorted(load.latencies)
        figures: dict[str, Any] = {
            "requests": len(latencies),
            "requests_per_second": len(latencies) / seconds,
            "median_ms": 1000 * latencies[len(latencies) // 2],
            "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
            "left": load.left,
            "errors": len(load.errors),
            "wrong": load.wrong,
            "memory_mb": [round(size / 1e6, 1) for size in memory],
        }
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(120)
    figures["status"] = status
    shown = {name: value for name, value in figures.items() if name != "memory_mb"}
    early, late = figures["memory_mb"][len(figures["memory_mb"]) // 3], figures["memory_mb"][-1]
    print(json.dumps(shown | {"memory_mb_after_a_third": early, "memory_mb_at_the_end": late}, indent=1))
    for error in load.errors[:5]:
        print(error)
    common.write_json(options.output, "jax", "uvicorn", "starlette", figures=figures, options=vars(options))


if __name__ == "__main__":
    common.run_main(main)
