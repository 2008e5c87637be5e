"use strict";
// Text with LaTeX in it as HTML and MathML: what solutions use of LaTeX. A formula with something else in it is shown as
// its source. Everything is built node by node, so that text never becomes markup.
const texMath = (() => {
  const NS = "http://www.w3.org/1998/Math/MathML";
  const make = (name, content = [], attributes = {}) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (typeof content === "string") node.textContent = content;
    else for (const child of content) node.append(child);
    return node;
  };

  const letters = {
    alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ",
    vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ",
    tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ",
    Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", ell: "ℓ", infty: "∞", emptyset: "∅",
    varnothing: "∅", partial: "∂", nabla: "∇", Re: "ℜ", Im: "ℑ", hbar: "ℏ", aleph: "ℵ", degree: "°", circ: "∘",
    ldots: "…", dots: "…", dotsc: "…", dotso: "…", cdots: "⋯", dotsb: "⋯", dotsm: "⋯", dotsi: "⋯",
    vdots: "⋮", ddots: "⋱", angle: "∠", triangle: "△",
    square: "□", Box: "□", blacksquare: "■", checkmark: "✓", prime: "′", top: "⊤", bot: "⊥", star: "⋆", pounds: "£",
  };
  const operators = {
    cdot: "⋅", times: "×", div: "÷", pm: "±", mp: "∓", ast: "∗", bullet: "•", oplus: "⊕", otimes: "⊗", le: "≤",
    leq: "≤", leqslant: "≤", ge: "≥", geq: "≥", geqslant: "≥", neq: "≠", ne: "≠", approx: "≈", equiv: "≡", cong: "≅",
    sim: "∼", simeq: "≃", propto: "∝", ll: "≪", gg: "≫", in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆",
    supset: "⊃", supseteq: "⊇", cup: "∪", cap: "∩", setminus: "∖", land: "∧", wedge: "∧", lor: "∨", vee: "∨",
    neg: "¬", lnot: "¬", forall: "∀", exists: "∃", to: "→", rightarrow: "→", leftarrow: "←", leftrightarrow: "↔",
    Rightarrow: "⇒", Leftarrow: "⇐", Leftrightarrow: "⇔", implies: "⟹", iff: "⟺", longrightarrow: "⟶", mapsto: "↦",
    uparrow: "↑", downarrow: "↓", mid: "∣", nmid: "∤", parallel: "∥", perp: "⊥", lfloor: "⌊", rfloor: "⌋",
    lceil: "⌈", rceil: "⌉", langle: "⟨", rangle: "⟩", lvert: "|", rvert: "|", lVert: "‖", rVert: "‖", vert: "|",
    Vert: "‖", colon: ":", therefore: "∴", because: "∵", lbrace: "{", rbrace: "}", lbrack: "[", rbrack: "]",
    backslash: "\\", quad: "\u2003", qquad: "\u2003\u2003",
  };
  const large = { sum: "∑", prod: "∏", coprod: "∐", int: "∫", iint: "∬", oint: "∮", bigcup: "⋃", bigcap: "⋂" };
  const functions = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg " +
    "arg gcd lcm hom").split(" "));
  const limits = new Set("lim max min sup inf limsup liminf".split(" "));
  const accents = { overline: "‾", bar: "‾", hat: "^", widehat: "^", vec: "→", overrightarrow: "→", tilde: "~",
    widetilde: "~", dot: "˙", ddot: "¨", overleftrightarrow: "↔", overarc: "⌒", overbrace: "⏞" };
  const under = { underline: "_", underbrace: "⏟" };
  const variants = { mathbf: "bold", bold: "bold", boldsymbol: "bold-italic", bm: "bold-italic", mathbb: "double-struck",
    mathcal: "script", mathfrak: "fraktur", mathrm: "normal", mathsf: "sans-serif", mathit: "italic",
    mathtt: "monospace", operatorname: "normal", rm: "normal" };
  const silent = new Set(("displaystyle textstyle scriptstyle limits nolimits nonumber notag left. hfill " +
    "normalsize large Large small centering").split(" "));
  const sizes = /^(?:[bB]ig{1,2}|Big{1,2})[lrm]?$/;
  const spaces = { ",": "\u2009", ":": "\u2005", ";": "\u2004", "!": "", " ": "\u00a0" };
  const matrices = { matrix: "open", pmatrix: "round", bmatrix: "square", Bmatrix: "round", vmatrix: "bars",
    Vmatrix: "bars double", smallmatrix: "open", array: "open", cases: "cases" };
  const alignments = new Set(("align align* aligned gather gather* gathered equation equation* split alignat alignat* " +
    "eqnarray eqnarray* multline multline* displaymath math").split(" "));
  const bases = { "double-struck": [0x1d538, 0x1d552, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
    script: [0x1d49c, 0x1d4b6, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ" }],
    fraktur: [0x1d504, 0x1d51e, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }], bold: [0x1d400, 0x1d41a, {}],
    "bold-italic": [0x1d468, 0x1d482, {}] };

  const styled = (character, variant) => {
    const base = bases[variant];
    if (!base) return character;
    if (base[2][character]) return base[2][character];
    if (/[A-Z]/.test(character)) return String.fromCodePoint(base[0] + character.charCodeAt(0) - 65);
    if (/[a-z]/.test(character)) return String.fromCodePoint(base[1] + character.charCodeAt(0) - 97);
    return character;
  };

  class Parser {
    constructor(source) {
      this.tokens = source.match(/\\(?:[a-zA-Z]+\*?|[\s\S])|\d+(?:[.,]\d+)*|%[^\n]*|\s+|[\s\S]/gu) || [];
      this.place = 0;
      this.variant = "";
    }
    get next() { return this.tokens[this.place]; }
    take() {
      if (this.place >= this.tokens.length) throw new Error("ends too early");
      return this.tokens[this.place++];
    }
    skip() { while (this.next !== undefined && /^(?:\s+|%[^\n]*)$/u.test(this.next)) this.place++; }

    // Nodes up to one of the tokens, which is left where it is.
    row(...ends) {
      const out = [];
      for (;;) {
        this.skip();
        if (this.next === undefined) {
          if (ends.includes(undefined)) return out;
          throw new Error("ends too early");
        }
        if (ends.includes(this.next)) return out;
        const node = this.scripted();
        if (node) out.push(node);
      }
    }
    // One thing with what stands above and below it.
    scripted() {
      let base = /^[\^_']$/.test(this.next) ? make("mrow") : this.atom();
      let sub = null, sup = null, primes = "";
      for (;;) {
        const before = this.place;
        this.skip();
        if (this.next === "'") { this.take(); primes += "′"; continue; }
        if (this.next === "^" && !sup) { this.take(); sup = this.argument(); continue; }
        if (this.next === "_" && !sub) { this.take(); sub = this.argument(); continue; }
        if (this.next === "\\limits" || this.next === "\\nolimits") { this.take(); continue; }
        if (!sub && !sup && !primes) this.place = before;
        break;
      }
      if (primes) sup = sup ? make("mrow", [make("mo", primes), sup]) : make("mo", primes);
      if (!sub && !sup) return base;
      base = base || make("mrow");
      const around = base.dataset && base.dataset.limits;
      if (sub && sup) return make(around ? "munderover" : "msubsup", [base, sub, sup]);
      if (sub) return make(around ? "munder" : "msub", [base, sub]);
      return make(around ? "mover" : "msup", [base, sup]);
    }
    // A braced group, a command with its arguments, or one character.
    argument() {
      this.skip();
      if (this.next !== undefined && /^\d{2,}/.test(this.next)) {  // 2^10 is 2^1 0
        const digits = this.next;
        this.tokens.splice(this.place, 1, digits[0], digits.slice(1));
      }
      const node = this.atom();
      return node || make("mrow");
    }
    group() {
      this.skip();
      if (this.next !== "{") throw new Error("expected a group");
      this.take();
      const content = this.row("}");
      this.take();
      return content.length === 1 ? content[0] : make("mrow", content);
    }
    // The characters of a group, unread.
    text() {
      this.skip();
      if (this.take() !== "{") throw new Error("expected a group");
      let depth = 1, out = "";
      while (depth) {
        const token = this.take();
        depth += token === "{" ? 1 : token === "}" ? -1 : 0;
        if (depth) out += token;
      }
      return out;
    }
    delimiter() {
      this.skip();
      const token = this.take();
      if (token === ".") return "";
      if (token === "\\{" || token === "\\}") return token[1];
      if (token === "\\|") return "‖";
      if (token[0] === "\\") {
        const found = operators[token.slice(1)];
        if (!found) throw new Error(`delimiter ${token}`);
        return found;
      }
      return token;
    }
    atom() {
      const token = this.take();
      if (token === "{") {
        const variant = this.variant;
        this.place--;
        const node = this.group();
        this.variant = variant;
        return node;
      }
      if (token === "}" || token === "&") throw new Error(`unexpected ${token}`);
      if (token[0] === "\\") return this.command(token.slice(1));
      if (/^\d/.test(token)) return make("mn", token);
      if (token === "~") return make("mtext", "\u00a0");
      if (token === "$") return null;
      if (/^\p{L}$/u.test(token)) {
        const shown = styled(token, this.variant);
        return make("mi", shown, this.variant && shown === token ? { mathvariant: "normal" } : {});
      }
      if (token === "-") return make("mo", "−");
      if (token === "*") return make("mo", "∗");
      if (/^[()[\]|/]$/.test(token)) return make("mo", token, { stretchy: "false" });
      if (/^[^\x00-\x7f]$/u.test(token) && !/^[\p{Sm}\p{P}]$/u.test(token)) return make("mtext", token);
      return make("mo", token);
    }
    command(name) {
      if (name in letters) return make("mi", letters[name], { mathvariant: "normal" });
      if (name === "quad" || name === "qquad") return make("mtext", operators[name]);
      if (name in operators) return make("mo", operators[name], /^[⌊⌋⌈⌉⟨⟩|‖{}[\]]$/.test(operators[name]) ? { stretchy: "false" } : {});
      if (name in large) {
        const node = make("mo", large[name]);
        if (!/int/.test(name)) node.dataset.limits = "true";
        return node;
      }
      if (functions.has(name)) return make("mrow", [make("mi", name), make("mo", "\u2061", { lspace: "0", rspace: "0.17em" })]);
      if (limits.has(name)) {
        const node = make("mo", name, { movablelimits: "true" });
        node.dataset.limits = "true";
        return node;
      }
      if (silent.has(name) || sizes.test(name)) return null;
      if (name in spaces) return spaces[name] ? make("mtext", spaces[name]) : null;
      if (/^[{}%$#&_]$/.test(name)) return /^[{}]$/.test(name) ? make("mo", name, { stretchy: "false" }) : make("mtext", name);
      if (name === "|") return make("mo", "‖", { stretchy: "false" });
      if (name === "\n" || name === "\t") return make("mtext", " ");
      if (name === "\\") return make("mspace", [], { linebreak: "newline" });
      switch (name) {
        case "frac": case "dfrac": case "tfrac": case "cfrac": {
          const numerator = this.argument();
          return make("mfrac", [numerator, this.argument()]);
        }
        case "binom": case "dbinom": case "tbinom": {
          const above = this.argument();
          const fraction = make("mfrac", [above, this.argument()], { linethickness: "0" });
          return make("mrow", [make("mo", "("), fraction, make("mo", ")")]);
        }
        case "sqrt": {
          this.skip();
          if (this.next !== "[") return make("msqrt", [this.argument()]);
          this.take();
          const index = make("mrow", this.row("]"));
          this.take();
          return make("mroot", [this.argument(), index]);
        }
        case "boxed": case "fbox":
          return make("mrow", [this.argument()], { class: "boxed" });
        case "text": case "textbf": case "textit": case "textrm": case "mbox": case "texttt": case "textsf":
          return make("mtext", this.text().replace(/\\([%$#&_{} ])/g, "$1").replace(/\$/g, "").replace(/^ | $/g, "\u00a0"));
        case "left": {
          const open = this.delimiter();
          const inside = this.row("\\right");
          this.take();
          const close = this.delimiter();
          const fence = (text) => (text ? [make("mo", text, { fence: "true", stretchy: "true" })] : []);
          return make("mrow", [...fence(open), ...inside, ...fence(close)]);
        }
        case "middle":
          return make("mo", this.delimiter(), { stretchy: "true" });
        case "stackrel": case "overset": {
          const above = this.argument();
          return make("mover", [this.argument(), above]);
        }
        case "underset": {
          const below = this.argument();
          return make("munder", [this.argument(), below]);
        }
        case "xrightarrow":
          return make("mover", [make("mo", "→"), this.argument()]);
        case "pmod":
          return make("mrow", [make("mtext", "\u2003("), make("mi", "mod"), make("mtext", "\u00a0"), this.argument(), make("mo", ")", { stretchy: "false" })]);
        case "mod": case "bmod":
          return make("mrow", [make("mtext", "\u00a0"), make("mi", "mod"), make("mtext", "\u00a0")]);
        case "pod":
          return make("mrow", [make("mo", "("), this.argument(), make("mo", ")")]);
        case "not": {
          const negated = this.argument();
          negated.textContent += "\u0338";
          return negated;
        }
        case "cancel": case "phantom": case "mathstrut": case "mathop": case "mathbin": case "mathrel": case "ensuremath":
          return name === "mathstrut" ? null : this.argument();
        case "tag": case "label": this.text(); return null;
        case "hspace": case "vspace": this.text(); return make("mtext", "\u2003");
        case "color": this.text(); return null;
        case "textcolor": this.text(); return this.argument();
        case "substack": {
          const lines = [[]];
          this.skip();
          if (this.take() !== "{") throw new Error("expected a group");
          for (;;) {
            lines[lines.length - 1].push(...this.row("\\\\", "}"));
            if (this.take() === "}") break;
            lines.push([]);
          }
          return make("mtable", lines.map((line) => make("mtr", [make("mtd", line)])));
        }
        case "begin": return this.environment(this.text());
        default:
      }
      if (name in accents) {
        const base = this.argument();
        return make("mover", [base, make("mo", accents[name], { stretchy: /over|wide/.test(name) ? "true" : "false" })], { accent: "true" });
      }
      if (name in under) return make("munder", [this.argument(), make("mo", under[name], { stretchy: "true" })]);
      if (name in variants) {
        const before = this.variant;
        this.variant = variants[name];
        const node = this.argument();
        if (name !== "rm") this.variant = before;
        return name === "operatorname" || name === "mathrm" ? joined(node) : node;
      }
      throw new Error(`unknown command ${name}`);
    }
    environment(name) {
      const plain = name.replace("*", "");
      if (!(name in matrices) && !alignments.has(name) && !(plain in matrices)) throw new Error(`environment ${name}`);
      if (plain === "array" || plain === "alignat") this.text();
      const rows = [[]];
      for (;;) {
        const cell = this.row("&", "\\\\", "\\cr", "\\hline", "\\end");
        const token = this.take();
        if (token === "\\hline") continue;
        rows[rows.length - 1].push(make("mtd", cell));
        if (token === "\\\\" || token === "\\cr") {
          this.skip();
          if (this.next === "[") { while (this.take() !== "]"); }
          rows.push([]);
        }
        if (token === "\\end") break;
      }
      this.text();
      const last = rows[rows.length - 1];
      if (rows.length > 1 && last.every((cell) => !cell.hasChildNodes())) rows.pop();
      const aligned = alignments.has(name);
      // Brackets are drawn as borders: without a mathematical font on the machine none would stretch.
      const look = aligned ? "aligned" : matrices[plain];
      return make("mtable", rows.map((row) => make("mtr", row)), aligned ? { class: look, displaystyle: "true" } : { class: look });
    }
  }

  // Letters of a name stand upright in one piece.
  const joined = (node) => {
    const text = node.textContent;
    return /^\p{L}+$/u.test(text) ? make("mi", text, { mathvariant: "normal" }) : node;
  };

  const formula = (source, display) => {
    try {
      const parser = new Parser(source);
      const content = parser.row(undefined);
      return make("math", [make("mrow", content)], { display: display ? "block" : "inline", alttext: source.trim() });
    } catch {
      const code = document.createElement("code");
      code.className = "tex";
      code.textContent = source.trim();
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
