// Translates what is typed, a paragraph after the other, in this browser. Text is put into the page as text alone.
"use strict";

const site = JSON.parse(document.getElementById("site").textContent);
const source = document.getElementById("source");
const target = document.getElementById("target");
const state = document.getElementById("status");
const copy = document.getElementById("copy");
const PAUSE = 200; // milliseconds without a key, after which a paragraph is translated
const MOST_KEPT = 2000; // translations of paragraphs

let translator = null;
let timer = null;
let round = 0; // of translating: an older one has no say any more
const known = new Map(); // paragraph -> translation

function say(text, isFault = false) {
  state.textContent = text;
  state.classList.toggle("fault", isFault);
}

function size() {
  const megabytes = site.files.reduce((sum, file) => sum + file.bytes, 0) / 1e6;
  return `${megabytes.toFixed(1)} MB`;
}

async function bytesOf(file) {
  const answer = await fetch(file.path);
  if (!answer.ok) throw new Error(`${file.path}: the server says ${answer.status}`);
  const bytes = await answer.arrayBuffer();
  if (bytes.byteLength !== file.bytes) {
    throw new Error(`${file.path} has ${bytes.byteLength} bytes instead of ${file.bytes}: copy the site anew`);
  }
  return bytes;
}

async function start() {
  if (typeof WebAssembly !== "object") {
    throw new Error(
      "This browser has no WebAssembly, or it is switched off, and nothing can be translated without it. Use a current " +
        "Firefox, Chrome, Edge or Safari, without its strictest protection for this page.",
    );
  }
  say(`Loading the model (${size()}) …`);
  const { BatchTranslator, TranslatorBacking } = await import("./engine/translator.js");
  const [model, ...vocabs] = await Promise.all(site.files.map(bytesOf));

  class Files extends TranslatorBacking {
    async loadModelRegistery() {
      return [{ from: site.from, to: site.to, files: {} }];
    }
    async loadTranslationModel() {
      const config = { "gemm-precision": site.precision };
      return { model, vocabs, shortlist: new ArrayBuffer(0), qualityModel: null, config };
    }
  }
  const options = { workers: 1, batchSize: 2 };
  const engine = new BatchTranslator(options, new Files(options));
  const failed = new Promise((_, reject) => {
    engine.onerror = reject;
    engine.backing.onerror = (event) => reject(new Error(event.message || "the engine has stopped"));
  });
  const translate = (text) => engine.translate({ from: site.from, to: site.to, text, html: false });
  await Promise.race([translate("a"), failed]); // loads the engine
  failed.catch((error) => say(`The engine has stopped: ${error.message}. Load the page again.`, true));
  return { translate: async (text) => (await translate(text)).target.text, forget: () => engine.remove(() => true) };
}

// A paragraph of the target for each of the source: those that are known at once, the others as they come.
async function show() {
  const mine = ++round;
  translator.forget();
  const paragraphs = source.value.split("\n");
  const lines = paragraphs.map((text, index) => {
    const line = target.children[index] ?? target.appendChild(document.createElement("p"));
    const isKnown = known.has(text) || !text.trim();
    line.classList.toggle("waiting", !isKnown);
    if (isKnown) line.textContent = known.get(text) ?? "";
    return line;
  });
  while (target.children.length > lines.length) target.lastChild.remove();

  const missing = new Map();
  paragraphs.forEach((text, index) => {
    if (text.trim() && !known.has(text)) missing.set(text, [...(missing.get(text) ?? []), lines[index]]);
  });
  copy.disabled = !source.value.trim();
  if (!missing.size) return say(ready());

  say("Translating …");
  target.setAttribute("aria-busy", "true");
  const all = [...missing].map(async ([text, places]) => {
    const translation = await translator.translate(text);
    if (known.size >= MOST_KEPT) known.delete(known.keys().next().value);
    known.set(text, translation);
    if (mine !== round) return;
    for (const line of places) {
      line.textContent = translation;
      line.classList.remove("waiting");
    }
  });
  const results = await Promise.allSettled(all);
  if (mine !== round) return; // what was typed since is translated now
  target.setAttribute("aria-busy", "false");
  const fault = results.find((result) => result.status === "rejected");
  say(fault ? `Not translated: ${fault.reason.message}` : ready(), Boolean(fault));
}

function ready() {
  return "Ready: nothing that you type leaves this computer.";
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(() => translator && show(), PAUSE);
}

source.addEventListener("input", later);
source.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    clearTimeout(timer);
    if (translator) show();
  }
});
document.getElementById("clear").addEventListener("click", () => {
  source.value = "";
  later();
  source.focus();
});
copy.addEventListener("click", async () => {
  const text = [...target.children].map((line) => line.textContent).join("\n");
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    getSelection().selectAllChildren(target);
    say("The browser lets no page copy here: the translation is selected, press Ctrl+C.");
  }
});

start().then(
  (made) => {
    translator = made;
    document.body.dataset.ready = "true";
    show();
  },
  (error) => {
    document.body.dataset.failed = "true";
    say(error.message, true);
  },
);

// What the page has loaded once is there without a network, too, where the browser allows it.
if ("serviceWorker" in navigator && typeof WebAssembly === "object") {
  navigator.serviceWorker.register("./offline.js").catch(() => {});
}
