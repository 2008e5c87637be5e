"""Requests/s of `serve` and of `vllm serve` on one PRM: the same /pooling requests to both, in turns; answers compared.

    python bench/serving_vllm.py --vllm=DIRECTORY/bin/vllm --rounds=5 --output=serving_vllm.json

bench/vllm_environment.sh makes the environment. The PRM has random weights, four layers 256 wide, in float32, and the
tokenizer of the arithmetic world. Two loads, new solutions in every round: whole solutions, each a request; and a
search, in which each client sends a solution again after every step.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import common
import serving

Ids = list[int]
_LENGTH = 1024


def export_random(directory: pathlib.Path) -> int:
    """Export the PRM; the id of its marker."""
    import jax
    import networks

    from cfprm_jax import synthetic
    from cfprm_jax.config import EncodingConfig
    from cfprm_jax.data.encoding import load_tokenizer, marker_id
    from cfprm_jax.huggingface import loading
    from cfprm_jax.models.config import PRMConfig
    from cfprm_jax.models.parameters import init_params

    world = synthetic.materialise(directory.parent / "world", 0, synthetic.WorldConfig(train_problems=2))
    vocabulary = loading.read_config(world.model)[0].vocab_size
    config = PRMConfig(networks.small_backbone(vocabulary, 256, 4))
    tokenizer, encoding = load_tokenizer(world.model), EncodingConfig(max_length=_LENGTH, system_prompt="")
    params = init_params(config, jax.random.key(0))
    loading.export(directory, params, config, tokenizer, encoding, format="process_reward_model", dtype="float32")
    return marker_id(tokenizer, encoding.marker)


def tokenised(directory: pathlib.Path, marker: int, count: int, steps: int, seed: int) -> list[list[Ids]]:
    """Of each solution its token ids after every step."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found = []
    for question, lines in serving.problems(count, steps, seed):
        ids, prefixes = list(tokenizer(question).input_ids), []
        for line in lines:
            ids = [*ids, *tokenizer(line).input_ids, marker]
            prefixes.append(ids)
        found.append(prefixes)
    return found


@contextlib.contextmanager
def running(command: Sequence[str], port: int, environment: dict[str, str], log: pathlib.Path) -> Iterator[None]:
    """A server until the end of the block."""
    with log.open("w") as output:
        server = subprocess.Popen(list(command), stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
        try:
            deadline = time.monotonic() + 600
            while True:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-4000:]}")
                try:
                    serving.ask(("127.0.0.1", port), "/pooling", {"input": "x"})
                except ConnectionRefusedError:
                    time.sleep(0.2)
                    continue
                except RuntimeError:  # no marker in the input, an answer all the same
                    pass
                break
            yield
        finally:
            server.terminate()
            server.wait(120)


def requests_per_second(port: int, clients: int, jobs: Sequence[Sequence[Ids]], found: list[float]) -> float:
    """Send the requests of each job one after another, several jobs at once; found gets the scores, in their order."""

    def one(job: Sequence[Ids]) -> list[float]:
        scores = []
        for ids in job:
            body = {"model": "bench", "task": "token_classify", "input": ids}
            answer = serving.ask(("127.0.0.1", port), "/pooling", body)["data"][0]["data"]
            scores += [pair[1] for pair in answer]
        return scores

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        started = time.monotonic()
        results = list(pool.map(one, jobs))
        seconds = time.monotonic() - started
    for scores in results:
        found += scores
    return sum(map(len, jobs)) / seconds


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("CFPRM_JAX_VLLM", "vllm"))
    parser.add_argument("--rounds", type=common.positive, default=5)
    parser.add_argument("--clients", type=common.positive, default=8)
    parser.add_argument("--solutions", type=common.positive, default=64, help="whole solutions a round")
    parser.add_argument("--searches", type=common.positive, default=16, help="solutions sent step by step a round")
    parser.add_argument("--steps", type=common.positive, default=12)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = pathlib.Path(scratch) / "bench"
        marker = export_random(directory)
        sizes = (options.solutions, options.searches)
        rounds = [
            [tokenised(directory, marker, size, options.steps, 2 * number + kind) for kind, size in enumerate(sizes)]
            for number in range(options.rounds + 1)
        ]
        ports = {"serve": serving.free_port(), "vllm": serving.free_port()}
        ours = [sys.executable, "-m", "cfprm_jax.serve", f"--model={directory}", "--served_model_name=bench"]
        theirs = [options.vllm, "serve", str(directory), "--runner=pooling", "--dtype=float32"]
        theirs += ["--served-model-name=bench", "--host=127.0.0.1", "--gpu-memory-utilization=0.1"]
        theirs += ["--pooler-config", json.dumps({"pooling_type": "STEP", "step_tag_id": marker})]
        # Both may use all cores.
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        for name, command in (("serve", [*ours, "--dtype=float32"]), ("vllm", theirs)):
            log = pathlib.Path(scratch) / f"{name}.log"
            stack.enter_context(running([*command, f"--port={ports[name]}"], ports[name], environment, log))
        scores: dict[str, list[float]] = {name: [] for name in ports}
        figures = {}
        for kind, load in enumerate(("whole solutions", "search")):
            lists = [[[prefixes[-1]] for prefixes in each[0]] if kind == 0 else each[1] for each in rounds]
            for port in ports.values():  # compiles; not measured
                requests_per_second(port, options.clients, lists[-1], [])
            of_round = {name: iter(lists) for name in ports}

            def side(name: str, given: Iterator[list[list[Ids]]]) -> float:
                return requests_per_second(ports[name], options.clients, next(given), scores[name])

            sides = {name: (lambda name=name, given=given: side(name, given)) for name, given in of_round.items()}
            rates = common.take_turns(sides, options.rounds)
            ratios = [a / b for a, b in zip(rates["serve"], rates["vllm"], strict=True)]
            figures[load] = {
                "tokens_a_request": statistics.mean(len(ids) for each in lists for job in each for ids in job),
                "requests_a_round": sum(map(len, lists[0])),
                "requests_per_second": rates,
                "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
            }
            print(json.dumps({load: figures[load]}, indent=1), flush=True)
        worst = max(abs(a - b) for a, b in zip(scores["serve"], scores["vllm"], strict=True))
        print(f"largest difference of {len(scores['serve']):,} scores: {worst:.2g}; load {os.getloadavg()}")
    common.write_json(
        options.output, "uvicorn", "starlette", figures=figures, largest_difference=worst, options=vars(options)
    )


if __name__ == "__main__":
    common.run_main(main)
