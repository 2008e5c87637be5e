"""The report in a real browser: filters, a question, the score of a step, no error, nothing from the network."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from cfprm_jax.report import page

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium-driver")


def first_of(names):
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = first_of(BROWSERS), first_of(DRIVERS)
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
        "--window-size=1300,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def opened(browser, result, tmp_path):
    """The page, ready, and afterwards free of errors and requests."""
    path = tmp_path / "report.html"
    page.write(result.outcome, result.page, path)
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    wait(browser, "return document.documentElement.dataset.ready === 'true'")
    yield browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in requested if not url.startswith(("file:", "data:", "about:", "chrome:"))} == set()
    assert browser.title == "Best of N: PRM"  # the texts of the data would change it if they ran


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda b: b.execute_script(condition))


def choose(browser, identifier, text):
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", identifier)).select_by_visible_text(text)


def texts(browser, selector):
    """What is shown, without what is for screen readers only."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((node) => {"
        "const copy = node.cloneNode(true); copy.querySelectorAll('.hidden').forEach((h) => h.remove());"
        "return copy.textContent.trim(); })",
        selector,
    )


def test_a_question_is_found_opened_and_its_steps_have_their_scores(opened):
    assert texts(opened, "#questions .id") == [f"math500-{n}" for n in range(4)] + ["gsm_plus-4", "gsm_plus-5"]
    opened.find_element("id", "search").send_keys("math500-2")
    wait(opened, "return document.querySelectorAll('#questions li').length === 1")
    assert texts(opened, "#count") == ["1 of 6 questions"]
    opened.find_element("css selector", "#questions button").click()
    wait(opened, "return document.getElementById('q-title').textContent === 'Question math500-2'")
    wait(opened, "return document.querySelectorAll('.candidate').length === 4")
    assert texts(opened, ".candidate .number") == ["#2", "#1", "#3", "#4"]
    assert texts(opened, ".candidate[open] .score b") == ["0.50", "0.75", "0.97"]
    assert texts(opened, ".candidate[open] .score .lowest") == ["lowest"]
    assert texts(opened, ".candidate .tag.chosen") == ["chosen by min, last, majority"]
    assert "answer2" in "".join(texts(opened, "#q-facts"))
    # Focus is on what was opened, with step and score as text.
    assert opened.switch_to.active_element.get_attribute("id") == "q-title"
    label = opened.execute_script("return document.querySelector('.candidate[open] .score b').textContent")
    assert label == "Step 1, score 0.50"


def test_candidates_are_filtered_by_right_wrong_and_chosen_and_sorted(opened):
    opened.find_element("css selector", "#questions li:nth-child(2) button").click()
    wait(opened, "return document.getElementById('q-title').textContent === 'Question math500-1'")
    wait(opened, "return document.querySelectorAll('.candidate').length === 4")
    shown = {}
    for choice, count in (("right", 2), ("chosen by a score or by majority", 1), ("wrong", 2), ("all", 4)):
        choose(opened, "c-show", choice)
        wait(opened, f"return document.querySelectorAll('.candidate').length === {count}")
        shown[choice] = texts(opened, ".candidate .number")
    assert shown["right"] == ["#2", "#3"] and shown["wrong"] == ["#1", "#4"]
    assert shown["chosen by a score or by majority"] == ["#2"]
    for order, numbers in (("as in the file", ["#1", "#2", "#3", "#4"]), ("short first", ["#4", "#3", "#2", "#1"])):
        choose(opened, "c-sort", order)
        wait(opened, f"return document.querySelector('.candidate .number').lastChild.textContent === '{numbers[0]}'")
        assert texts(opened, ".candidate .number") == numbers
    opened.find_element("id", "expand").click()
    wait(opened, "return document.querySelectorAll('.candidate[open] .steps').length === 4")
    assert "There are no steps." in texts(opened, ".candidate li")
    assert texts(opened, ".candidate .step:has(.lowest) b") == ["0.50", "0.25"]


def test_questions_are_filtered_by_outcome_and_part(opened):
    choose(opened, "show", "chosen is wrong")
    assert texts(opened, "#count") == ["0 of 6 questions"]
    choose(opened, "show", "all questions")
    choose(opened, "part", "level: 2")
    assert texts(opened, "#questions .id") == ["math500-1", "math500-3"]
    choose(opened, "part", "data set: gsm_plus")
    assert texts(opened, "#questions .id") == ["gsm_plus-4", "gsm_plus-5"]
    choose(opened, "part", "all")
    choose(opened, "sort", "score of the chosen, low first")
    choose(opened, "aggregation", "last")
    assert len(texts(opened, "#questions .id")) == 6


def test_it_works_by_keyboard(opened):
    from selenium.webdriver.common.keys import Keys

    opened.find_element("css selector", "#questions button").send_keys(Keys.ARROW_DOWN)
    opened.switch_to.active_element.send_keys(Keys.ENTER)
    wait(opened, "return document.getElementById('q-title').textContent === 'Question math500-1'")
    opened.find_element("id", "next").send_keys(Keys.ENTER)
    wait(opened, "return document.getElementById('q-title').textContent === 'Question math500-2'")
    wait(opened, "return document.querySelectorAll('.candidate').length === 4")
    second = opened.find_elements("css selector", ".candidate > summary")[1]
    second.send_keys(Keys.ENTER)
    wait(opened, "return document.querySelectorAll('.candidate[open]').length === 2")


def test_mathematics_is_mathematics_and_markup_is_text(opened):
    wait(opened, "return document.querySelectorAll('.candidate').length === 4")
    assert opened.execute_script("return document.querySelector('#q-text mfrac').textContent") == "02"
    assert "</script><script>" in texts(opened, "#q-text")[0]
    assert opened.execute_script("return document.querySelectorAll('article img, article script').length") == 0


FORMULAS = {
    r"\frac{1}{2}": "mfrac",
    r"\sqrt[3]{x^2+1}": "mroot",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": "mtable",
    r"\begin{cases} 1 & x > 0 \\ 0 & \text{otherwise} \end{cases}": "mtable",
    r"\sum_{k=1}^{\infty} \frac{1}{k^2}": "msubsup, munderover",
    r"\left( \frac{a}{b} \right]": "mfrac",
    r"x_{10}^{2}": "msubsup",
    r"\boxed{5}": 'mrow[style*="border"]',
    r"\overline{AB} \parallel \vec{v}": "mover",
    r"a \equiv b \pmod{7}": "mi",
    r"\mathbb{R} \setminus \{0\}": "mi",
    r"\binom{5}{2} = 10, 90^\circ": "mfrac",
    r"f''(x) = \lim_{h \to 0} \sin h": "munder, msub",
    r"\sum_{\substack{a \\ b}} 1": "mtable",
}


def test_formulas(opened):
    for source, selector in FORMULAS.items():
        name, found = opened.execute_script(
            "const node = texMath.formula(arguments[0], true);"
            "return [node.localName, Boolean(node.querySelector(arguments[1]))]",
            source,
            selector,
        )
        assert (name, found) == ("math", True), source
    for source in (r"\unknown{3}", r"\frac{1}", r"{", r"\begin{tikzpicture}\end{tikzpicture}"):
        assert opened.execute_script(
            "const node = texMath.formula(arguments[0], true); return [node.localName, node.textContent]", source
        ) == ["code", source]


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("It costs $5 and $6.", 0),
        ("It costs $5-$6.", 0),
        ("$x$ and $5x$ cost \\$5", 2),
        (r"\(a\) then \[b\] then $$c$$ then \boxed{d}", 4),
        (r"\begin{align*} a &= b \\ c &= d \end{align*}", 1),
        ('[asy] draw((0,0)--(1,1)); label("$x$"); [/asy]', 0),
        ("a * b ** c", 0),
    ],
)
def test_where_mathematics_begins_and_ends(opened, text, formulas):
    count, shown = opened.execute_script(
        "const node = document.createElement('p'); texMath.append(node, arguments[0]);"
        "return [node.querySelectorAll('math').length, node.textContent]",
        text,
    )
    assert count == formulas
    if not formulas and "asy" not in text:
        assert shown == text


def test_a_link_opens_the_question_of_its_data_set(browser, result, tmp_path):
    """Two data sets whose questions have the same ids."""
    numbered = [{**one, "id": "7"} for one in result.page.summaries]
    path = tmp_path / "report.html"
    page.write(result.outcome, dataclasses.replace(result.page, summaries=numbered), path)
    sets = [one["dataset"] for one in numbered]
    assert len(set(sets)) == 2
    for dataset in dict.fromkeys(sets):
        browser.get("about:blank")
        browser.get(f"{path.as_uri()}#question=7&dataset={dataset}")
        wait(browser, "return document.documentElement.dataset.ready === 'true'")
        assert dataset in texts(browser, "#q-facts")[0]
        assert browser.execute_script("return location.hash") == f"#question=7&dataset={dataset}"
