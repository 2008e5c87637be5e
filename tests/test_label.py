"""The label command, end to end: a server's policy of the synthetic world, files, kills, and bad input."""

from __future__ import annotations

import gzip
import json
import pathlib
import threading

import pytest
from completion_servers import WorldPolicy, reply, serving
from documented_keys import check as check_keys

from cfprm_jax import flags, label, prepare, sample, synthetic
from cfprm_jax.config import EstimateConfig
from cfprm_jax.data import read
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.labelling.inputs import read_solutions
from cfprm_jax.labelling.options import LabelConfig
from cfprm_jax.synthetic import judge

WORLD = synthetic.WorldConfig(
    train_problems=2, held_out_problems=4, solutions_per_problem=2, candidates_per_problem=4, review_rate=0.0
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 3, WORLD)


@pytest.fixture(scope="module")
def tokenizer(world):
    return load_tokenizer(world.model)


@pytest.fixture
def policy(tokenizer):
    return WorldPolicy(tokenizer)


def run(world, output, *arguments, source=None):
    base = [f"--input={source or world.candidates}", f"--output={output}", "--grader=exact"]
    if "--method=consensus" not in arguments:
        base += [f"--model={world.model}", "--system_prompt=", "--max_new_tokens=64"]
    if any(argument.startswith("--engine=") for argument in arguments):
        base.append("--request_retries=0")
    return flags.run(LabelConfig, label.main, ["label", *base, *arguments])


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def summary(output):
    return json.loads(output.with_name(f"{output.name.removesuffix('.jsonl')}.label.json").read_text())


def test_sweep_and_bisect_find_the_same_first_errors(world, policy, tmp_path, capsys) -> None:
    swept, cut = tmp_path / "swept.jsonl", tmp_path / "cut.jsonl"
    with serving(policy) as url:
        assert run(world, swept, f"--engine={url}", "--rollouts=16", "--nostop_at_zero") == 0
        assert run(world, cut, f"--engine={url}", "--rollouts=16", "--method=bisect") == 0
    out = capsys.readouterr().out
    assert "scripted at http://127.0.0.1" in out and "of a full sweep" in out
    questions = {row["question"]: row for row in lines(world.candidates)}
    # Mistakes last, since nothing is reviewed: counts are monotone, and 16 rollouts at 0.6 all but surely find one.
    for one, other in zip(lines(swept), lines(cut), strict=True):
        exact = list(judge.judge(judge.parse_problem(one["prompt"]), one["completions"]).labels)
        after = exact.index(0) + 1 if 0 in exact else len(exact)
        expected = exact[:after] + [None] * (len(exact) - after)
        assert one["labels"] == other["labels"] == expected
        assert one["answer"] == questions[one["prompt"]]["answer"] and one["policy"] == "scripted"
        for mine, theirs in zip(one["successes"], other["successes"], strict=True):
            assert theirs is None or theirs == mine
    full, less = summary(swept), summary(cut)
    steps = sum(len(row["completions"]) - 1 for row in lines(swept))
    assert full["rollouts_of_a_full_sweep"] == less["rollouts_of_a_full_sweep"] == 16 * steps
    # Solutions of a question share prefixes, which are rolled once.
    assert less["rollouts"] < full["rollouts"] <= 16 * steps and full["violations"] == 0
    assert full["cost_against_a_full_sweep"] == full["rollouts"] / (16 * steps)
    assert full["this_run"]["rollouts"] == full["rollouts"]
    check_keys("NAME.label.json", full)


def test_the_same_seed_gives_the_same_bytes_and_fewer_rollouts_are_the_first(world, tokenizer, tmp_path) -> None:
    requests = []
    for name, rollouts in (("a", 4), ("b", 4), ("c", 8)):
        policy = WorldPolicy(tokenizer)
        with serving(policy) as url:
            arguments = (f"--engine={url}", f"--rollouts={rollouts}", "--nostop_at_zero", f"--concurrency={rollouts}")
            assert run(world, tmp_path / f"{name}.jsonl", *arguments) == 0
        requests.append(policy.requests)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert set(requests[0]) < set(requests[2]) and len(requests[2]) == 2 * len(requests[0])
    logs = [{row["name"]: row for row in lines(tmp_path / f"{name}.rollouts.jsonl")} for name in "ac"]
    assert all(logs[1][name]["correct"][:4] == row["correct"] for name, row in logs[0].items())


def test_an_engine_that_dies_loses_nothing(world, tokenizer, tmp_path, capsys) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "output.jsonl"
    with serving(WorldPolicy(tokenizer)) as url:
        assert run(world, whole, f"--engine={url}", "--rollouts=4") == 0
    policy, lock, left = WorldPolicy(tokenizer), threading.Lock(), [60]

    def dying(body):
        with lock:
            left[0] -= 1
        return policy(body) if left[0] >= 0 else (500, b"dead")

    with serving(dying) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=4", "--concurrency=4") == 2
    error = capsys.readouterr().err
    assert "status 500: dead" in error and "--resume=auto continues" in error and error.count("\n") == 1
    assert not output.exists()
    before = lines(tmp_path / "output.rollouts.jsonl.partial")
    assert len(before) >= 12
    policy.requests.clear()
    left[0] = 10**6
    with serving(dying) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=4") == 2
        assert "is partially written" in capsys.readouterr().err
        assert run(world, output, f"--engine={url}", "--rollouts=4", "--resume=auto") == 0
    assert output.read_bytes() == whole.read_bytes()
    rolled = len(lines(tmp_path / "output.rollouts.jsonl"))
    assert len(policy.requests) == 4 * (rolled - len(before))
    assert summary(output)["rollouts"] == summary(whole)["rollouts"] == 4 * rolled


def test_files_of_requests_round_by_round(world, tokenizer, tmp_path, capsys) -> None:
    served, output = tmp_path / "served.jsonl", tmp_path / "filed.jsonl"
    policy = WorldPolicy(tokenizer)
    with serving(policy) as url:
        assert run(world, served, f"--engine={url}", "--rollouts=4", "--method=bisect") == 0
    answers: list[str] = []
    arguments = ["--rollouts=4", "--method=bisect", "--engine_model=scripted", "--resume=auto"]
    for number in range(1, 9):
        requests = tmp_path / f"requests{number}.jsonl"
        given = [f"--completions={','.join(answers)}"] if answers else []
        assert run(world, output, *arguments, f"--write_requests={requests}", *given) == 0
        if output.exists():
            break
        assert "requests    " in capsys.readouterr().out
        rows = [
            {"custom_id": row["custom_id"], "response": {"body": policy(row["body"])[1]}} for row in lines(requests)
        ]
        answers.append(str(tmp_path / f"answers{number}.jsonl"))
        pathlib.Path(answers[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 2 <= len(answers) <= 4  # ceil(log2) of at most a dozen steps
    assert output.read_bytes() == served.read_bytes()


def test_a_tree_of_every_question(world, policy, tmp_path) -> None:
    output = tmp_path / "tree.jsonl"
    questions = tmp_path / "questions.jsonl"
    rows = [{key: row[key] for key in ("id", "question", "answer")} for row in lines(world.candidates)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(policy) as url:
        assert run(world, output, f"--engine={url}", "--method=tree", "--searches=5", source=questions) == 0
        aps, values = tmp_path / "aps.jsonl", tmp_path / "values.jsonl"
        tree = (f"--engine={url}", "--method=tree", "--searches=5")
        assert run(world, aps, *tree, "--write=math_aps", source=questions) == 0
        assert run(world, values, *tree, "--write=rest_mcts", source=questions) == 0
    found = lines(output)
    assert {row["source"] for row in found} == {row["id"] for row in rows}
    assert all(len(row["completions"]) == len(row["successes"]) for row in found)
    labels = {(row["prompt"], *row["completions"]): row["successes"][-1] for row in found}
    assert len(labels) == len(found)  # every edge once
    from_trees = list(read(aps))
    assert len(from_trees) == len(found) and len(list(read(values))) > 0
    exact = [judge.judge(judge.parse_problem(key[0]), key[1:]).labels[-1] for key in labels]
    assert [int(count > 0) for count in labels.values()] == exact
    assert list(read(output, estimates=EstimateConfig(estimate="value")))


def test_consensus_with_a_judge(world, policy, tmp_path, capsys) -> None:
    rolled, kept, requests = tmp_path / "rolled.jsonl", tmp_path / "kept.jsonl", tmp_path / "requests.jsonl"
    with serving(policy) as url:
        assert run(world, rolled, f"--engine={url}", "--rollouts=16") == 0
    options = ("--method=consensus", f"--write_judge_requests={requests}")
    assert run(world, "", *options, source=rolled) == 0
    assert f"requests    16 in {requests}" in capsys.readouterr().out
    assert summary(requests)["requests"] == 16 and summary(requests)["config"]["input"] == [str(rolled)]
    results = []
    for number, (request, row) in enumerate(zip(lines(requests), lines(rolled), strict=True)):
        exact = judge.judge(judge.parse_problem(row["prompt"]), row["completions"]).labels
        verdict = exact.index(0) if 0 in exact else -1
        verdict = 0 if number % 4 == 0 and verdict else verdict
        body = {"choices": [{"message": {"content": f"So \\boxed{{{verdict}}}"}}]}
        results.append({"custom_id": request["custom_id"], "response": {"body": body}})
    verdicts = tmp_path / "verdicts.jsonl"
    verdicts.write_text("".join(json.dumps(row) + "\n" for row in results))
    assert run(world, kept, "--method=consensus", f"--judge={verdicts}", source=rolled) == 0
    share = summary(kept)
    assert share["judged"] == 16 and share["kept"] == len(lines(kept)) == sum(
        entry["rows"] for entry in share["confusion"] if entry["counts"] == entry["judge"]
    )
    assert 0 < share["kept"] < 16 and "kept        " in capsys.readouterr().out
    damaged, allowed = tmp_path / "damaged.jsonl", tmp_path / "allowed.jsonl"
    damaged.write_text("{}\n" + rolled.read_text())
    given = ("--method=consensus", f"--judge={verdicts}", "--max_bad_rows=1")
    assert run(world, allowed, *given, source=damaged) == 0
    assert "bad rows    1 skipped" in capsys.readouterr().out
    assert lines(allowed) == lines(kept) and summary(allowed)["bad_rows"][0].startswith("damaged.jsonl:1: ")
    damaged.write_text(json.dumps({**lines(rolled)[0], "labels": ["x"]}) + "\n")
    assert run(world, tmp_path / "bad.jsonl", *given[:2], source=damaged) == 2
    assert "error: damaged.jsonl:1: label 'x' is not a number" in capsys.readouterr().err
    damaged.write_text(rolled.read_text() + rolled.read_text().splitlines()[0])
    assert run(world, tmp_path / "twice.jsonl", *given[:2], source=damaged) == 2
    assert "damaged.jsonl:17: a second row called " in capsys.readouterr().err


def test_no_file_is_replaced(world, tmp_path, capsys) -> None:
    """Neither one that is there, nor an input, whatever --resume says."""
    labelled, verdicts, there = (tmp_path / f"{name}.jsonl" for name in ("labelled", "verdicts", "there"))
    labelled.write_text(json.dumps({**STEPWISE, "source": "s", "labels": [1, 0]}) + "\n")
    verdicts.write_text(json.dumps({"id": "s", "first_error": 1}) + "\n")
    there.write_text("kept")
    judging, asking = ("--method=consensus", f"--judge={verdicts}"), ("--method=consensus",)
    files = {path: path.read_text() for path in (labelled, verdicts, there)}

    def refused(message, output, *arguments):
        assert run(world, output, *arguments, source=labelled) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert {path: path.read_text() for path in files} == files

    refused(f"--output={there} already exists", there, *judging)
    refused(f"--write_judge_requests={there} already exists", "", *asking, f"--write_judge_requests={there}")
    again = "--resume=auto"
    refused(f"--output={labelled} is also a file of --input", labelled, *judging, again)
    refused(f"--output={verdicts} is also a file of --judge", verdicts, *judging, again)
    requests = f"--write_judge_requests={labelled}"
    refused(f"{requests} is also a file of --input", "", *asking, requests, again)
    # Rolling, too.
    refused(f"--output={labelled} is also a file of --input", labelled, "--engine=http://127.0.0.1:9/v1", again)
    for path, flag in ((labelled, "input"), (verdicts, "completions")):
        written = (f"--write_requests={path}", f"--completions={tmp_path}/verdict*.jsonl")
        refused(f"--write_requests={path} is also a file of --{flag}", tmp_path / "out.jsonl", *written)
    # Requests in place of the rows would be taken for them by the next round.
    output = tmp_path / "out.jsonl"
    refused(f"--write_requests={output} is also a file of --output", output, f"--write_requests={output}")
    sampled = [f"--model={world.model}", f"--questions={world.candidates}", f"--output={output}"]
    assert flags.run(sample.SampleConfig, sample.main, ["sample", *sampled, f"--write_requests={output}"]) == 2
    assert f"--write_requests={output} is also a file of --output" in capsys.readouterr().err
    assert run(world, there, *judging, again, source=labelled) == 0
    assert len(lines(there)) == 1


def test_the_prm_of_scored_rows_is_not_their_policy(world, policy, tmp_path, capsys) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(ROW) + "\n")
    beside = tmp_path / "in.jsonl.config.json"
    for of, noted in (("input", False), ("questions", True)):
        beside.write_text(json.dumps({"model": "another", "fingerprint": {"model": "x", of: "y"}}))
        output = tmp_path / f"{of}.jsonl"
        with serving(policy) as url:
            assert run(world, output, f"--engine={url}", "--rollouts=2", source=source) == 0
        assert ("note        the solutions of in.jsonl are of another" in capsys.readouterr().out) is noted
        assert (summary(output)["off_policy"] is not None) is noted


def test_prepare_takes_what_label_writes(world, policy, tmp_path) -> None:
    rolled, output = tmp_path / "rolled.jsonl", tmp_path / "labelled.jsonl"
    with serving(policy) as url:
        assert run(world, rolled, f"--engine={url}") == 0
    for estimate in ("hard", "soft", "relative", "self_denoised", "entropy", "value"):
        arguments = [f"--input={rolled}", f"--output={output}", f"--estimate={estimate}"]
        assert flags.run(prepare.PrepareConfig, prepare.main, ["prepare", *arguments]) == 0
        # self_denoised omits solutions of questions that none solves.
        assert len(lines(output)) == len(lines(rolled)) or estimate == "self_denoised"


def test_questions_by_their_rate(world, policy, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    with serving(policy) as url:
        assert run(world, output, f"--engine={url}", "--min_rate=0.01", "--max_rate=0.99", "--rollouts=2") == 0
    rates = {
        row["question"]: sum(c["correct"] for c in row["candidates"]) / len(row["candidates"])
        for row in lines(world.candidates)
    }
    kept = {question for question, rate in rates.items() if 0 < rate < 1}
    assert {row["prompt"] for row in lines(output)} == kept
    assert summary(output)["omitted_questions"] == len(rates) - len(kept)


def test_rollouts_that_are_cut(world, tmp_path, capsys) -> None:
    output = tmp_path / "out.jsonl"
    with serving(lambda body: (200, reply("answer=one", finish="length"))) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=2") == 2
        error = capsys.readouterr().err
        assert "rollouts were cut at --max_new_tokens" in error and "raise --max_new_tokens" in error
        assert not output.exists()
        allowed = ("--max_truncated=1", "--resume=never")
        assert run(world, tmp_path / "b.jsonl", f"--engine={url}", "--rollouts=2", *allowed) == 0
    found = summary(tmp_path / "b.jsonl")
    assert found["cut_rollouts"] == found["rollouts"] > 0 and found["share_of_zeros"] == 1


QUESTION = {"id": 1, "question": "start=one+two", "answer": "three"}
ROW = {**QUESTION, "candidates": [{"steps": ["one+two=three", "x"]}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": " "}, '"answer" is empty'),
        ({"answer": None}, '"answer" is null, expected a string'),
        ({"candidates": []}, '"candidates" is empty'),
    ],
)
def test_bad_rows_name_the_line_and_may_be_skipped(world, policy, tmp_path, capsys, change, message) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "id": 2, **change}) + "\n")
    with serving(policy) as url:
        assert run(world, output, f"--engine={url}", source=source) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: in.jsonl:2: ") and message in error and error.count("\n") == 1
        arguments = (f"--engine={url}", "--max_bad_rows=1", "--resume=auto")
        assert run(world, output, *arguments, source=source) in (0, 2)
        capsys.readouterr()
        assert run(world, tmp_path / "b.jsonl", f"--engine={url}", "--max_bad_rows=1", source=source) == 0
    assert len(lines(tmp_path / "b.jsonl")) == 1 and len(summary(tmp_path / "b.jsonl")["bad_rows"]) == 1


STEPWISE = {"prompt": "start=one+two", "answer": "three", "completions": ["one+two=three", "x"]}


@pytest.mark.parametrize(
    "change", [{"completions": []}, {"correct": "yes"}, {"answer": "four"}], ids=["completions", "correct", "answer"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_row_is_skipped_without_the_others_of_its_prompt(change, place, tmp_path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [STEPWISE, {**STEPWISE, "correct": True}, STEPWISE]
    rows.insert(place, {**STEPWISE, **change})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped: list[str] = []
    (found,) = read_solutions([path], "\n\n", skipped.append)
    if change == {"answer": "four"} and place == 0:  # the answer is that of the first row
        assert len(found.solutions) == 1 and len(skipped) == 3
        return
    assert [one.correct for one in found.solutions] == [None, True, None]
    assert len(skipped) == 1 and skipped[0].startswith(f"in.jsonl:{place + 1}: ")


@pytest.mark.parametrize("change", [{"id": 1.5}, {"id": True}, {"dataset": 3}], ids=["id", "bool", "dataset"])
def test_ids_and_datasets_of_another_type_are_bad_rows(change, tmp_path) -> None:
    """They were left out, so that the row had a made-up id, or was of no data set."""
    path = tmp_path / "in.jsonl"
    given = [{**STEPWISE, **change}, {**STEPWISE, "prompt": "start=one", "id": None, "dataset": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    skipped: list[str] = []
    (found,) = read_solutions([path], "\n\n", skipped.append)
    assert found.question.question == "start=one" and len(skipped) == 1
    ((name, value),) = change.items()
    assert skipped[0].startswith(f'in.jsonl:1: "{name}" is {value}, expected ')


SHARES = 5


@pytest.mark.parametrize("arguments", [(), ("--method=tree", "--searches=2", "--write=math_aps")])
def test_shares_merged_are_the_bytes_of_one_process(world, tokenizer, tmp_path, capsys, arguments) -> None:
    """The shares are made without each other, one of them in two parts after a failure; the merge asks no policy."""
    given = ("--rollouts=4", *arguments)
    whole, output, merged = (tmp_path / f"{name}.jsonl.gz" for name in ("whole", "shared", "merged"))
    with serving(WorldPolicy(tokenizer)) as url:
        assert run(world, whole, f"--engine={url}", *given) == 0
    policy, left = WorldPolicy(tokenizer), [30]

    def failing(body):
        left[0] -= 1
        return policy(body) if left[0] >= 0 else (500, b"dead")

    merge = (f"--merge={tmp_path}/shared.*.jsonl.gz", f"--output={merged}")
    with serving(failing) as url:
        codes = [run(world, output, f"--engine={url}", *given, f"--shard={one}/{SHARES}") for one in range(SHARES)]
        assert set(codes) == {0, 2}
        capsys.readouterr()
        assert flags.run(LabelConfig, label.main, ["label", *merge]) == 2
        error = capsys.readouterr().err
        assert "parts are missing" in error
        assert arguments or ".rollouts.jsonl.partial is not finished" in error
        left[0] = 10**6
        for one in range(SHARES):
            assert run(world, output, f"--engine={url}", *given, f"--shard={one}/{SHARES}", "--resume=auto") == 0
    sizes = [len(gzip.decompress(part.read_bytes())) for part in sorted(tmp_path.glob("shared.*.jsonl.gz"))]
    assert len(sizes) == SHARES and 0 in sizes, "no share without a question"
    requests = len(policy.requests)
    assert flags.run(LabelConfig, label.main, ["label", *merge]) == 0
    assert len(policy.requests) == requests
    assert merged.read_bytes() == whole.read_bytes()
    one, other = (json.loads((tmp_path / f"{name}.label.json").read_text()) for name in ("whole", "merged"))
    assert other["this_run"]["rollouts"] == 0
    assert {**one, "config": 0, "this_run": 0} == {**other, "config": 0, "this_run": 0}
    logs = [lines(tmp_path / f"{name}.rollouts.jsonl") for name in ("whole", "merged")]
    assert sorted(map(json.dumps, logs[0])) == sorted(map(json.dumps, logs[1]))
    # The merged files are those of one process, which has nothing left to do.
    before = merged.stat()
    assert run(world, merged, "--engine=http://127.0.0.1:9", *given, "--resume=auto") == 0
    assert merged.stat() == before and "is complete already" in capsys.readouterr().out


def test_a_merge_allows_what_its_parts_or_its_own_flags_do(world, policy, tmp_path, capsys) -> None:
    """Flags that no row depends on may differ between parts, and change when one is resumed."""
    source, merged = tmp_path / "in.jsonl", tmp_path / "merged.jsonl"
    rows = [{**ROW, "id": number, "question": f"start=one+{'two+' * number}one"} for number in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**ROW, "id": 9, "answer": ""}]))

    def merge(*arguments: str) -> int:
        given = (f"--merge={tmp_path}/p.*.jsonl", f"--output={merged}", "--resume=auto", *arguments)
        return flags.run(LabelConfig, label.main, ["label", *given])

    with serving(policy) as url:
        for share in range(2):
            given = (f"--engine={url}", "--rollouts=2", "--questions_at_once=1", f"--shard={share}/2")
            assert run(world, tmp_path / "p.jsonl", *given, source=source) == 2
            assert "in.jsonl:4: " in capsys.readouterr().err
            more = ("--max_bad_rows=1", "--grader_processes=1", "--resume=auto")
            assert run(world, tmp_path / "p.jsonl", *given, *more, source=source) == 0
    assert merge() == 0
    assert len(lines(merged)) == 3 and len(summary(merged)["bad_rows"]) == 1
    assert summary(merged)["config"]["grader_processes"] == 1


def test_a_merge_may_allow_more_cut_rollouts_than_its_parts(world, tmp_path, capsys) -> None:
    """A share with few rollouts does not count by itself, and all of them do."""
    with serving(lambda body: (200, reply("answer=one", finish="length" if body["seed"] % 5 < 3 else "stop"))) as url:
        for share in range(8):
            assert run(world, tmp_path / "p.jsonl", f"--engine={url}", "--rollouts=4", f"--shard={share}/8") == 0
    merge = ("label", f"--merge={tmp_path}/p.*.jsonl", f"--output={tmp_path}/merged.jsonl")
    capsys.readouterr()
    assert flags.run(LabelConfig, label.main, merge) == 2
    assert "more than --max_truncated=0.5" in capsys.readouterr().err
    assert flags.run(LabelConfig, label.main, [*merge, "--max_truncated=1"]) == 0
    assert 0.5 < (found := summary(tmp_path / "merged.jsonl"))["cut_rollouts"] / found["rollouts"] < 1


def test_parts_that_do_not_belong_together(world, policy, tmp_path, capsys) -> None:
    with serving(policy) as url:
        for share in range(2):
            assert run(world, tmp_path / "p.jsonl", f"--engine={url}", "--rollouts=2", f"--shard={share}/2") == 0
        assert run(world, tmp_path / "other.jsonl", f"--engine={url}", "--rollouts=3", "--shard=1/2") == 0
    merged = tmp_path / "merged.jsonl"

    def refused(message: str, *arguments: str) -> None:
        given = arguments or (f"--merge={tmp_path}/p.*.jsonl",)
        assert flags.run(LabelConfig, label.main, ["label", f"--output={merged}", *given]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not merged.exists()

    part = tmp_path / "p.00001-of-00002.jsonl"
    refused("1 of 2 parts are missing: 1/2", f"--merge={tmp_path}/p.00000-of-00002.jsonl")
    refused("--rollouts (", f"--merge={tmp_path}/p.00000-of-00002.jsonl,{tmp_path}/other.00001-of-00002.jsonl")
    refused("leave out --shard", f"--merge={part}", "--shard=0/2")
    refused("were scored from other contents", f"--merge={tmp_path}/p.*.jsonl", f"--input={part}")
    beside = tmp_path / "p.00001-of-00002.label.json"
    content = beside.read_text()
    beside.write_text(json.dumps({**json.loads(content), "policy": "another"}))
    refused("is of the policy 'scripted', ")
    beside.unlink()
    refused("run that share again with --resume=auto")
    beside.write_text(content)
    log = tmp_path / "p.00001-of-00002.rollouts.jsonl"
    content = log.read_bytes()
    log.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    refused("the parts lack 2 rollouts of")
    log.write_bytes(content[:-20] + b"\n")
    refused(f"{log.name}:")
    log.write_bytes(content)
    assert flags.run(LabelConfig, label.main, ["label", f"--output={merged}", f"--merge={tmp_path}/p.*.jsonl"]) == 0


def test_what_a_row_does_not_depend_on_may_change_on_resume(world, tmp_path, capsys) -> None:
    """More cut rollouts may be allowed without rolling again."""
    output = tmp_path / "out.jsonl"
    with serving(lambda body: (200, reply("answer=one", finish="length"))) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=2") == 2
        assert "--max_truncated=0.5" in capsys.readouterr().err
        rolled = lines(tmp_path / "out.rollouts.jsonl.partial")
        assert run(world, output, f"--engine={url}", "--rollouts=2", "--max_truncated=1", "--resume=auto") == 0
    assert lines(tmp_path / "out.rollouts.jsonl") == rolled


def test_rollouts_of_a_server_with_and_without_its_defaults_are_not_mixed(world, tmp_path, capsys) -> None:
    """An earlier version left the fields out that --omit_neutral leaves out: it resumes with this flag alone."""
    output, arguments = tmp_path / "out.jsonl", ("--rollouts=2", "--resume=auto")
    with serving(lambda body: (200, reply("answer=one", finish="length"))) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=2", "--omit_neutral") == 2
        resolved = json.loads((tmp_path / "out.rollouts.jsonl.config.json").read_text())["resolved"]
        assert resolved == {"kind of engine": "requests", "policy": "scripted"}
        capsys.readouterr()
        assert run(world, output, f"--engine={url}", *arguments, "--max_truncated=1") == 2
        assert "kind of engine requests, found kind of engine requests with top_k, min_p" in capsys.readouterr().err
        assert run(world, output, f"--engine={url}", *arguments, "--max_truncated=1", "--omit_neutral") == 0


def test_prefixes_that_are_too_long_and_solutions_without_steps(world, policy, tmp_path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = ["so"] * 200
    candidates = [{"steps": []}, {"steps": ["one+two=three"]}, {"steps": ["one+two=three", *long, "answer=three"]}]
    candidates.append({"text": "one+two=three\nanswer=three"})
    source.write_text(json.dumps({**ROW, "candidates": candidates}) + "\n")
    with serving(policy) as url:
        arguments = (f"--engine={url}", "--rollouts=2", "--nostop_at_zero", "--max_new_tokens=1800")
        assert run(world, output, *arguments, source=source) == 0
    one, other, split = lines(output)
    assert (split["candidate"], split["successes"]) == (3, [1]) and summary(output)["split"] == {
        "texts": 1,
        "unsplit": 1,
    }
    assert (one["candidate"], one["successes"], one["rollouts"], one["correct"]) == (1, [0], [1], False)
    assert other["correct"] is True and other["rollouts"][0] == 2 and other["rollouts"][-1] == 1
    unrolled = other["rollouts"].count(None)
    assert unrolled == summary(output)["prefixes_too_long"] > 0
    assert None not in other["rollouts"][: -unrolled - 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grader=none"], "--grader=none: rollouts have no"),
        (["--write=math_aps"], "--write=math_aps is for --method=tree"),
        (["--method=tree", "--pieces=4", "--write=rest_mcts"], "--write=rest_mcts: its values count steps"),
        (["--min_rate=0.9", "--max_rate=0.1"], "--min_rate=0.9 is above --max_rate=0.1"),
        (["--step_separator="], "--step_separator is empty"),
        (["--method=consensus"], "--write_requests=/nowhere/r.jsonl is for methods that sample, not --method=consen"),
        (["--searches=5"], "--searches=5 is for --method=tree, not sweep"),
        (["--method=tree", "--write=math_aps", "--tree_rows=paths"], "--tree_rows=paths is for --write=stepwise, not"),
        (["--roll_right"], "--roll_right=true is for --method=bisect, not sweep"),
        (["--method=bisect", "--nostop_at_zero"], "--stop_at_zero=false is for --method=sweep, and bisect with"),
        (["--judge=v.jsonl"], "--judge=v.jsonl is for --method=consensus, not sweep"),
        (["--batch_rows=8"], "--batch_rows=8 is for sampling in this process, not by --engine"),
        (["--concurrency=8"], "--concurrency=8 is for policies behind --engine"),
        (["--engine=http://x/v1", "--completions=a"], "give one"),
        (["--max_new_tokens=1000000"], "--max_new_tokens=1000000 leaves no room in the model's"),
    ],
)
def test_flags_that_do_not_go_together(world, tmp_path, capsys, arguments, message) -> None:
    assert run(world, tmp_path / "out.jsonl", "--write_requests=/nowhere/r.jsonl", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--method=consensus needs --judge"),
        (["--judge=v", "--rollouts=4"], "--rollouts=4 is for methods that sample, not --method=consensus"),
        (["--judge=v", "--temperature=1"], "--temperature=1 is for methods that sample, not --method=consensus"),
        (["--judge=v", "--judge_tokens=64"], "--judge_tokens=64 is for --write_judge_requests"),
        (["--judge=v", "--write_judge_requests=r"], "--write_judge_requests writes requests, and no rows: leave out"),
    ],
)
def test_flags_of_a_judge_that_do_not_go_together(world, tmp_path, capsys, arguments, message) -> None:
    assert run(world, tmp_path / "out.jsonl", "--method=consensus", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_sample_from_a_server(world, policy, tmp_path) -> None:
    arguments = [f"--model={world.model}", f"--questions={world.candidates}", "--num_candidates=3", "--system_prompt="]
    for name in "ab":
        with serving(policy) as url:
            output = [f"--output={tmp_path}/{name}.jsonl", f"--engine={url}", "--max_new_tokens=50"]
            assert flags.run(sample.SampleConfig, sample.main, ["sample", *arguments, *output]) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = lines(tmp_path / "a.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in lines(world.candidates)]
    assert all(len(row["candidates"]) == 3 and row["candidates"][0]["finish"] == "stop" for row in rows)


def test_resuming_replaces_no_file_that_is_not_its_own(world, policy, tmp_path, capsys) -> None:
    """--resume=auto with the name of a file that something else wrote."""
    output, parts = tmp_path / "notes.jsonl", tmp_path / "p.jsonl"
    output.write_text("mine")
    with serving(policy) as url:
        for resume in ("auto", "always"):
            assert run(world, output, f"--engine={url}", "--rollouts=2", f"--resume={resume}") == 2
            assert f"--output={output} already exists" in capsys.readouterr().err
        assert run(world, parts, f"--engine={url}", "--rollouts=2", "--shard=0/1") == 0
    merge = ["label", f"--merge={tmp_path}/p.*.jsonl", f"--output={output}", "--resume=auto"]
    assert flags.run(LabelConfig, label.main, merge) == 2
    assert f"--output={output} already exists" in capsys.readouterr().err
    assert output.read_text() == "mine"
    # Its own is written again: here the summary and the rows of a log that is complete.
    own = tmp_path / "p.00000-of-00001.jsonl"
    rows = own.read_bytes()
    own.with_name("p.00000-of-00001.label.json").unlink()
    own.write_text("damaged")
    with serving(policy) as url:
        given = (f"--engine={url}", "--rollouts=2", "--shard=0/1", "--resume=auto")
        assert run(world, parts, *given) == 0
    assert own.read_bytes() == rows


def test_cut_rollouts_are_judged_once_all_are_there(world, tmp_path, capsys) -> None:
    """Two rollouts, both cut, of the two prefixes of the first round: the other prefix's requests come first."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    candidates = [{"steps": [step, "x"]} for step in ("one+two=three", "so")]
    source.write_text(json.dumps({**ROW, "candidates": candidates}) + "\n")
    given = ("--rollouts=2", "--engine_model=m", "--resume=auto")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert run(world, output, *given, f"--write_requests={first}", source=source) == 0

    def answer(rows, finish):
        return [{"custom_id": row["custom_id"], "response": {"body": reply("x", finish=finish)}} for row in rows]

    asked = lines(first)
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in answer(asked[:2], "length")))
    arguments = (*given, f"--completions={path}", f"--write_requests={second}")
    assert run(world, output, *arguments, source=source) == 0
    assert [row["custom_id"] for row in lines(second)] == [row["custom_id"] for row in asked[2:]]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in answer(asked[2:], "stop")))
    assert run(world, output, *arguments, source=source) == 0
    assert summary(output)["cut_rollouts"] == 2 and summary(output)["rollouts"] == 4


def test_questions_of_a_tree_need_an_answer(world, policy, tmp_path, capsys) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(QUESTION) + "\n" + json.dumps({**QUESTION, "id": 2, "answer": " "}) + "\n")
    with serving(policy) as url:
        given = (f"--engine={url}", "--method=tree", "--searches=1", "--rollouts=2")
        assert run(world, output, *given, source=source) == 2
        assert 'in.jsonl:2: "answer" is empty' in capsys.readouterr().err
        assert run(world, output, *given, "--max_bad_rows=1", "--resume=auto", source=source) == 0
    assert summary(output)["questions"] == len(summary(output)["bad_rows"]) == 1


def test_a_question_that_is_omitted_grows_no_tree(world, policy, tmp_path) -> None:
    """Its rate is that of its first rollouts, which are all that it takes."""
    output = tmp_path / "out.jsonl"
    with serving(policy) as url:
        given = (f"--engine={url}", "--method=tree", "--rollouts=8", "--min_rate=1")
        assert run(world, output, *given) == 0
    found = summary(output)
    assert found["omitted_questions"] == found["questions"] == 4 and output.read_text() == ""
    assert found["rollouts"] == 8 * 4 and found["split"]["texts"] == 0


def test_a_resume_takes_rollouts_of_the_same_policy(world, tmp_path, capsys) -> None:
    """The server has another model than before, and --engine_model names none."""
    output, sampled = tmp_path / "out.jsonl", tmp_path / "sampled.jsonl"

    def half(body):
        return (200, reply("answer=one")) if body["seed"] % 3 else (500, b"dead")

    questions = [f"--model={world.model}", f"--questions={world.candidates}", f"--output={sampled}"]
    given = [*questions, "--num_candidates=1", "--system_prompt=", "--max_new_tokens=50", "--request_retries=0"]

    def sampling(url, *arguments):
        return flags.run(sample.SampleConfig, sample.main, ["sample", *given, f"--engine={url}", *arguments])

    with serving(half) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=1", "--concurrency=1") == 2
        assert sampling(url, "--concurrency=1", "--seed=2") == 2
    assert lines(tmp_path / "out.rollouts.jsonl.partial") and lines(tmp_path / "sampled.jsonl.partial")
    capsys.readouterr()
    message = "were written with policy scripted, found policy other"
    with serving(lambda body: (200, reply("answer=one")), models={"data": [{"id": "other"}]}) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=1", "--resume=auto") == 2
        assert message in capsys.readouterr().err
        assert sampling(url, "--seed=2", "--resume=auto") == 2
        assert message in capsys.readouterr().err
    with serving(lambda body: (200, reply("answer=one"))) as url:
        assert run(world, output, f"--engine={url}", "--rollouts=1", "--resume=auto") == 0
        assert sampling(url, "--seed=2", "--resume=auto") == 0
