"""The page's data, its safety, and its size; what a browser makes of it is in test_report_browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re

import numpy as np

from cfprm_jax.data.candidates import Candidate, parse_question
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.report import best_of_n as best_of_n_report
from cfprm_jax.report import page


def unpacked(text, name):
    found = re.search(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]*)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def written(result, tmp_path):
    path = tmp_path / "report.html"
    page.write(result.outcome, result.page, path)
    return path.read_text()


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attrs]


def test_it_holds_every_candidate_with_its_scores(result, made_rows, tmp_path):
    text = written(result, tmp_path)
    index = unpacked(text, "index")
    assert index["aggregations"] == ["min", "last"] and index["n"] == 4
    assert [q["id"] for q in index["questions"]] == [row["id"] for row in made_rows]
    first = index["questions"][0]
    assert (
        first["question"] == made_rows[0]["question"] and first["answer"] == "0" and first["fields"] == {"level": "1"}
    )
    assert first["answers"] == ["1", "0", "9"] and first["gives"] == [0, 1, 1, 2]
    assert first["right"] == [0, 1, 1, 0] and first["steps"] == [2, 3, 1, 0]
    assert first["scores"] == {"min": [0.25, 0.5, 0.0, None], "last": [0.25, 0.97, 0.0, None]}
    assert first["order"]["min"] == [1, 0, 2, 3] and first["best"] == {"min": 1, "last": 1} and first["majority"] == 1
    (block,) = [unpacked(text, "block-0")]
    assert len(block) == 6
    assert block[2][0] == [made_rows[2]["candidates"][0]["steps"], [0.9, 0.25]] and block[2][3] == [[], None]


def test_nothing_of_the_data_is_markup_and_nothing_is_fetched(result, tmp_path):
    text = written(result, tmp_path)
    parsed = Tags()
    parsed.feed(text)
    assert "img" not in parsed.tags and parsed.tags.count("script") == 3  # index, one block, the program
    assert not [each for each in parsed.attributes if each[1].startswith("on")]
    links = {value for _, name, value in parsed.attributes if name in ("src", "href")}
    assert all(link.startswith("#") or link == "data:," for link in links)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("style", "script"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inside) == 1
        assert base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode() in policy


def test_names_are_escaped(made_rows, tmp_path):
    items = [parse_question(row, "c.jsonl:1") for row in made_rows[:1]]
    named = BonConfig(n=("2",), grader="none", resamples=100, name='<i>"a"</i>')
    text = written(best_of_n_report.evaluate(items, named), tmp_path)
    assert "<i>" not in text and "&lt;i&gt;" in text


def test_questions_beyond_the_limit_are_counted_and_the_same_results_give_the_same_page(made_rows, tmp_path):
    items = [parse_question(row, "c.jsonl:1") for row in made_rows]
    limited = BonConfig(n=("2",), grader="none", resamples=100, report_questions=2)
    text = written(best_of_n_report.evaluate(items, limited), tmp_path)
    assert len(unpacked(text, "index")["questions"]) == 2
    assert "4 further questions are counted above but not shown here" in text
    assert text == written(best_of_n_report.evaluate(items, limited), tmp_path)
    nothing = BonConfig(n=("2",), grader="none", resamples=100, report_questions=0)
    assert unpacked(written(best_of_n_report.evaluate(items, nothing), tmp_path), "index")["questions"] == []


def test_a_text_is_cut_where_that_fits_its_scores():
    scores = np.array([0.5, 0.25])
    assert page._steps(Candidate(text="a\n\nb\n\n", step_scores=scores)) == [["a", "b"], [0.5, 0.25]]
    assert page._steps(Candidate(text="a\n\nb\n\nc", step_scores=scores)) == [["a\n\nb\n\nc"], [0.5, 0.25]]
    assert page._steps(Candidate(steps=("a\n\nb",), step_scores=scores[:1])) == [["a\n\nb"], [0.5]]
    assert page._steps(Candidate(text="a\n\nb")) == [["a", "b"], None]


def test_blocks_are_of_a_few_questions_each(made_rows, tmp_path):
    items = [parse_question({**made_rows[0], "id": number}, "c.jsonl:1") for number in range(20)]
    text = written(best_of_n_report.evaluate(items, BonConfig(n=("2",), grader="none", resamples=100)), tmp_path)
    assert [len(unpacked(text, f"block-{number}")) for number in range(3)] == [8, 8, 4]
