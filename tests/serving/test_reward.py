"""search's reward from a live server: the scores of a PRM in this process, and what a server refuses."""

from __future__ import annotations

import numpy as np
import pytest
from completion_servers import serving

from cfprm_jax.errors import UserError
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.searching.rewards import PRMReward, ServerReward


def test_a_server_gives_the_logits_of_the_prm(client, prm, solutions) -> None:
    """Of more solutions than a request may have, step by step, one of them too long and one without steps."""
    question = solutions[0][0]
    beams = [steps for q, steps in solutions if q == question]
    assert len(beams) == 8  # the server's --max_solutions
    server, own = ServerReward(f"http://127.0.0.1:{client.port}"), PRMReward(PrefixScorer(prm, 1 << 12))
    for kept in (1, 2, 30):
        asked = [steps[:kept] for steps in beams]
        for found, wanted in zip(server.score(question, asked), own.score(question, asked), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert server.calls == own.calls == 3
    assert server.computed == server.requested == own.requested > own.computed
    asked = [*beams, [], beams[0] * 40, beams[1]]
    found, wanted = server.score(question, asked), own.score(question, asked)
    assert [z is None for z in found] == [z is None for z in wanted] == [False] * 8 + [True, True, False]
    np.testing.assert_allclose(found[10], wanted[10], rtol=1e-5, atol=1e-5)


def test_refusals_are_one_line(make_service, serve, solutions) -> None:
    question, steps = solutions[0]
    with serve(make_service(token="secret")) as client:
        url = f"http://127.0.0.1:{client.port}"
        assert ServerReward(url, "secret").score(question, [steps])[0] is not None
        with pytest.raises(UserError, match=r"/v1/steps: status 401") as error:
            ServerReward(url, "wrong").score(question, [steps])
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=rf"{url}/v1/models: .*refused"):
        ServerReward(url)


def test_the_model_is_the_one_that_the_server_listed(make_service, serve, solutions) -> None:
    """A server that was started again with another model refuses the requests of a search that began with the first."""
    question, steps = solutions[0]
    with serve(make_service()) as client:
        server = ServerReward(f"http://127.0.0.1:{client.port}")
        assert server.model == "tiny" and server.score(question, [steps])[0] is not None
        client.service.name = "another"
        with pytest.raises(UserError, match=r"status 404: .*'another\\' is"):
            server.score(question, [steps])
    # One that lists none is taken without a name.
    with serving(lambda _: (200, {}), {"error": "no such route"}) as url:
        assert ServerReward(url.removesuffix("/v1")).model is None


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([[None, 1.0]], "has a score that is not finite"),
        ([[float("nan"), 1.0]], "has a score that is not finite"),
        ([[1.0, float("inf")]], "has a score that is not finite"),
        ([[[1.0], [2.0]]], "has other numbers of steps than the request"),
        ([3.0], "has other numbers of steps than the request"),
        ([[1.0]], "has other numbers of steps than the request"),
        (None, "has no logits and usage"),
    ],
)
def test_answers_that_are_no_logits(logits, message) -> None:
    """Of a server that is not ours: a null ranked its solution anywhere, and a number alone ended in a traceback."""
    answer = {"logits": logits, "usage": {"total_tokens": 3}}
    with (
        serving(lambda _: (200, answer), {"data": []}, path="/v1/steps") as url,
        pytest.raises(UserError, match=f"{url}/steps: the answer {message}"),
    ):
        ServerReward(url.removesuffix("/v1")).score("What?", [["a", "b"]])
