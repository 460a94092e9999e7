// Fills by docs/browser/local.js, in Node: `node fill.mjs FOLDER REQUEST`, both written by docs/browser/export.py and the test.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, request] = process.argv.slice(2);
const ort = await import(pathToFileURL(`${folder}/ort.wasm.min.mjs`));
ort.env.wasm.numThreads = 1;
(0, eval)(fs.readFileSync(`${folder}/local.js`, "utf8"));
const model = JSON.parse(fs.readFileSync(`${folder}/models.json`)).models[0];
const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(`${folder}/pass.onnx`)));
const { fill, runner } = globalThis.vssmLocal;
console.log(JSON.stringify(await fill(model, runner(ort, session, model), JSON.parse(request))));
