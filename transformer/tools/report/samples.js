// Sample translations, ordered by their score, with the differences from the reference marked.
component("report/samples", (element, data) => {
  const ORDERS = ["best first", "worst first"];
  const state = { set: 0, order: 0 };

  const button = (text, press) => make("button", { type: "button", onclick: press }, text);
  const setButtons = data.sets.map((set, n) => button(set.name, () => change({ set: n })));
  const orderButtons = ORDERS.map((name, n) => button(name, () => change({ order: n })));
  const note = make("p", { className: "note" });
  const list = make("ol");

  const group = (name, buttons) => make("div", { className: "group", role: "group", "aria-label": name }, ...buttons);
  element.className = "samples";
  element.append(
    make("div", { className: "controls" },
      ...(setButtons.length > 1 ? [group("test set", setButtons)] : []),
      group("order", orderButtons)),
    note,
    list,
  );

  function change(changes) {
    Object.assign(state, changes);
    setButtons.forEach((one, n) => one.setAttribute("aria-pressed", n === state.set));
    orderButtons.forEach((one, n) => one.setAttribute("aria-pressed", n === state.order));
    const set = data.sets[state.set];
    note.textContent = set.note;
    const shown = set.samples.map(fillSample);
    list.replaceChildren(...(state.order === 0 ? shown : shown.reverse()));
  }

  function fillSample(sample) {
    const rows = [
      row("source", "", [sample.source]),
      row("reference", "", sample.reference.map(([text, missedBy]) => marked(text, missedBy.length > 0, "missed", by(missedBy)))),
      ...sample.translations.map((translation, n) => {
        const parts = translation.parts.map(([text, isExtra]) => marked(text, isExtra, "extra", "not in the reference"));
        return row(data.runs.length > 1 ? data.runs[n] : "translation", translation.score.toFixed(1), parts);
      }),
    ];
    return make("li", { "data-line": sample.line }, make("p", { className: "line" }, `line ${sample.line}`), make("dl", {}, ...rows.flat()));
  }

  function by(runs) {
    return data.runs.length > 1 ? `missing in ${runs.map((n) => data.runs[n]).join(", ")}` : "missing in the translation";
  }

  function row(name, score, parts) {
    const label = score === "" ? [name] : [name, make("span", { className: "score" }, score)];
    return [make("dt", {}, ...label), make("dd", { dir: "auto" }, ...(parts.length ? parts : ["(empty)"]))];
  }

  function marked(text, isMarked, kind, title) {
    return isMarked ? make("mark", { className: kind, title }, text) : text;
  }

  change({});
});
