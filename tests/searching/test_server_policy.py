"""Search with a policy behind a server: its steps, stops, seeds, and what it cannot do without."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from completion_servers import serving
from tiny_runs import write_model

from cfprm_jax.engines.engine import PrefixEncoder
from cfprm_jax.engines.server import ServerEngine
from cfprm_jax.errors import UserError
from cfprm_jax.inference.sampler import Prompt, Sampling
from cfprm_jax.searching.methods import SearchOptions, search
from cfprm_jax.searching.server_policy import ServerPolicy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lm")
    write_model(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


class Digits:
    """Writes random digits, one a step, six a solution; the last ends the turn. The prompt is "q".

    Attributes:
      bodies: of the requests.
    """

    def __init__(self, tokenizer, space: str = "") -> None:
        self._tokenizer, self._space = tokenizer, space
        self.bodies: list[dict] = []

    def __call__(self, body):
        self.bodies.append(body)
        written = self._tokenizer.decode(body["prompt"]).removeprefix("q").removeprefix(self._space)
        assert written == "" or written.endswith("\n\n")
        done = written.count("\n\n")
        if self._space and body["prompt"] == self._tokenizer("q").input_ids and "stop" in body:
            return 200, self._reply("", "stop", "\n\n", 1)
        digits = np.random.default_rng(body["seed"]).integers(0, 10, 6)
        if "stop" in body and done < 5:
            return 200, self._reply(str(digits[0]), "stop", "\n\n", 2)
        steps = [str(digit) for digit in digits[: 6 - done]]
        return 200, self._reply("\n\n".join(steps), "stop", None, 2 * len(steps))

    @staticmethod
    def _reply(text, finish, stopped, tokens):
        choice = {"text": text, "finish_reason": finish, "stop_reason": stopped}
        return {"choices": [choice], "usage": {"completion_tokens": tokens}}


class Highest:
    """Rewards large digits."""

    computed = requested = calls = 0

    def score(self, question, solutions):
        assert question == "question"
        return [np.array([int(step) for step in steps], np.float32) for steps in solutions]


def policy(url, tokenizer, seed=0, max_new_tokens=64, longest=512):
    sampling = Sampling(temperature=0.7, max_new_tokens=max_new_tokens, seed=seed)
    engine = ServerEngine(url, "", sampling, concurrency=4, seconds=30, retries=0)
    return ServerPolicy(engine, PrefixEncoder(tokenizer, 512, ""), sampling, "\n\n", longest)


def begun(made, tokenizer):
    return Prompt("question", np.array(tokenizer("q").input_ids, np.int32))


@pytest.mark.parametrize("method", ["best_of_n", "beam", "dvts", "greedy"])
def test_each_method_searches(method, tokenizer) -> None:
    digits = Digits(tokenizer)
    with serving(digits) as url:
        made = policy(url, tokenizer)
        found, cost = search(
            begun(made, tokenizer), "question", made, Highest(), SearchOptions(method, n=8, width=4, max_steps=10)
        )
    assert found and all(len(one.partial.steps) == 6 and one.partial.finish == "stop" for one in found)
    assert all(one.partial.tokens == 12 for one in found)
    ranks = [int(one.partial.steps[-1]) for one in found]
    assert ranks == sorted(ranks, reverse=True)
    sent = sum(len(body["prompt"]) for body in digits.bodies)
    assert cost.policy_tokens == sent + cost.sampled_tokens
    assert (cost.discarded_tokens > 0) == (method != "best_of_n")
    assert len({body["seed"] for body in digits.bodies}) == len(digits.bodies)
    assert all("stop" not in body for body in digits.bodies) == (method == "best_of_n")


def test_the_seed_decides_the_solutions(tokenizer) -> None:
    def solutions(seed):
        with serving(Digits(tokenizer)) as url:
            made = policy(url, tokenizer, seed)
            found, _ = search(begun(made, tokenizer), "question", made, Highest(), SearchOptions("beam", n=4, width=2))
        return [one.partial.steps for one in found]

    assert solutions(0) == solutions(0) != solutions(1)


def test_white_space_before_a_step_is_no_step(tokenizer) -> None:
    with serving(Digits(tokenizer, space="\n\n")) as url:
        made = policy(url, tokenizer)
        made.begin(begun(made, tokenizer))
        made.advance()
        assert [len(row.steps) for row in made.rows] == [1] and made.rows[0].tokens == 3
        made.advance()
    assert [len(row.steps) for row in made.rows] == [2]


def test_a_solution_ends_where_no_token_is_left(tokenizer) -> None:
    digits = Digits(tokenizer)
    with serving(digits) as url:
        for limits in ({"max_new_tokens": 4}, {"longest": 1 + 2 * 3}):
            digits.bodies.clear()
            made = policy(url, tokenizer, **limits)
            made.begin(begun(made, tokenizer))
            for _ in range(3):
                made.advance()
            assert [(row.finish, len(row.steps)) for row in made.rows] == [("length", 2)]
            assert [body["max_tokens"] for body in digits.bodies] == ([4, 2] if "longest" not in limits else [6, 3])


def test_lookahead_is_greedy_and_undone(tokenizer) -> None:
    digits = Digits(tokenizer)
    with serving(digits) as url:
        made = policy(url, tokenizer)
        options = SearchOptions("beam", n=2, width=2, max_steps=3, lookahead=1)
        found, _ = search(begun(made, tokenizer), "question", made, Highest(), options)
    assert {body["temperature"] for body in digits.bodies} == {0.7, 0.0}
    assert all(len(one.partial.steps) == 6 for one in found)


def test_a_server_that_does_not_send_what_stopped_it_is_refused(tokenizer) -> None:
    def silent(body):
        choice = {"text": "1", "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 2}}

    with serving(silent) as url:
        made = policy(url, tokenizer)
        made.begin(begun(made, tokenizer))
        with pytest.raises(UserError, match='scripted: the server sends neither "stop_reason" nor "matched_stop"'):
            made.advance()
