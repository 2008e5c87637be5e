"""PRMScore by class and area, its intervals, baselines and comparisons; ReasonEval's measures."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.data.step_cases import CONTROL, Case
from cfprm_jax.evaluation import prm_bench, reason_eval
from cfprm_jax.evaluation.case_scores import CaseScores
from cfprm_jax.evaluation.prm_bench_lines import AREAS, CLASSES, LINES, Settings

SETTINGS = Settings(0.5, 0.15, frozenset(), 200, 0)


def case(classification, idx, errors, steps=4, group=None, **fields):
    texts = tuple(f"{'long ' * (10 if step in errors else 1)}step {step}" for step in range(1, steps + 1))
    name = group or f"q{idx}"
    return Case(
        **{
            "kind": "prm_bench",
            "classification": classification,
            "idx": str(idx),
            "question": name,
            "steps": texts,
            "error_steps": tuple(errors),
            "group": name,
            "forms": frozenset({name}),
            "source": f"f:{idx}",
            "file": "f",
            "judged": steps,
            **fields,
        }
    )


def world():
    """Six cases of every class; multi_solutions has no wrong steps."""
    return [
        case(name, idx, () if name == "multi_solutions" else (1 + idx % 4, 4)) for name in CLASSES for idx in range(6)
    ]


def noisy(cases, seed=0, redundancy=False):
    rng = np.random.default_rng(seed)
    return {
        each.key: CaseScores(
            rng.uniform(size=len(each.steps)), rng.uniform(size=len(each.steps)) / 2 if redundancy else None
        )
        for each in cases
    }


def counted(cases, scores, by_redundancy=False):
    """TP, FP, TN, FN step by step."""
    tp = fp = tn = fn = 0
    for each in cases:
        for step in range(1, len(each.steps) + 1):
            found = scores[each.key]
            valid = found.validity[step - 1] > 0.5
            if by_redundancy and found.redundancy is not None:
                valid = not found.redundancy[step - 1] > 0.15
            wrong = step in each.error_steps
            tp, fp = tp + (valid and not wrong), fp + (valid and wrong)
            tn, fn = tn + (not valid and wrong), fn + (not valid and not wrong)
    return tp, fp, tn, fn


@pytest.mark.parametrize("redundancy", [False, True])
def test_every_line_is_what_counting_gives(redundancy):
    cases = world()
    scores = noisy(cases, redundancy=redundancy)
    lines = {line.name: line for line in prm_bench.measure(cases, scores, SETTINGS)}
    assert list(lines) == list(LINES)
    total = np.zeros(4)
    for name in CLASSES:
        own = [each for each in cases if each.classification == name]
        tp, fp, tn, fn = counted(own, scores, name in ("redundency", "circular"))
        total += (tp, fp, tn, fn)
        f1, negative = 2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fn + fp) if tn else 0
        expected = f1 if name == "multi_solutions" else (f1 + negative) / 2
        assert lines[name].prm_score == pytest.approx(expected, abs=1e-12)
        assert lines[name].steps == 24 and lines[name].wrong_steps == fp + tn
        assert lines[name].accuracy == pytest.approx((tp + tn) / 24)
    tp, fp, tn, fn = total
    assert lines["pooled"].prm_score == pytest.approx((tp / (2 * tp + fp + fn)) + tn / (2 * tn + fn + fp))
    for area, names in AREAS.items():
        assert lines[area].prm_score == pytest.approx(np.mean([lines[name].prm_score for name in names]))
        assert lines[area].ci95[0] <= lines[area].prm_score <= lines[area].ci95[1]
        assert lines[area].f1 is None


def test_a_case_without_scores_leaves_no_overall():
    cases = world()
    scores = noisy(cases)
    del scores["circular", "3"]
    lines = {line.name: line for line in prm_bench.measure(cases, scores, SETTINGS)}
    assert lines["circular"].scored == 5 and lines["circular"].cases == 6 and lines["circular"].prm_score is not None
    assert lines["simplicity"].prm_score is None and lines["pooled"].prm_score is None and lines["pooled"].ci95 is None
    assert lines["soundness"].prm_score is not None
    # A class without any case leaves its area and the whole without, too.
    fewer = [each for each in cases if each.classification != "deception"]
    lines = {line.name: line for line in prm_bench.measure(fewer, noisy(fewer), SETTINGS)}
    assert lines["deception"].prm_score is None and lines["sensitivity"].prm_score is None
    assert lines["pooled"].prm_score is None and lines["missing_condition"].prm_score is not None


def test_nothing_scored_at_all():
    lines = prm_bench.measure(world(), {}, SETTINGS)
    assert all(line.prm_score is None and line.scored == 0 and line.ci95 is None for line in lines)


def test_a_model_that_calls_everything_right():
    cases = world()
    lines = prm_bench.measure(cases, {each.key: CaseScores(np.full(4, 0.9)) for each in cases}, SETTINGS)
    for line in lines[: len(CLASSES)]:
        assert line.prm_score == line.baselines["all_valid"] and line.defined
        assert line.name == "multi_solutions" or line.negative_f1 == 0


def test_where_an_f1_is_0_of_0_it_is_minus_1_and_not_defined():
    cases = [case("deception", 0, (1,))]
    scores = {cases[0].key: CaseScores(np.array([0.9, 0.1, 0.9, 0.9]))}
    line = prm_bench.measure(cases, scores, SETTINGS)[LINES.index("deception")]
    assert line.negative_f1 == -1 and not line.defined and line.ci95 is None


def test_length_alone_finds_steps_that_are_longer():
    cases = world()
    lines = prm_bench.measure(cases, noisy(cases), SETTINGS)
    for line in lines[: len(CLASSES) - 1]:
        assert line.baselines["length"] == 1.0
    # Scores that are turned around are as good as ever once the threshold may be anywhere, but not their direction.
    shifted = {each.key: CaseScores(np.where(np.isin(range(1, 5), each.error_steps), 0.1, 0.2)) for each in cases}
    lines = prm_bench.measure(cases, shifted, SETTINGS)
    assert all(line.cross_fitted == 1.0 and line.prm_score < 0.6 for line in lines[: len(CLASSES) - 1])


def test_questions_seen_in_training_are_left_out():
    cases = world()
    scores = noisy(cases)
    settings = Settings(0.5, 0.15, frozenset({"q0", "q1"}), 200, 0)
    lines = prm_bench.measure(cases, scores, settings)
    rest = [each for each in cases if each.idx not in ("0", "1")]
    for line, expected in zip(lines, prm_bench.measure(rest, scores, SETTINGS), strict=True):
        assert line.new_prm_score == (expected.prm_score if expected.defined else None)
        assert line.new_cases == expected.scored and (line.new_ci95 is None) == (expected.ci95 is None)
    assert all(line.new_prm_score is None for line in prm_bench.measure(cases, scores, SETTINGS))


def test_the_distance_to_the_control():
    cases = [case(CONTROL, 0, ()), case("redundency", 0, (2,)), case("deception", 0, (3,)), case("deception", 1, (1,))]
    scores = {
        cases[0].key: CaseScores(np.array([0.9, 0.9, 0.9, 0.1])),
        cases[1].key: CaseScores(np.array([0.9, 0.1, 0.1, 0.1])),
        cases[2].key: CaseScores(np.array([0.9, 0.9, 0.9, 0.9])),
        cases[3].key: CaseScores(np.array([0.1, 0.9, 0.9, 0.9])),
    }
    lines = {line.name: line for line in prm_bench.measure(cases, scores, SETTINGS)}
    assert lines["redundency"].similarity == 0.5 and lines["deception"].similarity == 0.25
    assert lines["redundency"].accuracy_first_error == 1 and lines["deception"].accuracy_first_error == 0.5
    assert lines["redundency"].cases == 1  # the control has no part in it


def test_two_models():
    cases = world()
    perfect = {each.key: CaseScores(np.where(np.isin(range(1, 5), each.error_steps), 0.1, 0.9)) for each in cases}
    found = {entry.name: entry for entry in prm_bench.compare(cases, perfect, noisy(cases), SETTINGS)}
    assert found["pooled"].prm_score == 1 and found["pooled"].difference > 0.3
    assert found["pooled"].ci95[0] > 0 and found["pooled"].p_value < 0.02
    same = prm_bench.compare(cases, perfect, perfect, SETTINGS)
    assert all(entry.difference == 0 and entry.ci95 == (0, 0) and entry.p_value == 1 for entry in same)
    # Over the cases that both have only, and no overall score then.
    fewer = {key: value for key, value in perfect.items() if key[1] != "0"}
    names = [entry.name for entry in prm_bench.compare(cases, perfect, fewer, SETTINGS)]
    assert names == list(CLASSES)


def auc(signal, wrong):
    pairs = [(a > b) + 0.5 * (a == b) for a in signal[~wrong] for b in signal[wrong]]
    return sum(pairs) / len(pairs)


def test_reason_eval_by_hand():
    cases = [
        case("mr", 0, (2,), kind="redundant"),
        case("mr", 1, (), kind="redundant", group="q0"),
        case("mr", 2, (1, 4), kind="redundant"),
    ]
    redundancy = [[0.1, 0.2, 0.3, 0.0], [0.1, 0.1, 0.1, 0.05], [0.9, 0.1, 0.2, 0.15]]
    scores = {
        each.key: CaseScores(np.full(4, 0.9), np.array(values)) for each, values in zip(cases, redundancy, strict=True)
    }
    (line,) = reason_eval.measure(cases, scores, SETTINGS)
    assert line.signal == "redundancy" and line.cases == line.scored == 3
    signal = -np.concatenate(redundancy)
    wrong = np.array([0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1], bool)
    assert line.step.auc == pytest.approx(auc(signal, wrong)) and (line.step.right, line.step.wrong) == (9, 3)
    # Above 0.15: steps 2 and 3 of the first, 1 and 3 of the third. Equal to it is not right either.
    tp, fp, tn, fn = 7, 0, 3, 2
    assert line.step.macro_f1 == pytest.approx(tp / (2 * tp + fp + fn) + tn / (2 * tn + fp + fn))
    assert (
        line.solution.auc == 1 and line.solution.macro_f1 == 1 and (line.solution.right, line.solution.wrong) == (1, 2)
    )


def test_steps_of_several_texts_and_steps_after_an_error():
    # Texts 0.9 | 0.8 0.2 | 0.9; the second step is the first error, what comes after it is not judged.
    wrong = case("gsm", 0, (2,), kind="invalid", judged=2, pieces=(1, 2, 1))
    right = case("gsm", 1, (), kind="invalid", judged=3, pieces=(1, 2, 1))
    scores = {
        wrong.key: CaseScores(np.array([0.9, 0.8, 0.2, 0.1])),
        right.key: CaseScores(np.array([0.9, 0.5, 0.8, 0.7]), np.full(4, 0.9)),
    }
    (line,) = reason_eval.measure([wrong, right], scores, SETTINGS)
    assert line.signal == "validity" and (line.step.right, line.step.wrong) == (4, 1)
    assert line.step.auc == 1 and line.solution.auc == 1
    # 0.5 is not above the threshold: a right step called wrong, and by solution a mistake whatever it is.
    assert line.step.macro_f1 == pytest.approx((6 / 7 + 2 / 3) / 2) and line.solution.macro_f1 == pytest.approx(1 / 3)
