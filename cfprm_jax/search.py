"""python -m cfprm_jax.search: solutions by search with a policy and a PRM."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import os
import pathlib
import sys
from typing import Any, ClassVar

from cfprm_jax import flags
from cfprm_jax.config import (
    AGGREGATIONS,
    ATTENTIONS,
    ENCODING_HELP,
    ENCODINGS,
    LARGEST_SEED,
    MOST_CANDIDATES,
    MOST_COUNT,
    MOST_TOKENS,
    SYSTEM_PROMPT,
    DeviceConfig,
)
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.question_files import QuestionRow, read_question_files
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference.candidates import encode_prompts, question_fields
from cfprm_jax.inference.load import encoding_of, limited, open_prm
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES, open_rows
from cfprm_jax.inference.rows import decimals, sigmoid
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files, devices, digests, output_paths
from cfprm_jax.runtime.progress import ProgressLine, duration
from cfprm_jax.searching.methods import METHODS, Cost, Found, SearchOptions, StepReward, search
from cfprm_jax.searching.rewards import PRMReward, ServerReward
from cfprm_jax.searching.step_sampler import StepSampler
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class SearchConfig(Options):
    """Search for solutions with a policy and a PRM.

    python -m cfprm_jax.search --model=POLICY --reward=RUN --questions=test.jsonl --method=beam --output=FILE.jsonl

    Writes a candidates file, the best solution first, with step_scores, tokens and the cost of each question, which bon
    reads (docs/guide/search.md).
    """

    MAIN_FLAGS: ClassVar = (
        *("model", "reward", "questions", "output", "resume"),
        *("method", "n", "beam_width", "temperature", "max_new_tokens"),
    )

    model: str = option("", "Hugging Face directory of a language model with a chat template: the policy.")
    reward: str = option("", "Run, checkpoint or Hugging Face directory of a PRM, or the http:// address of serve.")
    questions: tuple[str, ...] = option((), "Files of questions, or globs, as of sample.", kind="list")
    output: str = option("", "Candidates file to write; compressed if its name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    method: str = option(
        "beam",
        "best_of_n samples n solutions; beam keeps the best n / beam_width of n; dvts has n / beam_width separate "
        "trees; greedy keeps the best of n continuations.",
        choices=METHODS,
    )
    n: int = option(16, "Solutions under way at one time, and most that are written.", lower=1, upper=MOST_CANDIDATES)
    beam_width: int = option(4, "Continuations of each solution that is kept.", lower=1, upper=MOST_CANDIDATES)
    granularity: int = option(1, "Steps between two readings of the score.", lower=1, upper=1000)
    lookahead: int = option(0, "Greedy steps ahead of a reading, which are thrown away.", lower=0, upper=1000)
    max_steps: int = option(40, "Steps after which solutions run to their end.", lower=1, upper=10000)
    aggregation: str = option("last", "Of the step scores, for ranking.", choices=AGGREGATIONS)
    keep_duplicates: bool = option(False, "Whether solutions of equal text are kept beside each other.")
    temperature: float = option(0.8, "Logits are divided by it; 0 is greedy.", lower=1e-4, upper=100.0, also=0.0)
    top_p: float = option(1.0, "Tokens are drawn among the most probable with this mass.", lower=1e-6, upper=1.0)
    top_k: int = option(0, "Number of most probable tokens to sample from; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(2048, "Most tokens of a solution.", lower=1, upper=MOST_TOKENS)
    seed: int = option(0, "Seed of the draws.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the policy's chat template; empty is none.")
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", "Text between steps, with escapes; empty is the PRM's own, of a server \\n\\n.")
    prefix_cache_tokens: int = option(65536, "Tokens whose keys and values the PRM keeps.", lower=0, upper=MOST_COUNT)
    dtype: str = option("auto", "Type that both compute in.", choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", "Attention kernel of the PRM.", choices=ATTENTIONS)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: SearchConfig) -> int:
    """Runs the command."""
    for name in ("model", "reward", "questions", "output"):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    if config.method in ("beam", "dvts") and config.n % config.beam_width:
        raise UserError(f"--n={config.n} is not a multiple of --beam_width={config.beam_width}")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    config = dataclasses.replace(config, model=local_directory(config.model))
    remote = config.reward.startswith(("http://", "https://"))
    questions = read_question_files(config.questions)
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)], whole=False),
        "reward": config.reward if remote else digests.of_paths([_existing(config.reward)], whole=False),
        "questions": digests.of_paths([file.path for file in expand(config.questions)], whole=True),
    }
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(config.output, config.resume, config_files.as_dict(config), fingerprint) as output,
    ):
        if output.complete:
            print(f"candidates  {config.output} is already complete")
            return 0
        print(f"devices     {devices.describe(chosen)}", flush=True)
        policy = open_policy(config.model, config.dtype, mesh)
        prompts = encode_prompts(
            questions, policy.tokenizer, policy.config.backbone.longest, config.max_new_tokens, config.system_prompt
        )
        reward: StepReward
        if remote:
            reward = ServerReward(config.reward, os.environ.get("CFPRM_API_KEY", ""))
            separator = (config.step_separator or "\\n\\n").encode().decode("unicode_escape")
        else:
            encoding = encoding_of(config.reward, config.encoding, config.step_separator)
            opened = open_prm(config.reward, config.dtype, config.attention, mesh, encoding.name, config.step_separator)
            loaded = limited(opened, 0)
            reward = PRMReward(PrefixScorer(loaded, config.prefix_cache_tokens, mesh=mesh))
            separator = loaded.encoding.separator
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)
        sampler = StepSampler(policy, sampling, config.n, separator, mesh)
        options = SearchOptions(
            config.method,
            config.n,
            config.beam_width,
            config.granularity,
            config.max_steps,
            config.lookahead,
            config.aggregation,
            config.keep_duplicates,
        )
        print(
            f"policy      {config.model}, {policy.config.dtype}\nreward      {config.reward}\n"
            f"search      {config.method}, n {config.n}, the score read every {config.granularity} steps\n"
            f"questions   {len(questions):,}" + (f"; {output.done:,} were done before" if output.done else ""),
            flush=True,
        )
        progress, totals, fewer = ProgressLine("searching"), Cost(0, 0, 0, 0, 0, 0), 0
        for number in range(output.done, len(questions)):
            question = questions[number]
            found, cost = search(prompts[number], question.question, sampler, reward, options)
            output.write(_row(question, found, cost, separator))
            totals = Cost(*(a + b for a, b in zip(dataclasses.astuple(totals), dataclasses.astuple(cost), strict=True)))
            fewer += len(found) < (1 if config.method == "greedy" else config.n)
            done = number + 1
            progress.show(lambda done=done: f"{done:,} of {len(questions):,} questions", done / len(questions))  # type: ignore[misc]
        progress.clear()
    print(
        f"done        {len(questions) - output.done:,} questions in {duration(progress.elapsed)}; {fewer:,} have fewer "
        f"solutions than n\n"
        f"cost        {totals.policy_tokens:,} tokens of the policy, {totals.reward_tokens:,} of the PRM "
        f"({totals.reward_requested:,} without kept prefixes), {totals.calls:,} calls; "
        f"{totals.discarded_tokens:,} of {totals.sampled_tokens:,} sampled tokens discarded\n"
        f"candidates  {config.output}"
    )
    return 0


def _existing(path: str) -> pathlib.Path:
    if not pathlib.Path(path).is_dir():
        raise UserError(f"--reward={path} is neither a directory of a PRM nor an http:// address")
    return pathlib.Path(path)


def _row(question: QuestionRow, found: list[Found], cost: Cost, separator: str) -> dict[str, Any]:
    return {
        **question_fields(question),
        "candidates": [
            {
                "text": separator.join(one.partial.steps),
                "steps": list(one.partial.steps),
                "step_scores": None if one.logits is None else sigmoid(one.logits).tolist(),
                "step_logits": None if one.logits is None else decimals(one.logits),
                "finish": one.partial.finish or "unscored",
                "tokens": one.partial.tokens,
            }
            for one in found
        ],
        "cost": dataclasses.asdict(cost),
    }


if __name__ == "__main__":
    sys.exit(flags.run(SearchConfig, main))
