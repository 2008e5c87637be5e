"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const el = (name, className = "", text = "") => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== "") node.textContent = text;
    return node;
  };
  const spoken = (text) => el("span", "hidden", text);
  const number = (value) => (value === null || value === undefined ? "none" : value.toFixed(value > 0 && value < 0.01 ? 4 : 2));

  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob($(id).textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  };
  const blocks = new Map();
  const candidatesOf = async (question) => {
    const block = Math.floor(question / data.block);
    if (!blocks.has(block)) blocks.set(block, unpack(`block-${block}`));
    return (await blocks.get(block))[question % data.block];
  };

  let data = null;
  let shown = [];  // numbers of the questions in the list
  let current = -1;

  const aggregation = () => $("aggregation").value;
  const chosenRight = (q) => Boolean(q.right[q.best[aggregation()]]);
  const majorityRight = (q) => q.majority >= 0 && Boolean(q.right[q.majority]);
  const share = (q) => q.right.reduce((sum, right) => sum + right, 0) / q.right.length;

  // Ids are unique within a data set only.
  const link = (q) => new URLSearchParams({ question: q.id, ...(q.dataset ? { dataset: q.dataset } : {}) }).toString();

  const questionFilters = [
    ["all questions", () => true],
    ["chosen is right", chosenRight],
    ["chosen is wrong", (q) => !chosenRight(q)],
    ["chosen is wrong, another is right", (q) => !chosenRight(q) && share(q) > 0],
    ["chosen right, majority wrong", (q) => chosenRight(q) && !majorityRight(q)],
    ["chosen wrong, majority right", (q) => !chosenRight(q) && majorityRight(q)],
    ["no candidate is right", (q) => share(q) === 0],
  ];
  const questionOrders = [
    ["as in the file", null],
    ["fewest right first", (a, b) => share(a) - share(b)],
    ["most right first", (a, b) => share(b) - share(a)],
    ["score of the chosen, low first", (a, b) => top(a) - top(b)],
    ["score of the chosen, high first", (a, b) => top(b) - top(a)],
  ];
  const top = (q) => q.scores[aggregation()][q.best[aggregation()]] ?? -1;
  const candidateFilters = [
    ["all", () => true],
    ["right", (q, c) => q.right[c]],
    ["wrong", (q, c) => !q.right[c]],
    ["chosen by a score or by majority", (q, c) => choosers(q, c).length > 0],
  ];
  const candidateOrders = ["score, high first", "score, low first", "as in the file", "short first", "long first"];

  const choosers = (q, c) => {
    const by = data.aggregations.filter((name) => q.best[name] === c);
    if (q.majority === c) by.push("majority");
    return by;
  };
  const verdict = (right) => {
    const tag = el("span", right ? "tag right" : "tag wrong", right ? "✓ right" : "✗ wrong");
    return tag;
  };
  const options = (select, names) => select.replaceChildren(...names.map((name, place) => {
    const option = el("option", "", name);
    option.value = String(place);
    return option;
  }));

  const list = () => {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [, keep] = questionFilters[Number($("show").value)];
    const part = $("part").value ? JSON.parse($("part").value) : null;
    const order = questionOrders[Number($("sort").value)][1];
    shown = data.questions.map((_, place) => place).filter((place) => {
      const q = data.questions[place];
      if (part && (part[0] ? q.fields[part[0]] : q.dataset) !== part[1]) return false;
      if (!keep(q)) return false;
      const text = q.haystack ??= [q.id, q.question, q.answer, ...q.answers, ...Object.values(q.fields)].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (order) shown.sort((a, b) => order(data.questions[a], data.questions[b]) || a - b);
    $("count").textContent = `${shown.length.toLocaleString("en")} of ${data.questions.length.toLocaleString("en")} questions`;
    $("questions").replaceChildren(...shown.map(entry));
    mark();
  };
  const entry = (place) => {
    const q = data.questions[place];
    const button = el("button");
    button.type = "button";
    button.dataset.place = String(place);
    const row = el("span", "row");
    row.append(el("span", "id", q.id), verdict(chosenRight(q)));
    const right = q.right.reduce((sum, value) => sum + value, 0);
    const counted = el("span", "share", `${right}/${q.right.length}`);
    counted.title = `${right} of ${q.right.length} candidates are right`;
    row.append(counted);
    button.append(row, el("span", "snippet", q.question.replace(/\[asy\][\s\S]*?\[\/asy\]/g, "").replace(/\\[()[\]]|\$/g, "").slice(0, 240)));
    const item = el("li");
    item.append(button);
    return item;
  };
  const mark = () => {
    for (const button of $("questions").querySelectorAll("button")) {
      if (Number(button.dataset.place) === current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    const place = shown.indexOf(current);
    $("previous").disabled = place <= 0;
    $("next").disabled = place < 0 || place >= shown.length - 1;
  };

  const fact = (name, value) => {
    const box = el("div"), term = el("dt", "", name), description = el("dd");
    if (value instanceof Node) description.append(value);
    else description.textContent = value;
    box.append(term, description);
    return box;
  };
  const math = (text) => {
    const span = el("span");
    // An answer is a formula, unless it is words.
    if ((/^[\p{L}\s.,'-]+$/u.test(text) && /\p{L}{4}/u.test(text)) || /\$|\\\(/.test(text)) texMath.append(span, text);
    else span.append(texMath.formula(text, false));
    return span;
  };

  const open = async (place, focus) => {
    current = place;
    const q = data.questions[place];
    $("detail").hidden = false;
    $("q-title").textContent = `Question ${q.id}`;
    const facts = [fact("answer", math(q.answer))];
    if (q.dataset) facts.push(fact("data set", q.dataset));
    for (const [name, value] of Object.entries(q.fields)) {
      if (name !== "no_answer") facts.push(fact(name.replaceAll("_", " "), value));
    }
    facts.push(fact("right", `${q.right.reduce((sum, value) => sum + value, 0)} of ${q.right.length}`));
    facts.push(fact(`chosen by ${aggregation()}`, verdict(chosenRight(q))), fact("majority", verdict(majorityRight(q))));
    $("q-facts").replaceChildren(...facts);
    $("q-text").replaceChildren();
    texMath.append($("q-text"), q.question);
    mark();
    history.replaceState(null, "", `#${link(q)}`);
    await candidates();
    if (focus) {
      $("q-title").focus({ preventScroll: true });
      $("detail").scrollIntoView({ block: "nearest" });
      if ($("detail").getBoundingClientRect().top < 0) $("detail").scrollIntoView({ block: "start" });
    }
  };

  const candidates = async () => {
    const place = current, q = data.questions[place];
    const solutions = await candidatesOf(place);
    if (place !== current) return;
    const keep = candidateFilters[Number($("c-show").value)][1];
    const sort = Number($("c-sort").value);
    let numbers = q.order[aggregation()].slice();
    if (sort === 1) numbers.reverse();
    if (sort >= 2) numbers.sort((a, b) => a - b);
    if (sort === 3) numbers.sort((a, b) => q.characters[a] - q.characters[b]);
    if (sort === 4) numbers.sort((a, b) => q.characters[b] - q.characters[a]);
    numbers = numbers.filter((c) => keep(q, c));
    $("c-count").textContent = `${numbers.length} of ${q.right.length} candidates`;
    const all = $("expand").getAttribute("aria-pressed") === "true";
    $("candidates").replaceChildren(...numbers.map((c, rank) => candidate(q, c, solutions[c], all || (rank === 0 && sort === 0))));
  };

  const candidate = (q, c, [steps, scores], expanded) => {
    const box = el("details", "candidate"), summary = el("summary");
    const value = q.scores[aggregation()][c];
    const name = el("span", "number", `#${c + 1}`);
    name.prepend(spoken("Candidate "));
    summary.append(name, verdict(q.right[c]));
    const by = choosers(q, c);
    if (by.length) summary.append(el("span", "tag chosen", `chosen by ${by.join(", ")}`));
    const score = el("span", "value", `${aggregation()} ${number(value)}`);
    score.prepend(spoken("score, "));
    summary.append(score);
    if (scores) {
      const strip = el("span", "strip");
      strip.setAttribute("aria-hidden", "true");
      strip.append(...scores.map((s) => {
        const bar = el("i", "heat");
        bar.style.setProperty("--s", s);
        bar.style.height = `${15 + 85 * s}%`;
        return bar;
      }));
      summary.append(strip);
    }
    const answer = el("span", "answer");
    if (q.gives[c] < 0) answer.append(el("span", "tag plain", "no answer found"));
    else answer.append(spoken("answers "), math(q.answers[q.gives[c]]));
    summary.append(answer);
    box.append(summary);
    const fill = () => {
      if (box.childElementCount === 1) box.append(stepList(steps, scores));
    };
    box.addEventListener("toggle", () => { if (box.open) fill(); });
    if (expanded) {
      box.open = true;
      fill();
    }
    return box;
  };
  const stepList = (steps, scores) => {
    const items = el("ol", "steps");
    const least = scores && scores.length ? Math.min(...scores) : 0;
    const lowest = scores && Math.max(...scores) - least >= 0.01 ? scores.indexOf(least) : -1;
    const fits = scores && scores.length === steps.length;
    steps.forEach((text, place) => {
      const item = el("li", fits ? "step" : "step unscored"), side = el("div", "score"), prose = el("div", "prose");
      if (fits) {
        item.style.setProperty("--s", scores[place]);
        const value = el("b", "", number(scores[place]));
        value.prepend(spoken(`Step ${place + 1}, score `));
        const meter = el("span", "meter"), filled = el("i", "heat");
        meter.setAttribute("aria-hidden", "true");
        meter.append(filled);
        side.append(value, meter);
        if (place === lowest) side.append(el("span", "lowest", "lowest"));
      } else {
        side.append(scores ? `scores: ${scores.map(number).join(", ")}` : "not scored");
      }
      texMath.append(prose, text);
      item.append(side, prose);
      items.append(item);
    });
    if (!steps.length) items.append(el("li", "step unscored", "There are no steps."));
    return items;
  };

  const parts = () => {
    const found = [];
    const sets = [...new Set(data.questions.map((q) => q.dataset))];
    if (sets.length > 1) for (const name of sets) found.push([["", name], `data set: ${name || "unnamed"}`]);
    for (const field of ["level", "subject", "perturbation_type"]) {
      const values = [...new Set(data.questions.map((q) => q.fields[field]).filter((value) => value !== undefined))].sort();
      if (values.length > 1) for (const value of values) found.push([[field, value], `${field.replaceAll("_", " ")}: ${value}`]);
    }
    $("part-label").hidden = !found.length;
    const everything = el("option", "", "all");
    everything.value = "";
    $("part").replaceChildren(everything, ...found.map(([value, name]) => {
      const option = el("option", "", name);
      option.value = JSON.stringify(value);
      return option;
    }));
  };

  const move = (by) => {
    const place = shown.indexOf(current) + by;
    if (place >= 0 && place < shown.length) open(shown[place], true);
  };

  const start = async () => {
    if (!("DecompressionStream" in window)) throw new Error("this browser cannot unpack gzip; a newer one can");
    data = await unpack("index");
    options($("show"), questionFilters.map(([name]) => name));
    options($("sort"), questionOrders.map(([name]) => name));
    options($("c-show"), candidateFilters.map(([name]) => name));
    options($("c-sort"), candidateOrders);
    $("aggregation").replaceChildren(...data.aggregations.map((name) => {
      const option = el("option", "", name);
      option.value = name;
      return option;
    }));
    parts();
    for (const id of ["show", "part", "sort"]) $(id).addEventListener("change", list);
    let timer = 0;
    $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(list, 120); });
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("aggregation").addEventListener("change", () => { list(); if (current >= 0) open(current, false); });
    for (const id of ["c-show", "c-sort"]) $(id).addEventListener("change", candidates);
    $("expand").addEventListener("click", () => {
      const pressed = $("expand").getAttribute("aria-pressed") !== "true";
      $("expand").setAttribute("aria-pressed", String(pressed));
      for (const box of $("candidates").children) box.open = pressed;
    });
    $("questions").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) open(Number(button.dataset.place), true);
    });
    $("questions").addEventListener("keydown", (event) => {
      const buttons = [...$("questions").querySelectorAll("button")];
      const place = buttons.indexOf(document.activeElement);
      const to = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (place >= 0 && to !== undefined && buttons[to]) {
        buttons[to].focus();
        event.preventDefault();
      }
    });
    $("previous").addEventListener("click", () => move(-1));
    $("next").addEventListener("click", () => move(1));
    list();
    const given = new URLSearchParams(location.hash.slice(1)), requested = given.get("question");
    const place = data.questions.findIndex(
      (q) => q.id === requested && (!given.has("dataset") || q.dataset === given.get("dataset")));
    if (place >= 0) await open(place, true);
    else if (data.questions.length) {
      // The first question to look at, without taking the reader away from the top of the page.
      await open(0, false);
      history.replaceState(null, "", location.pathname + location.search + (requested === null ? location.hash : ""));
    }
    document.documentElement.dataset.ready = "true";
  };
  start().catch((error) => {
    $("problem").hidden = false;
    $("problem").textContent = `The candidates cannot be shown: ${error.message}`;
  });
})();
