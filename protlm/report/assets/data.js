"use strict";
// The content of the page, and weights from their codes.

const Content = JSON.parse(document.getElementById("content").textContent);

const Data = (() => {
  const length = Content.protein.sequence.length;
  Content.models.forEach((model, at) => {
    model.label = Content.models.length > 1 ? `${"AB"[at]}: ${model.name}` : model.name;
  });
  const caches = new WeakMap();

  function bytes(text) {
    const binary = atob(text);
    const codes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) codes[i] = binary.charCodeAt(i);
    return codes;
  }

  /** The weight of a code, which may lie between two codes: see protlm/report/heads.py. */
  function weight(coded, code) {
    if (!coded.signed) return coded.scale * (code / 255) ** 2;
    const steps = code - 128;
    return Math.sign(steps) * coded.scale * (steps / 127) ** 2;
  }

  /** Decodes {scale, signed, codes} to weights, once. */
  function decode(coded) {
    if (!caches.has(coded)) {
      const table = Float32Array.from({ length: 256 }, (_, code) => weight(coded, code));
      const codes = bytes(coded.codes);
      caches.set(coded, { codes, weights: Float32Array.from(codes, (code) => table[code]) });
    }
    return caches.get(coded);
  }

  /** A square matrix of weights; each cell covers `bin` residues in both directions. */
  function matrixOf(head) {
    const { codes, weights } = decode(head.map);
    return {
      side: Math.ceil(length / head.bin),
      bin: head.bin,
      weights,
      codes,
      coded: head.map,
      isSigned: head.map.signed,
    };
  }

  /** Keeps the weight of largest magnitude in each square of factor × factor cells. */
  function pooled(matrix, factor) {
    if (factor === 1) return matrix;
    const side = Math.ceil(matrix.side / factor);
    const weights = new Float32Array(side * side);
    for (let i = 0; i < matrix.side; i++) {
      const start = Math.floor(i / factor) * side;
      for (let j = 0; j < matrix.side; j++) {
        const place = start + Math.floor(j / factor);
        const w = matrix.weights[i * matrix.side + j];
        if (Math.abs(w) > Math.abs(weights[place])) weights[place] = w;
      }
    }
    return { side, bin: matrix.bin * factor, weights, isSigned: matrix.isSigned };
  }

  /** The first matrix less the second, in the larger of their bins. */
  function difference(first, second) {
    if (first.bin !== second.bin && Math.min(first.bin, second.bin) === 1) {
      const bin = Math.max(first.bin, second.bin);
      [first, second] = [first, second].map((m) => pooled(m, bin / m.bin));
    }
    const weights = first.weights.map((w, place) => w - second.weights[place]);
    return { side: first.side, bin: first.bin, weights, isSigned: true };
  }

  /** Half the distance to the neighboring codes: the precision of a weight that is shown. */
  function halfStep(matrix, place) {
    if (!matrix.codes) return null;
    const code = matrix.codes[place];
    const here = weight(matrix.coded, code);
    return Math.max(
      Math.abs(weight(matrix.coded, code + 0.5) - here),
      Math.abs(weight(matrix.coded, Math.max(code - 0.5, 0)) - here),
    );
  }

  /** The low and high weights that colors span: all, or the 1st to the 99.5th percentile. */
  function range(matrix, isStretched) {
    let top = 0;
    for (const w of matrix.weights) top = Math.max(top, Math.abs(w));
    if (!isStretched || top === 0) return { low: 0, high: top };
    const counts = new Uint32Array(1024);
    for (const w of matrix.weights) counts[Math.round(Math.sqrt(Math.abs(w) / top) * 1023)]++;
    const quantile = (fraction) => {
      let sum = 0;
      for (let i = 0; i < 1024; i++) {
        sum += counts[i];
        if (sum >= fraction * matrix.weights.length) return top * (i / 1023) ** 2;
      }
      return top;
    };
    const low = matrix.isSigned ? 0 : quantile(0.01);
    const high = quantile(0.995);
    return high > low ? { low, high } : { low: 0, high: top };
  }

  /** The pairs (i, j, weight) of largest weight with j - i of 6 or more, in decreasing order. */
  function topPairs(matrix, count) {
    const found = [];
    for (let i = 0; i < matrix.side; i++) {
      for (let j = i + 6; j < matrix.side; j++) {
        const w = matrix.weights[i * matrix.side + j];
        if (found.length === count && w <= found[count - 1][2]) continue;
        found.push([i, j, w]);
        found.sort((a, b) => b[2] - a[2]);
        found.length = Math.min(found.length, count);
      }
    }
    return found;
  }

  const number = (x) => {
    if (x === null || x === undefined) return "–";
    if (x === 0) return "0";
    return Math.abs(x) < 0.001 || Math.abs(x) >= 1e5 ? x.toExponential(2) : String(+x.toPrecision(4));
  };
  /** The statistics that some head has, and their places in the lists of the heads. */
  const heads = Content.models.flatMap((model) => model.heads);
  const statistics = Content.statistics
    .map((one, at) => ({ ...one, at }))
    .filter((one) => heads.some((head) => head.statistics[one.at] !== null));

  const headName = (head) => `layer ${head.layer} head ${head.head}`;
  const residue = (position) => `${Content.protein.sequence[position]}${position + 1}`;

  /** The residues of a cell's row or column: "K12", or "K12 to L15". */
  function residues(cell, bin) {
    const first = cell * bin;
    const last = Math.min(first + bin, length) - 1;
    return first === last ? residue(first) : `${residue(first)} to ${residue(last)}`;
  }

  return { length, statistics, bytes, decode, matrixOf, pooled, difference, halfStep, range, topPairs, number,
    headName, residue, residues };
})();
