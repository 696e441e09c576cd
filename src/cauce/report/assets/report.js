"use strict";
// Draws the figures and the two viewers of the report. Every text of a model reaches the page through textContent.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const isNarrow = () => window.innerWidth < 640;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // "$reward" stands for the theme's colour of that name.
  function coloured(value) {
    if (typeof value === "string" && value.startsWith("$")) return css(value.slice(1));
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
    }
    return value;
  }

  function layoutOf(figure) {
    const axis = { gridcolor: css("grid"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true };
    const given = coloured(figure.layout);
    const isTouch = window.matchMedia("(pointer: coarse)").matches;
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("text"), size: 12, family: getComputedStyle(document.body).fontFamily },
      margin: { l: 46, r: 10, t: figure.layout.showlegend ? 8 : 6, b: 36 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("text") } },
      showlegend: false,
      dragmode: isTouch ? false : "zoom",
      autosize: true,
      ...given,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, ...(given.legend || {}) },
      xaxis: { ...axis, title: { text: "plan", standoff: 4 }, ...planTicks(figure), ...(given.xaxis || {}) },
      yaxis: { ...axis, ...(given.yaxis || {}) },
    };
  }

  // A run of a few plans has no plan 1.5.
  function planTicks(figure) {
    const numbers = figure.traces.flatMap((trace) => trace.x);
    if (!numbers.every(Number.isInteger)) return {};
    const low = Math.min(...numbers), high = Math.max(...numbers);
    return high - low <= 8 ? { dtick: 1, range: [low - 0.6, high + 0.6] } : {};
  }

  function drawFigures() {
    for (const figure of data.figures) {
      const place = document.getElementById("plot-" + figure.key);
      const config = { responsive: true, displaylogo: false, displayModeBar: isNarrow() ? false : "hover" };
      Plotly.react(place, coloured(figure.traces), layoutOf(figure), config);
    }
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function fill(select, options) {
    for (const [value, text] of options) {
      const option = element("option", "", text);
      option.value = value;
      select.append(option);
    }
  }

  // A list behind two filters and two buttons; `show` draws the chosen item.
  function viewer(root, items, filters, show) {
    if (!root) return;
    const [back, next] = root.querySelectorAll("button");
    const count = root.querySelector(".count");
    const body = root.querySelector(".item");
    let shown = items, at = 0;
    const draw = () => {
      count.textContent = shown.length ? `${at + 1} of ${shown.length}` : "0 of 0";
      back.disabled = at === 0;
      next.disabled = at >= shown.length - 1;
      body.replaceChildren();
      if (shown.length) show(body, shown[at]);
      else body.append(element("p", "empty", "None match these filters."));
    };
    const filter = () => {
      shown = items.filter((item) => filters.every(({ select, test }) => test(item, select.value)));
      at = 0;
      draw();
    };
    for (const { select } of filters) select.addEventListener("change", filter);
    back.addEventListener("click", () => { at -= 1; draw(); });
    next.addEventListener("click", () => { at += 1; draw(); });
    root.addEventListener("keydown", (event) => {
      if (event.target.tagName === "SELECT") return;
      if (event.key === "ArrowLeft" && !back.disabled) back.click();
      if (event.key === "ArrowRight" && !next.disabled) next.click();
    });
    filter();
  }

  const percent = (p) => (p >= 0.9995 ? "99.9+ %" : (100 * p).toPrecision(3) + " %");

  function tokenSpans(sample, readout) {
    const text = element("p", "text answer");
    let chosen = null;
    sample.tokens.forEach((token, i) => {
      const p = Math.exp(sample.logps[i]);
      const span = element("span", token === "" ? "token part" : "token", token.replaceAll("\n", "\u21b5\n"));
      const says = `p = ${percent(p)}, log p = ${sample.logps[i].toFixed(3)}, token ${i + 1} of ${sample.tokens.length}`;
      span.title = says;
      span.style.setProperty("--doubt", ((1 - p) * 0.75).toFixed(3));
      // A finger cannot hover, so a tap writes the same words below the text.
      span.addEventListener("click", () => {
        if (chosen) chosen.classList.remove("chosen");
        chosen = span;
        span.classList.add("chosen");
        readout.textContent = `${JSON.stringify(token)}: ${says}`;
      });
      text.append(span);
    });
    if (!sample.tokens.length) text.append(element("span", "empty", "(no tokens)"));
    return text;
  }

  function showSample(body, sample) {
    const facts = element("p", "facts");
    const bold = (text) => facts.append(element("b", "", text));
    facts.append("plan "); bold(sample.plan);
    facts.append(", task "); bold(sample.task);
    facts.append(", answer "); bold(sample.index + 1);
    facts.append(", reward "); bold(sample.reward === null ? `none (${sample.status})` : +sample.reward.toPrecision(6));
    facts.append(`, ${sample.tokens.length} tokens, `);
    facts.append(sample.finish === "length" ? "truncated" : `ended by ${sample.finish}`);
    const readout = element("p", "readout", "Hover over a token, or tap it, for its probability.");
    body.append(facts, element("p", "label", "prompt"), element("p", "text prompt", data.prompts[sample.prompt]));
    body.append(element("p", "label", "answer"), tokenSpans(sample, readout), readout);
  }

  function showPair(body, pair) {
    body.append(element("p", "label", `task ${pair.task}`), element("p", "text prompt", pair.prompt));
    if (pair.gold) body.append(element("p", "label", "gold"), element("p", "text", pair.gold));
    const both = element("div", "pair");
    for (const name of ["before", "after"]) {
      const side = element("div"), answer = pair[name];
      const label = element("p", "label", name + ": ");
      const isGood = answer.reward !== null && answer.reward > 0;
      label.append(element("b", isGood ? "good" : "bad", answer.reward === null ? "no score" : `reward ${answer.reward}`));
      label.append(`, ${answer.num_tokens} tokens${answer.finish === "length" ? ", truncated" : ""}`);
      side.append(label, element("p", "text", answer.text || "(empty)"));
      both.append(side);
    }
    body.append(both);
  }

  function startSamples() {
    const root = document.getElementById("sample-viewer");
    if (!root) return;
    const [plan, reward] = root.querySelectorAll("select");
    const plans = [...new Set(data.samples.map((sample) => sample.plan))];
    fill(plan, [["", "all plans"], ...plans.map((number) => [String(number), `plan ${number}`])]);
    const rewards = data.samples.map((sample) => sample.reward).filter((value) => value !== null);
    const distinct = [...new Set(rewards)].sort((a, b) => a - b);
    const options = [["", "any reward"]];
    if (distinct.length <= 8) for (const value of distinct) options.push([`=${value}`, `reward ${+value.toPrecision(6)}`]);
    else {
      const middle = distinct[Math.floor(distinct.length / 2)];
      options.push([`<${middle}`, `below ${+middle.toPrecision(4)}`], [`>${middle}`, `${+middle.toPrecision(4)} or more`]);
    }
    if (rewards.length < data.samples.length) options.push(["none", "no reward"]);
    fill(reward, options);
    const isOfReward = (sample, wanted) => {
      if (wanted === "") return true;
      if (wanted === "none") return sample.reward === null;
      const bound = Number(wanted.slice(1));
      if (sample.reward === null) return false;
      return wanted[0] === "=" ? sample.reward === bound
        : wanted[0] === "<" ? sample.reward < bound : sample.reward >= bound;
    };
    viewer(root, data.samples, [
      { select: plan, test: (sample, wanted) => wanted === "" || String(sample.plan) === wanted },
      { select: reward, test: isOfReward },
    ], showSample);
  }

  function startPairs() {
    const root = document.getElementById("pair-viewer");
    if (!root) return;
    const [kind] = root.querySelectorAll("select");
    const change = (pair) => (pair.after.reward ?? 0) - (pair.before.reward ?? 0);
    const kinds = {
      all: ["all", () => true],
      better: ["better after", (pair) => change(pair) > 0],
      worse: ["worse after", (pair) => change(pair) < 0],
      same: ["same reward", (pair) => change(pair) === 0],
    };
    fill(kind, Object.entries(kinds).map(([key, [text, test]]) => [key, `${text} (${data.pairs.filter(test).length})`]));
    viewer(root, data.pairs, [{ select: kind, test: (pair, wanted) => kinds[wanted][1](pair) }], showPair);
  }

  drawFigures();
  startSamples();
  startPairs();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawFigures);
})();
