// Notes, tables and commands, one after the other.
component("report/blocks", (element, data) => {
  const fillers = { note: fillNote, table: fillTable, command: fillCommand };
  element.className = "blocks";
  element.append(...data.map((block) => fillers[block.kind](block)));

  function fillNote(block) {
    return make("p", { className: block.is_warning ? "warning" : "note" }, block.text);
  }

  function fillCommand(block) {
    const text = make("pre", { tabIndex: 0, "aria-label": "command" }, block.text);
    return make("div", { className: "command" }, make("p", {}, block.about), text);
  }

  // A table that scrolls by itself where it is wider than the window; its first column names the rows.
  function fillTable(block) {
    const table = make("table", { className: block.is_numeric ? "numeric" : "" }, make("caption", {}, make("span", {}, block.caption)));
    if (block.head.length) {
      const names = block.head.map((name) => make("th", { scope: "col" }, name));
      table.append(make("thead", {}, make("tr", {}, ...names)));
    }
    const body = make("tbody");
    for (const [name, ...cells] of block.rows) {
      body.append(make("tr", {}, make("th", { scope: "row" }, ...breakable(name.text)), ...cells.map(fillCell)));
    }
    table.append(body);
    const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": block.caption }, table);
    scroll.addEventListener("scroll", () => scroll.classList.toggle("scrolled", scroll.scrollLeft > 0));
    return scroll;
  }

  // The name of a row, which may be broken within a key: behind its dots and underscores, and in no word.
  function breakable(name) {
    return name.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")]).slice(0, -1);
  }

  function fillCell(cell) {
    return make("td", { className: cell.is_marked ? "marked" : "" }, ...inside(cell));
  }

  function inside(cell) {
    return "half_width" in cell ? [fillInterval(cell)] : [cell.text];
  }

  // A score with its interval: as numbers, and as a line on a scale that the table's rows share.
  function fillInterval(cell) {
    const text = make("span", {}, `${cell.value.toFixed(2)} ± ${cell.half_width.toFixed(2)}`);
    const place = (value) => (100 * (value - cell.least)) / (cell.most - cell.least || 1);
    const from = place(cell.value - cell.half_width);
    const line = make("span", { className: "whisker", "aria-hidden": "true" });
    const bar = make("span", { className: "bar" });
    bar.style.left = `${from}%`;
    bar.style.width = `${place(cell.value + cell.half_width) - from}%`;
    const point = make("span", { className: "point" });
    point.style.left = `${place(cell.value)}%`;
    line.append(bar, point);
    return make("span", { className: "interval" }, text, line);
  }
});
