// Answers what the page asks a server, by a model that runs in the browser: one seed gives the same
// sample as `vssm.fill`.
//
//   x_{R_s} ~ p(x_{R_s} | x_{K_s}),   K_1 = K,   K_{s+1} = K_s + R_s          s = 1 ... S
//
// pass.onnx makes the entries of one pass. Here are the parts R_s and the noise, as in vssm.noise.
"use strict";
(() => {
  const LATENT = 0, ORDER = 3; // streams of noise
  const bits = (number, count) => BigInt.asUintN(count, number);

  function multiply(a, b) { // 32-bit numbers; returns the high and the low word of the product
    const high = a >>> 16, low = a & 0xffff, right = b & 0xffff, left = b >>> 16;
    const across = high * right + Math.floor((low * right) / 65536);
    const other = low * left + (across % 65536);
    return [high * left + Math.floor(across / 65536) + Math.floor(other / 65536), Math.imul(a, b) >>> 0];
  }
  function philox([c0, c1, c2, c3], [k0, k1]) { // Philox4x32-10
    for (let round = 0; round < 10; round++) {
      const [high0, low0] = multiply(c0, 0xd2511f53), [high1, low1] = multiply(c2, 0xcd9e8d57);
      [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
      k0 = (k0 + 0x9e3779b9) >>> 0;
      k1 = (k1 + 0xbb67ae85) >>> 0;
    }
    return [c0, c1, c2, c3];
  }
  function uniform(seed, row, length, components, stream, draw) { // [length * components] in (0, 1)
    const words = [seed ^ (row >> 32n), seed >> 32n].map(word => Number(bits(word, 32)));
    const low = Number(bits(row, 32)), made = new Float32Array(length * components);
    for (let t = 0; t < length; t++) for (let i = 0; i < components; i += 4) {
      const four = philox([t, i / 4, low, stream * 2 ** 24 + draw], words);
      for (let k = i; k < Math.min(i + 4, components); k++) made[t * components + k] = ((four[k - i] >>> 9) + 0.5) / 2 ** 23;
    }
    return made;
  }
  function fork(row, copies) { // SplitMix64, whose results name the rows of the samples
    return Array.from({ length: copies }, (_, copy) => {
      let x = bits(row * 0xd1b54a32d192ed03n + BigInt(copy + 1) * 0x9e3779b97f4a7c15n, 64);
      for (const [shift, factor] of [[30n, 0xbf58476d1ce4e5b9n], [27n, 0x94d049bb133111ebn], [31n, 1n]])
        x = bits((x ^ (x >> shift)) * factor, 64);
      return bits(x, 62) | (1n << 62n);
    });
  }
  function divide(unknown, noise, passes) { // the pass of each entry from 0 on; -1 where it is known
    const entries = [...unknown.keys()].filter(i => unknown[i]).sort((a, b) => noise[a] - noise[b] || a - b);
    const order = new Int32Array(unknown.length).fill(-1);
    entries.forEach((entry, rank) => { order[entry] = Math.floor((rank * passes) / entries.length); });
    return order;
  }

  // Fills x, rows of numbers with null where unknown. `run` makes a pass: it maps {x, known, made, u,
  // temperature} and the number of samples to values for the features that are not given.
  async function fill({ features, given, latents }, run, { x, num, passes, temperature, seed }, signal) {
    const length = x.length, size = length * features, own = features - given, rows = fork(0n, num);
    const flat = x.flat(), wide = bits(BigInt(seed), 64), unknown = flat.map(value => value === null);
    const values = new Float32Array(num * size), orders = new Int32Array(num * size);
    rows.forEach((row, n) => {
      values.set(flat.map(value => value ?? 0), n * size);
      orders.set(divide(unknown, uniform(wide, row, length, features, ORDER, 0), passes), n * size);
    });
    for (let s = 0; s < passes; s++) {
      signal?.throwIfAborted();
      const u = new Float32Array(num * length * latents);
      rows.forEach((row, n) => u.set(uniform(wide, row, length, latents, LATENT, s), n * length * latents));
      const known = Uint8Array.from(orders, (part, i) => !unknown[i % size] || part < s);
      const made = Uint8Array.from(orders, part => part === s);
      const result = await run({ x: values, known, made, u, temperature: [temperature] }, num);
      result.forEach((value, i) => {
        const at = Math.floor(i / own) * features + (i % own);
        if (made[at]) values[at] = value;
      });
    }
    const shape = flat => Array.from({ length: num }, (_, n) => Array.from({ length }, (_, t) =>
      [...flat.subarray(n * size + t * features, n * size + (t + 1) * features)]));
    return { x: shape(values), order: shape(orders) };
  }

  // Runs a pass by onnxruntime-web, for the sizes of a model.
  function runner(ort, session, { length, features, latents }) {
    return async (inputs, num) => {
      const feeds = {}, types = { known: "bool", made: "bool" };
      for (const [name, values] of Object.entries(inputs)) {
        const shape = name === "temperature" ? [1] : [num, length, name === "u" ? latents : features];
        feeds[name] = new ort.Tensor(types[name] || "float32", values.slice(), shape); // a run takes its inputs away
      }
      return (await session.run(feeds)).values.data;
    };
  }

  let loading = null;
  async function load() {
    if (location.protocol === "file:") throw new Error("A browser does not let a page that was opened as a file load its model. "
      + "Run python -m http.server -d site and open http://127.0.0.1:8000/browser/");
    const ort = await import("./ort.wasm.min.mjs");
    ort.env.wasm.numThreads = 1; // more need headers that a plain host of files does not send
    ort.env.wasm.proxy = true; // computes beside the page, which stays awake
    const list = await (await fetch("models.json")).json(), model = list.models[0];
    const session = await ort.InferenceSession.create("pass.onnx");
    return { list, model, run: runner(ort, session, model) };
  }
  async function answer(path, { body, signal }) { // has the form of `fetch`
    const { list, model, run } = await (loading ??= load());
    if (path === "/v1/models") return Response.json(list);
    const began = performance.now(), made = await fill(model, run, JSON.parse(body), signal);
    return Response.json({ ...made, timing: { compute_ms: performance.now() - began } });
  }
  globalThis.vssmLocal = { answer, fill, runner };
})();
