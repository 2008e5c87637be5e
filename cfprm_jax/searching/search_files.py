"""Searches solutions for files of questions with a policy and a PRM."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import transformers
from jax.sharding import Mesh

from cfprm_jax.checkpoints.saving import require_prm_directory
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.question_files import QuestionRow, read_question_files
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.engines.engine import PrefixEncoder, open_tokenizer
from cfprm_jax.engines.options import open_server
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts
from cfprm_jax.inference.candidates import encode_prompts, question_fields
from cfprm_jax.inference.load import limited, open_configured
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.inference.row_file import open_rows
from cfprm_jax.inference.rows import decimals, sigmoid
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.runtime import config_files, devices, digests, output_paths
from cfprm_jax.runtime.progress import ProgressLine
from cfprm_jax.searching.methods import Cost, Found, SearchOptions, StepPolicy, StepReward, search
from cfprm_jax.searching.options import SearchConfig
from cfprm_jax.searching.rewards import PRMReward, ServerReward
from cfprm_jax.searching.server_policy import ServerPolicy
from cfprm_jax.searching.step_sampler import StepSampler
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class SearchSummary:
    """Result of a search.

    Attributes:
      questions: rows that this call wrote.
      fewer: of those, questions with fewer solutions than n.
      split: counts of the solutions that were found.
      separator: between steps.
      cost: the sum over these questions.
      seconds: time of the search, without loading.
    """

    questions: int
    fewer: int
    split: SplitCounts
    separator: str
    cost: Cost
    seconds: float


def search_files(config: SearchConfig, log: Callable[[str], None]) -> SearchSummary | None:
    """Searches solutions of the questions and writes them to config.output; None if it was complete.

    Args:
      log: receives lines about devices, policy, reward and questions.

    Raises:
      UserError: invalid options or questions. Rows written before remain in OUTPUT.partial and can be resumed.
    """
    for name in ("model", "reward", "questions", "output"):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    if config.method in ("beam", "dvts") and config.n % config.beam_width:
        raise UserError(f"--n={config.n} is not a multiple of --beam_width={config.beam_width}")
    if config.engines.batch:
        raise UserError(
            "--write_requests and --completions are not for search: each request depends on earlier replies"
        )
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    files = expand(config.questions, "questions")
    config = dataclasses.replace(config, model=local_directory(config.model))
    questions = read_question_files(config.questions)
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)]),
        "reward": config.reward if config.remote else parts.model_fingerprint(_existing(config.reward)),
        "questions": digests.of_paths([file.path for file in files]),
    }
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(config.output, config.resume, config_files.as_dict(config), fingerprint) as output,
    ):
        if output.complete:
            return None
        log(f"devices     {devices.describe(chosen)}")
        output.require("kind of engine", config.engines.kind)
        policy = _open_policy(config, mesh, log)
        if policy.served is not None:
            output.require("policy", policy.served)
        prompts = encode_prompts(
            questions, policy.tokenizer, policy.longest, config.max_new_tokens, config.system_prompt
        )
        reward: StepReward
        # A server does not state its own.
        parameters: dict[str, int | None] = {"policy_parameters": policy.parameters, "reward_parameters": None}
        if config.remote:
            reward = ServerReward(config.reward, os.environ.get("CFPRM_API_KEY", ""))
            separator, shown = config.separator, config.reward
            if reward.model is not None:
                output.require("reward model", reward.model)
                shown = f"{reward.model} at {config.reward}"
        else:
            loaded = limited(
                open_configured(config.reward, config, mesh, log=lambda line: log(f"checkpoint  {line}")), 0
            )
            step = loaded.meta.get("step")
            if step is not None:
                output.require("step", step)
            shown = f"{config.reward}{'' if step is None else f', step {step:,}'}"
            reward = PRMReward(PrefixScorer(loaded, config.prefix_cache_tokens, mesh=mesh))
            separator = loaded.encoding.separator
            parameters["reward_parameters"] = _size(loaded.params)
        sampler = policy.in_steps(separator)
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
        log(
            f"policy      {policy.text}\nreward      {shown}\n"
            f"search      {config.method}, n {config.n}, the score read every {config.granularity} steps\n"
            f"questions   {len(questions):,}" + (f"; {output.done:,} were done before" if output.done else "")
        )
        progress, totals, fewer, split = ProgressLine("searching"), Cost(0, 0, 0, 0, 0, 0), 0, SplitCounts()
        for number in range(output.done, len(questions)):
            question = questions[number]
            found, cost = search(prompts[number], question.question, sampler, reward, options)
            output.write(_row(question, found, {**dataclasses.asdict(cost), **parameters}, separator))
            totals = Cost(*(a + b for a, b in zip(dataclasses.astuple(totals), dataclasses.astuple(cost), strict=True)))
            for one in found:
                split.add(separator.join(one.partial.steps), one.partial.steps)
            fewer += len(found) < (1 if config.method == "greedy" else config.n)
            done = number + 1 - output.done  # by this run, whose time left it is
            text = functools.partial(_so_far, number + 1, len(questions), done, progress)
            progress.show(text, done / (len(questions) - output.done))
        progress.clear()
    return SearchSummary(len(questions) - output.done, fewer, split, separator, totals, progress.elapsed)


def _so_far(done: int, questions: int, now: int, progress: ProgressLine) -> str:
    return f"{done:,} of {questions:,} questions, {now / progress.elapsed:,.2f} questions/s"


class _Policy(NamedTuple):
    """The policy of a search.

    Attributes:
      longest: most tokens of a sequence, and the key of config.json that bounds them.
      parameters: number of them; None if it runs elsewhere.
      served: its name at the server; None if it runs in this process.
      text: describes it.
      in_steps: makes the policy that takes a step at a time, from the separator.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    longest: tuple[int, str]
    parameters: int | None
    served: str | None
    text: str
    in_steps: Callable[[str], StepPolicy]


def _open_policy(config: SearchConfig, mesh: Mesh, log: Callable[[str], None]) -> _Policy:
    """The policy of this process, or of --engine."""
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)
    engines = config.engines
    if engines.engine:
        tokenizer, longest = open_tokenizer(config.model)
        engine = open_server(engines, sampling, log)
        encoder = PrefixEncoder(tokenizer, longest[0], config.system_prompt)
        return _Policy(
            tokenizer,
            longest,
            parameters=None,
            served=engine.name,
            text=f"{engine.name} at {engines.engine}",
            in_steps=lambda separator: ServerPolicy(engine, encoder, sampling, separator, longest[0]),
        )
    policy = open_policy(config.model, config.dtype, mesh)
    return _Policy(
        policy.tokenizer,
        policy.config.backbone.longest,
        parameters=_size(policy.params),
        served=None,
        text=f"{config.model}, {policy.config.dtype}",
        in_steps=lambda separator: StepSampler(policy, sampling, config.n, separator, mesh),
    )


def _existing(path: str) -> str:
    require_prm_directory(path, f"--reward={path} is neither a directory of a PRM nor an http:// address")
    return path


def _size(params: Any) -> int:
    """Number of parameters; those that are in two places count once."""
    return sum({id(leaf): leaf.size for leaf in jax.tree.leaves(params)}.values())


def _row(question: QuestionRow, found: list[Found], cost: Mapping[str, Any], separator: str) -> dict[str, Any]:
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
        "cost": dict(cost),
    }
