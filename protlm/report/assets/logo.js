"use strict";
// The logo of the predicted distributions: at each position letters as high as their information.

const Logo = (() => {
  const PER_ROW = 50;
  const CELL = 24;
  const HEIGHT = 76;
  const ROW = 112;
  const LEFT = 56;
  const TOP = 6;
  const WIDTH = LEFT + PER_ROW * CELL + 8;
  const BITS = Math.log2(20);
  const SHOWN = 0.01;
  const canvas = document.getElementById("logo");
  const frame = document.getElementById("logo-frame");
  const metrics = {};

  const COLORS = {
    ...Object.fromEntries([..."AVLIMC"].map((a) => [a, "#4a8a2a"])),
    ...Object.fromEntries([..."FYWH"].map((a) => [a, "#8a63c9"])),
    ...Object.fromEntries([..."STNQ"].map((a) => [a, "#1f8aa8"])),
    ...Object.fromEntries([..."KR"].map((a) => [a, "#3273d6"])),
    ...Object.fromEntries([..."DE"].map((a) => [a, "#d0392b"])),
    ...Object.fromEntries([..."GP"].map((a) => [a, "#b07d12"])),
  };

  /** The residues of a position with their probabilities, in decreasing order. */
  function ranked(predictions, position) {
    return predictions.probabilities[position]
      .map((p, at) => ({ letter: predictions.letters[at], p }))
      .sort((a, b) => b.p - a.p);
  }

  function size(context, letter) {
    if (!metrics[letter]) {
      context.font = "bold 100px 'Liberation Sans', Arial, sans-serif";
      // The box is measured from the anchor of the text.
      context.textAlign = "left";
      const box = context.measureText(letter);
      metrics[letter] = {
        left: box.actualBoundingBoxLeft,
        width: box.actualBoundingBoxLeft + box.actualBoundingBoxRight,
        height: box.actualBoundingBoxAscent + box.actualBoundingBoxDescent,
        descent: box.actualBoundingBoxDescent,
      };
    }
    return metrics[letter];
  }

  function drawLetter(context, letter, x, bottom, height) {
    const box = size(context, letter);
    context.save();
    context.translate(x + 1, bottom);
    context.scale((CELL - 2) / box.width, height / box.height);
    context.font = "bold 100px 'Liberation Sans', Arial, sans-serif";
    context.fillStyle = COLORS[letter];
    context.textAlign = "left";
    context.fillText(letter, box.left, -box.descent);
    context.restore();
  }

  const information = (predictions, position) =>
    Math.max(BITS - predictions.entropy[position] / Math.LN2, 0);

  /** The bits of a stack of full height: all, or the 95th percentile where few are certain. */
  function top(predictions, isStretched) {
    if (!isStretched) return BITS;
    const sorted = predictions.entropy.map((_, i) => information(predictions, i)).sort((a, b) => a - b);
    return Math.max(sorted[Math.floor(0.95 * (sorted.length - 1))], 0.1);
  }

  function drawPosition(context, predictions, position, bits) {
    const x = LEFT + (position % PER_ROW) * CELL;
    const base = TOP + Math.floor(position / PER_ROW) * ROW + HEIGHT;
    const unit = Math.min(information(predictions, position) / bits, 1) * HEIGHT;
    let bottom = base;
    for (const { letter, p } of ranked(predictions, position).reverse()) {
      if (p * unit < 0.4 || p < SHOWN) continue;
      drawLetter(context, letter, x, bottom, p * unit);
      bottom -= p * unit;
    }
    context.fillStyle = Palettes.themed("text");
    context.font = "12px ui-monospace, 'DejaVu Sans Mono', monospace";
    context.textAlign = "center";
    context.fillText(Content.protein.sequence[position], x + CELL / 2, base + 13);
    if ((position + 1) % 10 === 0 || position % PER_ROW === 0) {
      context.fillStyle = Palettes.themed("quiet");
      context.fillText(String(position + 1), x + CELL / 2, base + 26);
    }
  }

  function drawScale(context, base, bits) {
    context.strokeStyle = Palettes.themed("line");
    context.fillStyle = Palettes.themed("quiet");
    context.font = "11px system-ui, 'Liberation Sans', Arial, sans-serif";
    context.textAlign = "right";
    context.beginPath();
    for (const fraction of [0, 0.5, 1]) {
      const y = base - fraction * HEIGHT;
      context.moveTo(LEFT - 4, y);
      context.lineTo(WIDTH, y);
      const label = (fraction * bits).toFixed(bits < 1 ? 2 : 1);
      context.fillText(fraction === 1 ? `${label} bits` : label, LEFT - 6, y + 4);
    }
    context.stroke();
  }

  function draw(predictions, isStretched) {
    const bits = top(predictions, isStretched);
    const rows = Math.ceil(Data.length / PER_ROW);
    const context = Palettes.prepared(canvas, WIDTH, rows * ROW + TOP);
    for (let row = 0; row < rows; row++) drawScale(context, TOP + row * ROW + HEIGHT, bits);
    for (let i = 0; i < Data.length; i++) drawPosition(context, predictions, i, bits);
    const name = `Logo of the predicted residues at ${Data.length} positions; the text above reads one`;
    canvas.setAttribute("aria-label", name);
  }

  /** Frames a position. The frame is an element of its own, as the logo takes long to draw. */
  function mark(position) {
    const height = Math.ceil(Data.length / PER_ROW) * ROW + TOP;
    const percent = (part, whole) => `${(100 * part) / whole}%`;
    frame.style.left = percent(LEFT + (position % PER_ROW) * CELL, WIDTH);
    frame.style.top = percent(TOP + Math.floor(position / PER_ROW) * ROW, height);
    frame.style.width = percent(CELL, WIDTH);
    frame.style.height = percent(HEIGHT + 17, height);
  }

  /** The prediction at a position, in words. */
  function reading(predictions, position) {
    const best = ranked(predictions, position).slice(0, 5);
    const own = predictions.letters.indexOf(Content.protein.sequence[position]);
    const percent = (p) => `${(100 * p).toFixed(1)} %`;
    const listed = best.map(({ letter, p }) => `${letter} ${percent(p)}`).join(", ");
    const true_ = own < 0 ? "" : `; its own residue ${percent(predictions.probabilities[position][own])}`;
    return `${Data.residue(position)}: ${listed}${true_}; entropy ${predictions.entropy[position].toFixed(2)} nats`;
  }

  /** The position below a pointer, or null. */
  function positionAt(event) {
    const box = canvas.getBoundingClientRect();
    const scale = WIDTH / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale - LEFT) / CELL);
    const position = Math.floor(((event.clientY - box.top) * scale - TOP) / ROW) * PER_ROW + column;
    return column >= 0 && column < PER_ROW && position >= 0 && position < Data.length ? position : null;
  }

  return { draw, mark, reading, positionAt, canvas };
})();
