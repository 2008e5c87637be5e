"use strict";
// Text with LaTeX in it as HTML and MathML. Temml renders a formula; this finds where formulas begin and end, and shows what
// Temml does not support as its source. Text never becomes markup.
const texMath = (() => {
  const formula = (source, display) => {
    const tex = source.trim();
    const holder = document.createElement("span");
    try {
      // Bounds on macro expansion and sizes: a candidate's text may be anything.
      temml.render(tex, holder, { displayMode: display, throwOnError: true, trust: false, maxExpand: 200, maxSize: [25, 25] });
      const math = holder.querySelector("math");
      if (!math) throw new Error("no formula");
      math.setAttribute("alttext", tex);
      return math;
    } catch {
      const code = document.createElement("code");
      code.className = "tex";
      code.textContent = tex;
      return code;
    }
  };

  // Where mathematics begins and ends in text. A dollar sign of an amount is none: it closes nothing, or stands by a space.
  const pieces = new RegExp([
    String.raw`\[asy\](?<asy>[\s\S]*?)\[/asy\]`,
    String.raw`\\\[(?<display>[\s\S]+?)\\\]`,
    String.raw`\$\$(?<dollars>[\s\S]+?)\$\$`,
    String.raw`\\\((?<inline>[\s\S]+?)\\\)`,
    String.raw`(?<environment>\\begin\{(?<name>(?:align|gather|equation|eqnarray|multline|cases|[pbvBV]?matrix|array)\*?)\}[\s\S]+?\\end\{\k<name>\})`,
    String.raw`(?<!\\)\$(?<dollar>(?!\s)(?:\\[\s\S]|[^$\\])+?(?<!\s))\$(?!\d)`,
    String.raw`(?<boxed>\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})`,
    String.raw`\*\*(?<bold>[^*\n]+?)\*\*`,
  ].join("|"), "gu");

  // Append text to a node, its formulas as mathematics.
  const append = (parent, text) => {
    let place = 0, afterBlock = false;
    // A formula on its own line needs no line breaks around it.
    const plain = (end, beforeBlock) => {
      let between = text.slice(place, end);
      if (afterBlock) between = between.replace(/^[ \t]*\n\s*/, "");
      if (beforeBlock) between = between.trimEnd();
      if (between) parent.append(between.replace(/\\([$%&#])/g, "$1"));
    };
    for (const found of text.matchAll(pieces)) {
      const g = found.groups;
      const block = g.display !== undefined || g.dollars !== undefined ||
        (g.environment !== undefined && /^(align|gather|equation|eqnarray|multline)/.test(g.name));
      plain(found.index, block);
      place = found.index + found[0].length;
      afterBlock = block;
      if (g.asy !== undefined) {
        const details = document.createElement("details"), pre = document.createElement("pre");
        details.className = "figure-source";
        const summary = document.createElement("summary");
        summary.textContent = "figure, as Asymptote source";
        pre.textContent = g.asy.trim();
        details.append(summary, pre);
        parent.append(details);
      } else if (g.bold !== undefined) {
        const bold = document.createElement("strong");
        append(bold, g.bold);
        parent.append(bold);
      } else {
        const source = g.display ?? g.dollars ?? g.environment ?? g.inline ?? g.dollar ?? g.boxed;
        parent.append(formula(source, block));
      }
    }
    plain(text.length, false);
  };
  return { append, formula };
})();
