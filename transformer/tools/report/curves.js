// Curves over the steps of a training: a chart for each quantity, a colour for each run.
component("report/curves", (element, data) => {
  const HEIGHT = 220;
  const MARGIN = { left: 56, right: 18, top: 8, bottom: 24 };
  const DASHES = { solid: "", dashed: "6 4", dotted: "2 3" };
  const shownRuns = new Set(data.runs.keys());
  const count = new Intl.NumberFormat("en-US");

  const swatch = (run) => {
    const made = make("span", { className: "swatch" });
    made.style.background = data.colors[run];
    return made;
  };

  const runButtons = data.runs.map((name, run) => {
    const made = make("button", { type: "button", onclick: () => toggle(run), "aria-pressed": "true" }, swatch(run), name);
    return made;
  });
  const charts = data.charts.map(makeChart);
  element.className = "curves";
  if (data.runs.length > 1) {
    element.append(make("div", { className: "runs", role: "group", "aria-label": "runs" }, ...runButtons));
  }
  element.append(make("div", { className: "charts" }, ...charts.map((chart) => chart.figure)));

  function toggle(run) {
    if (!shownRuns.delete(run)) shownRuns.add(run);
    runButtons.forEach((button, n) => button.setAttribute("aria-pressed", shownRuns.has(n)));
    for (const chart of charts) chart.draw();
  }

  // ---- one chart

  function makeChart(chart) {
    const picture = svg("svg", { role: "img", "aria-label": `${chart.title} over steps` });
    const readout = make("output", { "aria-live": "polite" });
    const kinds = [...new Map(chart.lines.map((line) => [line.label, line.dash]))];
    const legend = kinds.map(([label, dash]) => make("span", { className: "kind" }, sampleOf(dash), label));
    const title = make("figcaption", {}, make("strong", {}, chart.title), make("span", { className: "unit" }, chart.unit), ...(kinds.length > 1 ? legend : []));
    const note = chart.note ? [make("p", { className: "note" }, chart.note)] : [];
    const figure = make("figure", { tabIndex: 0, "data-chart": chart.title }, title, picture, readout, ...note);
    let cursor = null; // a step
    let scales = null;

    function draw() {
      const lines = chart.lines.filter((line) => shownRuns.has(line.run));
      const width = Math.max(240, figure.clientWidth);
      scales = scalesOf(lines, chart.is_logarithmic, width);
      setAttributes(picture, { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT });
      picture.replaceChildren(...axes(scales, width), ...lines.flatMap(drawLine), ...drawCursor(lines));
    }

    function drawLine(line) {
      const points = line.points.filter(([, value]) => scales.has(value));
      const path = points.map(([step, value]) => `${scales.x(step).toFixed(1)},${scales.y(value).toFixed(1)}`).join(" ");
      const color = data.colors[line.run];
      const drawn = [svg("polyline", { points: path, fill: "none", stroke: color, "stroke-width": 1.75, "stroke-dasharray": DASHES[line.dash], "stroke-linejoin": "round" })];
      if (points.length <= 30) {
        drawn.push(...points.map(([step, value]) => svg("circle", { cx: scales.x(step), cy: scales.y(value), r: 2.5, fill: color })));
      }
      return drawn;
    }

    // The steps under the cursor, and what each line has at the step nearest to it.
    function drawCursor(lines) {
      if (cursor === null || !lines.length) {
        readout.textContent = "\u00a0";
        return [];
      }
      const found = lines.map((line) => [line, nearest(line.points, cursor)]);
      const said = found.map(([line, [step, value]]) => {
        const name = [data.runs.length > 1 ? data.runs[line.run] : "", kinds.length > 1 ? line.label : ""].filter(Boolean).join(" ");
        const at = step === cursor ? "" : ` (step ${count.format(step)})`;
        return `${name} ${figures(value)}${at}`.trim();
      });
      readout.textContent = `step ${count.format(cursor)}: ${said.join(" · ")}`;
      const x = scales.x(cursor);
      const rule = svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, class: "cursor" });
      const dots = found.filter(([, [, value]]) => scales.has(value)).map(([line, [step, value]]) =>
        svg("circle", { cx: scales.x(step), cy: scales.y(value), r: 4, fill: data.colors[line.run], class: "dot" }));
      return [rule, ...dots];
    }

    function steps() {
      const lines = chart.lines.filter((line) => shownRuns.has(line.run));
      return [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
    }

    function moveTo(step) {
      cursor = step ?? null;
      draw();
    }

    picture.addEventListener("pointermove", (event) => {
      const wanted = scales.step(event.offsetX);
      moveTo(steps().reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), Infinity));
    });
    picture.addEventListener("pointerleave", () => moveTo(null));
    figure.addEventListener("blur", () => moveTo(null));
    figure.addEventListener("keydown", (event) => {
      const all = steps();
      const at = all.indexOf(cursor);
      const wanted = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (event.key === "Escape") return moveTo(null);
      if (wanted === undefined || !all.length) return;
      event.preventDefault();
      moveTo(all[Math.max(0, Math.min(wanted, all.length - 1))]);
    });
    return { figure, draw };
  }

  function sampleOf(dash) {
    const line = svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": DASHES[dash] });
    const made = svg("svg", { width: 24, height: 8, "aria-hidden": "true" });
    made.append(line);
    return made;
  }

  function nearest(points, step) {
    return points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  }

  // ---- scales and axes

  function scalesOf(lines, isLogarithmic, width) {
    const points = lines.flatMap((line) => line.points);
    const has = (value) => !isLogarithmic || value > 0;
    const values = points.map(([, value]) => value).filter(has);
    const lastStep = points.reduce((most, [step]) => Math.max(most, step), 1);
    const ends = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    const [least, most] = ends[0] > ends[1] ? [isLogarithmic ? 0.1 : 0, 1] : ends;
    const ticks = isLogarithmic ? logarithmicTicks(least, most) : linearTicks(least, most, 4);
    const to = isLogarithmic ? Math.log : (value) => value;
    const low = Math.min(to(least), to(ticks[0]));
    const high = Math.max(to(most), to(ticks[ticks.length - 1]));
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    return {
      ticks,
      has,
      lastStep,
      x: (step) => MARGIN.left + (inner.width * step) / lastStep,
      y: (value) => MARGIN.top + inner.height * (1 - (to(value) - low) / (high - low || 1)),
      step: (x) => ((x - MARGIN.left) / inner.width) * lastStep,
    };
  }

  function linearTicks(least, most, wanted) {
    const rough = (most - least || Math.abs(most) || 1) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const first = Math.floor(least / unit);
    const last = Math.ceil(most / unit);
    return Array.from({ length: Math.max(1, last - first) + 1 }, (_, n) => (first + n) * unit);
  }

  function logarithmicTicks(least, most) {
    const decades = Math.log10(most / least);
    const factors = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
      for (const factor of factors) ticks.push(factor * 10 ** power);
    }
    const first = Math.max(0, ticks.findLastIndex((tick) => tick <= least));
    const last = ticks.findIndex((tick) => tick >= most);
    return ticks.slice(first, last < 0 ? undefined : Math.max(last, first + 1) + 1);
  }

  function axes(scales, width) {
    const bottom = HEIGHT - MARGIN.bottom;
    const across = scales.ticks.flatMap((tick) => {
      const y = scales.y(tick);
      const label = svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" });
      label.textContent = shortNumber(tick);
      return [svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "grid" }), label];
    });
    const along = linearTicks(0, scales.lastStep, width < 400 ? 3 : 5)
      .filter((tick) => tick <= scales.lastStep)
      .map((tick) => {
        const label = svg("text", { x: scales.x(tick), y: bottom + 18, "text-anchor": "middle" });
        label.textContent = shortNumber(tick);
        return label;
      });
    return [...across, ...along];
  }

  function shortNumber(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
    if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
    if (size > 0 && size < 1e-3) return Number(value.toPrecision(2)).toExponential();
    return String(Number(value.toPrecision(3)));
  }

  function figures(value) {
    return Math.abs(value) >= 1000 ? count.format(Math.round(value)) : String(Number(value.toPrecision(4)));
  }

  // ---- elements of a picture

  function svg(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    setAttributes(made, attributes);
    return made;
  }

  function setAttributes(target, attributes) {
    for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, value);
  }

  const drawAll = () => charts.forEach((chart) => chart.draw());
  window.addEventListener("resize", drawAll);
  drawAll();
});
