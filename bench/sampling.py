"""Throughput of `sample` in tokens per second, compared with transformers' generate.

    python bench/sampling.py --model=DIRECTORY --questions=FILE --output=RESULT.json

Both sides sample --num_candidates candidates of the same questions from the same float32 weights on the CPU, with the
same prompts, temperature, top-p, top-k and --max_new_tokens, in turn, --rounds times each, each in a process of its own
with --threads cores. generate is given a question at a time with num_return_sequences. Counted are the tokens of the
candidates up to their end, not the padding after it; reading weights and compiling are left out of the time on both
sides (each side first samples a few tokens of the same shapes). --small is a quick look. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from common import last_json, positive, run_main, select_devices, write_json


def ours(options: argparse.Namespace) -> dict:
    """`sample`'s own parts, in this process."""
    from cfprm_jax.config import DeviceConfig, EncodingConfig
    from cfprm_jax.data.encoding import Encoder
    from cfprm_jax.data.question_files import read_question_files
    from cfprm_jax.inference.policy import open_policy
    from cfprm_jax.inference.sampler import Prompt, Sampler, Sampling
    from cfprm_jax.sharding import rules

    mesh = rules.make_mesh(DeviceConfig(), select_devices()[:1])
    policy = open_policy(options.model, "float32", mesh)
    questions = read_question_files([options.questions])[: options.num_questions]
    encoder = Encoder(policy.tokenizer, EncodingConfig(max_length=policy.config.backbone.max_position_embeddings))
    prompts = [Prompt(q.name, encoder.encode(q.question, []).tokens) for q in questions]

    def run(seed: int) -> tuple[float, list]:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.max_new_tokens, seed)
        sampler = Sampler(policy, sampling, options.batch_rows, mesh)
        started = time.perf_counter()
        out = list(sampler.sample(prompts, options.num_candidates))
        return time.perf_counter() - started, out

    if options.compile:  # the same shapes, so that the caches of compiled programs have them
        run(options.seed)
    seconds, out = run(options.seed)
    lengths = [len(candidate.tokens) for question in out for candidate in question]
    cut = sum(candidate.finish == "length" for question in out for candidate in question)
    return {"seconds": seconds, "tokens": sum(lengths), "candidates": len(lengths), "cut": cut, "stops": policy.stops}


def generate(options: argparse.Namespace) -> dict:
    """transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cfprm_jax.config import SYSTEM_PROMPT
    from cfprm_jax.data.question_files import read_question_files

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    stops = json.loads(options.stops)
    common = {"do_sample": options.temperature > 0, "eos_token_id": stops, "pad_token_id": stops[0]}
    if options.temperature > 0:
        common |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    seconds, lengths, cut = 0.0, [], 0
    for number, question in enumerate(read_question_files([options.questions])[: options.num_questions]):
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        size = inputs["input_ids"].shape[1]
        many = {"num_return_sequences": options.num_candidates if options.temperature > 0 else 1}
        with torch.no_grad():
            if not number:
                model.generate(**inputs, **common, **many, max_new_tokens=2)
            started = time.perf_counter()
            out = model.generate(**inputs, **common, **many, max_new_tokens=options.max_new_tokens)[:, size:]
        seconds += time.perf_counter() - started
        for row in out.tolist():
            ends = [place for place, token in enumerate(row) if token in stops]
            lengths.append(ends[0] + 1 if ends else len(row))
            cut += not ends
    return {"seconds": seconds, "tokens": sum(lengths), "candidates": len(lengths), "cut": cut}


SIDES = {"ours": ours, "generate": generate}


def measured(side: str, options: argparse.Namespace, stops: str, cache: str, compiling: bool) -> dict:
    """One side in a process of its own, on --threads cores where the system can tie it to them."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(options.threads), "XLA_FLAGS": ""}
    environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, __file__, *sys.argv[1:], f"--side={side}", f"--stops={stops}"]
    return last_json([*command, "--compile"] if compiling else command, environment, options.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--num_questions", type=positive, default=2)
    parser.add_argument("--num_candidates", type=positive, default=64)
    parser.add_argument("--max_new_tokens", type=positive, default=512)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_rows", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--small", action="store_true", help="one question, 16 candidates of 24 tokens, one round")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--stops", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.num_questions, options.num_candidates, options.max_new_tokens, options.rounds = 1, 16, 24, 1
        options.batch_rows = 16
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return

    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    stops = "[]"
    with tempfile.TemporaryDirectory() as cache:
        for number in range(options.rounds):
            for side in SIDES:
                found = measured(side, options, stops, cache, compiling=side == "ours" and not number)
                stops = json.dumps(found.pop("stops")) if side == "ours" else stops
                found["tokens_per_s"] = found["tokens"] / found["seconds"]
                runs[side].append(found)
                print(f"{side:9} {json.dumps(found)}", flush=True)
    speeds = {side: [run["tokens_per_s"] for run in those] for side, those in runs.items()}
    print("\n| side | tokens/s, median | lowest | highest | tokens | cut |\n|---|---|---|---|---|---|")
    for side, those in speeds.items():
        last = runs[side][-1]
        print(
            f"| {side} | {statistics.median(those):.1f} | {min(those):.1f} | {max(those):.1f} | "
            f"{last['tokens']:,} | {last['cut']} of {last['candidates']} |"
        )
    ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["generate"])
    print(f"\nours / generate: {ratio:.2f}")
    write_json(
        options.output,
        "torch",
        "transformers",
        runs=runs,
        median_tokens_per_s={side: statistics.median(those) for side, those in speeds.items()},
        ratio=ratio,
    )


if __name__ == "__main__":
    run_main(main)
