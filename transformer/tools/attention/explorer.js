
// The explorer of attention weights of one sentence pair. `explorer.py` makes `data`; `page.js` has component() and make().
//
//   state            what is chosen: role, layer, heads, a pinned word, and what the pointer is over
//   change(...)      a new choice: unpacks the layer, fills the word lists, draws, and notes the choice in the address
//   draw()           everything that depends on the state
//
// Positions, layers and heads are counted from 0 here, from 1 in the address.
component("attention/explorer", (element, data) => {
  const ROLES = [
    { key: "encoder_self", name: "Encoder self", from: "source", to: "source", queries: data.source, keys: data.source },
    { key: "decoder_self", name: "Decoder self", from: "read", to: "read so far", queries: data.reads, keys: data.reads },
    { key: "cross", name: "Cross", from: "predicted", to: "source", queries: data.predicts, keys: data.source },
  ];
  const FAINTEST = 0.004; // weights below are not drawn as lines; while all words are drawn, five times that
  const LONG = 40; // more words than this stand closer
  const allHeads = () => Array.from({ length: data.heads }, (_, head) => head);
  const unpacked = new Map(); // the layers that have been shown
  const prefix = element.id ? `${element.id}-` : ""; // where a page has several explorers

  const state = { role: 0, layer: 0, heads: allHeads(), pin: null, query: null, key: null };
  let weights = null; // of the layer that is shown, in thousandths: (heads, queries, keys)

  // ---- numbers

  // The weights of a layer in thousandths, unpacked when they are first shown: see `_pack` in explorer.py.
  async function unpack(role, layer) {
    const name = `${role} ${layer}`;
    if (!unpacked.has(name)) {
      const bytes = Uint8Array.from(atob(data.weights[role][layer]), (character) => character.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      const view = new DataView(await new Response(stream).arrayBuffer());
      const values = new Uint16Array(view.byteLength / 2);
      for (let n = 0; n < values.length; n++) values[n] = view.getUint16(2 * n, true);
      unpacked.set(name, values);
    }
    return unpacked.get(name);
  }

  const role = () => ROLES[state.role];
  const weight = (head, query, key) =>
    weights[(head * role().queries.length + query) * role().keys.length + key] / 1000;
  const mean = (query, key) =>
    state.heads.reduce((sum, head) => sum + weight(head, query, key), 0) / state.heads.length;

  // ---- elements

  const button = (text, press, properties = {}) => make("button", { type: "button", onclick: press, ...properties }, text);
  const roleButtons = ROLES.map((one, n) => button(one.name, () => change({ role: n, pin: null })));
  const layersOf = (one) => data.weights[one.key].length; // encoder and decoder may differ in depth
  const mostLayers = Math.max(...ROLES.map(layersOf));
  const layerButtons = Array.from({ length: mostLayers }, (_, n) => button(String(n + 1), () => change({ layer: n })));
  const thumbs = allHeads().map(() => make("canvas", { "aria-hidden": "true" }));
  const headButtons = allHeads().map((head) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = data.colors[head];
    const name = make("span", { className: "name" }, swatch, String(head + 1));
    const made = button("", (event) => chooseHead(head, event.shiftKey), { "aria-label": `head ${head + 1}` });
    made.append(thumbs[head], name);
    return made;
  });
  const everyHead = button("all", () => change({ heads: allHeads() }));

  const readout = make("output", { className: "readout", "aria-live": "polite" });
  const queryCaption = make("span", { className: "caption" });
  const keyCaption = make("span", { className: "caption" });
  const queryList = make("ul", { className: "column queries", role: "listbox", tabIndex: 0, "aria-label": "words that look" });
  const keyList = make("ul", { className: "column keys", "aria-label": "words that are looked at" });
  const lines = make("canvas", { "aria-hidden": "true" });
  const mapTitle = make("h3");
  const map = make("canvas", { "aria-label": "heat map: rows look, columns are looked at" });
  const scroll = make("div", { className: "scroll" }, map);

  const group = (name, className, ...children) =>
    make("div", { className: `group ${className}`, role: "group", "aria-label": name }, make("span", {}, name), ...children);
  const key = (name) => make("kbd", {}, name);
  element.className = "explorer";
  element.append(
    make("div", { className: "controls" }, group("attention", "roles", ...roleButtons), group("layer", "layers", ...layerButtons)),
    make("div", { className: "controls" }, group("heads", "heads", ...headButtons, everyHead)),
    readout,
    make("div", { className: "views" },
      make("div", {},
        make("h3", {}, "Who looks at whom"),
        make("div", { className: "words" }, queryCaption, make("span"), keyCaption, queryList, make("div", {}, lines), keyList)),
      make("div", {}, mapTitle, scroll)),
    make("details", {}, make("summary", {}, "Keys, and how to read this"),
      make("p", {}, key("↑"), " ", key("↓"), " pin the word before or behind, ", key("Esc"), " lets go; ",
        key("←"), " ", key("→"), " layer; ", key("r"), " attention; ", key("1"), " to ", key("9"), " one head, with ",
        key("Shift"), " one more or one less; ", key("0"), " all heads. A click on a head chooses it alone, a second click all."),
      make("p", {}, "The thickness of a line is its weight; a shade is the square root of it, so that small weights " +
        "are seen. Several heads share the heat map as their mean. At a position of the decoder the word before has " +
        "been read and the next one is predicted: cross-attention is listed by the word that is predicted.")),
  );

  // ---- changes

  // Choose a head alone, or all heads where it was alone; with `isAdded`, add it to the others or take it away.
  function chooseHead(head, isAdded) {
    const isOnly = state.heads.length === 1 && state.heads[0] === head;
    if (!isAdded) return change({ heads: isOnly ? allHeads() : [head] });
    const others = state.heads.filter((other) => other !== head);
    const chosen = others.length === state.heads.length ? [...others, head].sort((a, b) => a - b) : others;
    return change({ heads: chosen.length ? chosen : allHeads() });
  }

  async function change(changes) {
    Object.assign(state, { query: null, key: null }, changes);
    state.layer = Math.min(state.layer, layersOf(role()) - 1);
    const layerWeights = await unpack(role().key, state.layer);
    if (layerWeights !== unpacked.get(`${role().key} ${state.layer}`)) return; // another change came in between
    weights = layerWeights;
    const last = role().queries.length - 1;
    if (state.pin !== null) state.pin = Math.max(0, Math.min(state.pin, last));
    fillLists();
    draw();
    remember();
    element.dataset.ready = "true";
  }

  // The pointer is over this query and this key; null where it is over none.
  function point(query, key) {
    if (state.query === query && state.key === key) return;
    state.query = query;
    state.key = key;
    draw();
  }

  // Only an explorer that is alone on its page keeps its state in the address, and hears keys from the whole page.
  const isAlone = document.querySelectorAll('[data-component="attention/explorer"]').length === 1;

  // Write the state into the page's address, so that a link shows the same.
  function remember() {
    if (!isAlone) return;
    const parts = [`role=${role().key}`, `layer=${state.layer + 1}`];
    if (state.heads.length < data.heads) parts.push(`head=${state.heads.map((head) => head + 1).join(",")}`);
    if (state.pin !== null) parts.push(`pin=${state.pin + 1}`);
    history.replaceState(null, "", `#${parts.join("&")}`);
  }

  // The cross-attention of the last layer, from one word: all that is seen at once can be read.
  const opening = () => ({ role: 2, layer: layersOf(ROLES[2]) - 1, heads: allHeads(), pin: data.pinned });

  // The state that the address asks for; what it names wrongly is the default.
  function recall() {
    const address = isAlone ? new URLSearchParams(location.hash.slice(1)) : new URLSearchParams();
    const within = (text, count) => {
      const number = Number.parseInt(text, 10) - 1;
      return number >= 0 && number < count ? number : null;
    };
    const chosen = ROLES.findIndex((one) => one.key === address.get("role"));
    if (chosen < 0) return opening();
    const heads = (address.get("head") ?? "").split(",").map((text) => within(text, data.heads)).filter((n) => n !== null);
    return {
      role: chosen,
      layer: within(address.get("layer"), layersOf(ROLES[chosen])) ?? 0,
      heads: heads.length ? [...new Set(heads)].sort((a, b) => a - b) : allHeads(),
      pin: within(address.get("pin"), ROLES[chosen].queries.length),
    };
  }

  // ---- what is seen

  // The row that is looked from: the pinned word, else the one under the pointer.
  const focusedQuery = () => state.pin ?? state.query;

  function fillLists() {
    const fill = (list, words, name) => {
      const items = words.map((word, n) => make("li", { dir: "auto", title: word, id: `${prefix}${name}-${n + 1}` }, ...marked(word)));
      list.replaceChildren(...items);
    };
    queryCaption.textContent = role().from;
    keyCaption.textContent = role().to;
    fill(queryList, role().queries, "query");
    fill(keyList, role().keys, "key");
    element.classList.toggle("long", Math.max(role().queries.length, role().keys.length) > LONG);
    for (const item of queryList.children) item.setAttribute("role", "option");
  }

  // A piece as text, with the mark of a space before it drawn lightly, as on the map too; and without that mark.
  const SPACE = "\u2581";
  const unmarked = (word) => (word.startsWith(SPACE) && word.length > 1 ? word.slice(1) : word);
  const marked = (word) => (word === unmarked(word) ? [word] : [make("span", { className: "space" }, SPACE), unmarked(word)]);

  function draw() {
    roleButtons.forEach((one, n) => one.setAttribute("aria-pressed", n === state.role));
    layerButtons.forEach((one, n) => {
      one.setAttribute("aria-pressed", n === state.layer);
      one.hidden = n >= layersOf(role());
    });
    headButtons.forEach((one, head) => one.setAttribute("aria-pressed", state.heads.includes(head)));
    everyHead.setAttribute("aria-pressed", state.heads.length === data.heads);
    drawThumbs();
    drawReadout();
    drawWords();
    drawLines();
    drawMap();
  }

  function drawReadout() {
    const query = state.key !== null && state.query !== null ? state.query : focusedQuery();
    const { queries, keys } = role();
    if (query === null && state.key === null) {
      readout.replaceChildren("Point at a word or at a cell to see its weights; click on a word to pin it.");
      return;
    }
    const quoted = (word) => make("q", { dir: "auto" }, unmarked(word));
    if (query === null) {
      const strongest = strongestOf(queries.length, (n) => mean(n, state.key));
      const values = strongest.map((n) => valueOf(quoted(queries[n]), mean(n, state.key)));
      readout.replaceChildren(quoted(keys[state.key]), " is looked at most by", make("div", { className: "values" }, ...values));
      return;
    }
    const about = [quoted(queries[query])];
    if (role().key === "cross") about.push(" (predicted, having read ", quoted(data.reads[query]), ")");
    if (state.key === null) {
      const strongest = strongestOf(keys.length, (n) => mean(query, n));
      const values = strongest.map((n) => valueOf(quoted(keys[n]), mean(query, n)));
      readout.replaceChildren(...about, " looks most at", make("div", { className: "values" }, ...values));
      return;
    }
    const heads = state.heads.map((head) => {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = data.colors[head];
      const value = weight(head, query, state.key).toFixed(3);
      return make("span", { "data-head": head + 1, "data-weight": value }, swatch, ` ${head + 1}: ${value}`);
    });
    const average = mean(query, state.key).toFixed(3);
    const total = state.heads.length > 1 ? ` ${average} (mean)` : ` ${average}`;
    readout.replaceChildren(...about, " → ", quoted(keys[state.key]), total, make("div", { className: "values" }, ...heads));
  }

  const valueOf = (name, value) => make("span", {}, name, ` ${value.toFixed(3)}`);

  // The places of the six largest values.
  function strongestOf(count, value) {
    return Array.from({ length: count }, (_, n) => n).sort((a, b) => value(b) - value(a)).slice(0, 6);
  }

  function drawWords() {
    const query = focusedQuery();
    Array.from(queryList.children).forEach((item, n) => {
      item.setAttribute("aria-selected", n === state.pin);
      item.classList.toggle("near", n === query);
      item.classList.toggle("quiet", query !== null ? n !== query : state.key !== null && mean(n, state.key) < 0.02);
    });
    Array.from(keyList.children).forEach((item, n) => {
      item.classList.toggle("near", n === state.key);
      item.classList.toggle("quiet", query !== null && n !== state.key && mean(query, n) < 0.02);
    });
    queryList.setAttribute("aria-activedescendant", state.pin === null ? "" : `${prefix}query-${state.pin + 1}`);
  }

  // A canvas of this size in CSS pixels, sharp on every screen; returns its context.
  function resize(canvas, width, height) {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return context;
  }

  function drawLines() {
    const { queries, keys } = role();
    const box = lines.parentElement;
    const row = queryList.firstElementChild.offsetHeight;
    const height = row * Math.max(queries.length, keys.length);
    const width = box.clientWidth;
    const context = resize(lines, width, height);
    const only = focusedQuery();
    const spread = Math.min(3, (row - 10) / data.heads); // heads end beside one another, not on top of each other
    for (const head of state.heads) {
      const shift = row / 2 + spread * (head - (data.heads - 1) / 2);
      context.strokeStyle = data.colors[head];
      for (let query = 0; query < queries.length; query++) {
        if (only !== null && query !== only) continue;
        for (let key = 0; key < keys.length; key++) {
          if (only === null && state.key !== null && key !== state.key) continue;
          const value = weight(head, query, key);
          if (value < (only === null && state.key === null ? 5 * FAINTEST : FAINTEST)) continue;
          context.globalAlpha = Math.min(1, 0.1 + value);
          context.lineWidth = 0.5 + 4 * value;
          context.beginPath();
          context.moveTo(0, row * query + shift);
          context.lineTo(width, row * key + shift);
          context.stroke();
        }
      }
    }
  }

  const shade = (value) => Math.sqrt(value);

  function drawThumbs() {
    const { queries, keys } = role();
    thumbs.forEach((canvas, head) => {
      canvas.width = keys.length;
      canvas.height = queries.length;
      const context = canvas.getContext("2d");
      context.fillStyle = data.colors[head];
      for (let query = 0; query < queries.length; query++) {
        for (let key = 0; key < keys.length; key++) {
          context.globalAlpha = shade(weight(head, query, key));
          context.fillRect(key, query, 1, 1);
        }
      }
    });
  }

  // Where the heat map's cells are: margins for the words, and the size of a cell.
  function mapGeometry() {
    const { queries, keys } = role();
    const context = map.getContext("2d");
    context.font = labelFont(11);
    const longest = (words) => Math.min(110, Math.max(...words.map((word) => context.measureText(word).width)) + 8);
    const left = longest(queries);
    const top = longest(keys);
    const cell = Math.max(12, Math.min(32, Math.floor((scroll.clientWidth - left - 1) / keys.length)));
    return { left, top, cell, width: left + cell * keys.length + 1, height: top + cell * queries.length + 1 };
  }

  const labelFont = (size) => `${size}px system-ui, sans-serif`;

  // Write a piece that ends or begins at `x`, squeezed where it is wider than this.
  function drawPiece(context, word, x, y, width) {
    const text = unmarked(word);
    const mark = word === text ? "" : SPACE;
    const squeeze = Math.min(1, width / context.measureText(word).width);
    const [markWidth, textWidth] = [mark, text].map((part) => squeeze * context.measureText(part).width);
    const isAtEnd = context.textAlign === "right";
    context.fillText(text, isAtEnd ? x : x + markWidth, y, Math.max(1, textWidth));
    if (mark === "") return;
    context.globalAlpha = 0.35;
    context.fillText(mark, isAtEnd ? x - textWidth : x, y, Math.max(1, markWidth));
    context.globalAlpha = 1;
  }

  function drawMap() {
    const { queries, keys } = role();
    const { left, top, cell, width, height } = mapGeometry();
    const context = resize(map, width, height);
    const several = state.heads.length > 1;
    mapTitle.textContent = several ? `Heat map, mean of ${state.heads.length} heads` : `Heat map of head ${state.heads[0] + 1}`;

    context.fillStyle = several ? styleOf(element, "--accent") : data.colors[state.heads[0]];
    for (let query = 0; query < queries.length; query++) {
      for (let key = 0; key < keys.length; key++) {
        context.globalAlpha = shade(mean(query, key));
        context.fillRect(left + key * cell, top + query * cell, cell - 1, cell - 1);
      }
    }

    context.globalAlpha = 1;
    context.strokeStyle = styleOf(element, "--line");
    context.strokeRect(left - 1, top - 1, keys.length * cell + 1, queries.length * cell + 1);
    const focused = focusedQuery();
    context.textBaseline = "middle";
    context.textAlign = "right";
    queries.forEach((word, n) => {
      context.fillStyle = styleOf(element, n === focused ? "--accent" : "--ink");
      context.font = n === focused ? `bold ${labelFont(11)}` : labelFont(11);
      drawPiece(context, word, left - 4, top + (n + 0.5) * cell, left - 6);
    });
    context.textAlign = "left";
    keys.forEach((word, n) => {
      context.fillStyle = styleOf(element, n === state.key ? "--accent" : "--ink");
      context.font = n === state.key ? `bold ${labelFont(11)}` : labelFont(11);
      context.save();
      context.translate(left + (n + 0.5) * cell, top - 4);
      context.rotate(-Math.PI / 2);
      drawPiece(context, word, 0, 0, top - 6);
      context.restore();
    });

    context.strokeStyle = styleOf(element, "--ink");
    context.lineWidth = 1.5;
    if (focused !== null) context.strokeRect(left - 1, top + focused * cell - 1, keys.length * cell + 1, cell + 1);
    if (state.query !== null && state.key !== null) {
      context.strokeRect(left + state.key * cell - 1, top + state.query * cell - 1, cell + 1, cell + 1);
    }
  }

  // ---- pointer and keyboard

  const indexOf = (list, event) => {
    const item = event.target.closest("li");
    return item === null ? null : Array.from(list.children).indexOf(item);
  };
  const pin = (query) => change({ pin: query === state.pin ? null : query });

  queryList.addEventListener("pointerover", (event) => point(indexOf(queryList, event), null));
  queryList.addEventListener("click", (event) => {
    const query = indexOf(queryList, event);
    if (query !== null) pin(query);
  });
  keyList.addEventListener("pointerover", (event) => point(state.pin, indexOf(keyList, event)));
  for (const list of [queryList, keyList]) list.addEventListener("pointerleave", () => point(null, null));

  function cellAt(event) {
    const { left, top, cell } = mapGeometry();
    const query = Math.floor((event.offsetY - top) / cell);
    const key = Math.floor((event.offsetX - left) / cell);
    const isInside = query >= 0 && query < role().queries.length && key >= 0 && key < role().keys.length;
    return isInside ? [query, key] : [null, null];
  }

  map.addEventListener("pointermove", (event) => point(...cellAt(event)));
  map.addEventListener("pointerleave", () => point(null, null));
  map.addEventListener("click", (event) => {
    const [query] = cellAt(event);
    if (query !== null) pin(query);
  });

  element.tabIndex = -1;
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const digit = /^Digit([0-9])$/.exec(event.code);
    const count = role().queries.length;
    if (event.key === "ArrowDown") change({ pin: state.pin === null ? 0 : Math.min(state.pin + 1, count - 1) });
    else if (event.key === "ArrowUp") change({ pin: state.pin === null ? count - 1 : Math.max(state.pin - 1, 0) });
    else if (event.key === "ArrowLeft") change({ layer: Math.max(state.layer - 1, 0) });
    else if (event.key === "ArrowRight") change({ layer: state.layer + 1 });
    else if (event.key === "Escape") change({ pin: null });
    else if (event.key === "r") change({ role: (state.role + 1) % ROLES.length, pin: null });
    else if (digit && digit[1] === "0") change({ heads: allHeads() });
    else if (digit && Number(digit[1]) <= data.heads) chooseHead(Number(digit[1]) - 1, event.shiftKey);
    else return;
    event.preventDefault();
  });
  if (isAlone) document.addEventListener("keydown", (event) => {
    if (event.target === document.body) element.dispatchEvent(new KeyboardEvent("keydown", event));
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", () => weights !== null && draw());
  if (isAlone) window.addEventListener("hashchange", () => change(recall()));
  change(recall());
});
