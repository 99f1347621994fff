// Bergamot's WASM engine in node: translates a file line by line.
//   node bergamot.mjs ENGINE PRECISION MODEL VOCABULARY[,VOCABULARY] < in.txt > out.txt
// ENGINE is the folder of the package @browsermt/bergamot-translator. The seconds of translating go to standard error.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [engine, precision, model, vocabularies] = process.argv.slice(2);
const { BatchTranslator, TranslatorBacking } = await import(pathToFileURL(resolve(engine, "translator.js")));

const bytes = (path) => {
  const file = readFileSync(path);
  return file.buffer.slice(file.byteOffset, file.byteOffset + file.length);
};

class Files extends TranslatorBacking {
  async loadModelRegistery() {
    return [{ from: "xx", to: "yy", files: {} }];
  }
  async loadTranslationModel() {
    return {
      model: bytes(model),
      vocabs: vocabularies.split(",").map(bytes),
      shortlist: new ArrayBuffer(0),
      qualityModel: null,
      config: { "gemm-precision": precision },
    };
  }
}

const fail = (error) => {
  console.error(error);
  process.exit(1);
};
const translator = new BatchTranslator({ workers: 1, batchSize: 16, onerror: fail }, new Files({}));
const translate = (text) =>
  translator.translate({ from: "xx", to: "yy", text, html: false }).then((answer) => answer.target.text);

const lines = readFileSync(0, "utf8").split("\n").slice(0, -1);
await translate("a"); // loads the model
const start = performance.now();
const translations = await Promise.all(lines.map(translate));
console.error(`seconds ${(performance.now() - start) / 1000}`);
process.stdout.write(translations.map((line) => `${line.replaceAll("\n", " ")}\n`).join(""), () => translator.delete());
