// The explorers of several sentences, one of which is shown.
component("report/attention", (element, data) => {
  const buttons = data.map((one, n) => make("button", { type: "button", onclick: () => choose(n) }, one.label));
  const title = make("p", { className: "sentence", dir: "auto" });
  const views = new Map(); // by number, made when it is first shown

  element.className = "pages";
  element.append(make("div", { className: "group", role: "group", "aria-label": "sentence" }, ...buttons), title);

  function choose(number) {
    buttons.forEach((one, n) => one.setAttribute("aria-pressed", n === number));
    title.textContent = data[number].heading;
    if (!views.has(number)) {
      const view = make("div", { id: `explorer-${number + 1}` });
      element.append(view);
      views.set(number, view);
      kinds.get("attention/explorer")(view, data[number].explorer);
    }
    for (const [n, view] of views) view.hidden = n !== number;
    window.dispatchEvent(new Event("resize")); // what was hidden has no width, and is drawn anew
  }

  choose(0);
});
