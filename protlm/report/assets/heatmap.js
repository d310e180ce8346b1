"use strict";
// The large map: image, residue numbers, cross, contacts, and profiles of a row and a column.

const Heatmap = (() => {
  // Lengths in CSS pixels of a drawing that is 760 wide; the browser scales it to its place.
  const WIDTH = 760;
  const LEFT = 58;
  const TOP = 48;
  const SIZE = 590;
  const PROFILE = 70;
  const GAP = 8;
  const HEIGHT = TOP + SIZE + GAP + PROFILE + 62;
  const FONT = "12px system-ui, 'Liberation Sans', Arial, sans-serif";

  let cached = { key: null };

  /** The image of the map in the window, with no more cells than pixels, so that no line is lost. */
  function imageFor(matrix, range, size) {
    const factor = Math.max(Math.ceil(size / matrix.bin / (2 * SIZE)), 1);
    const key = [matrix, range.low, range.high, factor];
    if (!cached.key || key.some((part, i) => part !== cached.key[i])) {
      const pooled = Data.pooled(matrix, factor);
      cached = { key, image: Palettes.image(pooled, range), bin: pooled.bin };
    }
    return cached;
  }

  /** Residue numbers to label, about eight of them, each a multiple of 1, 2 or 5 times 10^n. */
  function ticks(start, size) {
    const raw = size / 8;
    const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || 1;
    const found = [];
    for (let n = Math.max(Math.ceil((start + 1) / step) * step, 1); n <= start + size; n += step) found.push(n);
    return found;
  }

  function drawAxes(context, view, x, y) {
    context.fillStyle = Palettes.themed("text");
    context.font = FONT;
    for (const n of ticks(view.start.column, view.size)) {
      context.textAlign = "center";
      context.fillText(String(n), x(n - 0.5), TOP - 6);
    }
    for (const n of ticks(view.start.row, view.size)) {
      context.textAlign = "right";
      context.fillText(String(n), LEFT - 5, y(n - 0.5) + 4);
    }
    context.fillStyle = Palettes.themed("quiet");
    context.textAlign = "center";
    context.fillText(view.axes[0], LEFT + SIZE / 2, 14);
    context.save();
    context.translate(12, TOP + SIZE / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(view.axes[1], 0, 0);
    context.restore();
  }

  function drawContacts(context, view, x, y, cell) {
    const half = Math.min(Math.max(cell / 2, 1.6), 9);
    context.lineWidth = half > 3 ? 1.5 : 1;
    for (const [i, j] of view.contacts) {
      const box = [x(j + 0.5) - half, y(i + 0.5) - half, 2 * half, 2 * half];
      context.strokeStyle = "#000000";
      context.strokeRect(box[0] - 1, box[1] - 1, box[2] + 2, box[3] + 2);
      context.strokeStyle = "#ffffff";
      context.strokeRect(...box);
    }
  }

  function drawCross(context, view, x, y) {
    const { row, column } = view.cursor;
    context.strokeStyle = Palettes.themed("cross");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(LEFT, y(row + 0.5));
    context.lineTo(LEFT + SIZE, y(row + 0.5));
    context.moveTo(x(column + 0.5), TOP);
    context.lineTo(x(column + 0.5), TOP + SIZE);
    context.stroke();
  }

  /** Draws the weights along the cross: of its row below the map, of its column beside it. */
  function drawProfiles(context, view, x, y) {
    const { matrix, range, cursor } = view;
    const [i, j] = [Math.floor(cursor.row / matrix.bin), Math.floor(cursor.column / matrix.bin)];
    const top = range.high || 1;
    const height = (w) => Math.min(Math.abs(w) / top, 1) * (PROFILE - 14);
    const bottom = TOP + SIZE + GAP + PROFILE;
    const right = LEFT + SIZE + GAP;
    context.strokeStyle = Palettes.themed("line");
    context.strokeRect(LEFT, bottom - PROFILE, SIZE, PROFILE);
    context.strokeRect(right, TOP, PROFILE, SIZE);
    context.save();
    context.beginPath();
    context.rect(LEFT, bottom - PROFILE, SIZE, PROFILE);
    context.rect(right, TOP, PROFILE, SIZE);
    context.clip();
    for (let cell = 0; cell < matrix.side; cell++) {
      const [from, to] = [cell * matrix.bin, (cell + 1) * matrix.bin];
      const inRow = matrix.weights[i * matrix.side + cell];
      const inColumn = matrix.weights[cell * matrix.side + j];
      context.fillStyle = Palettes.themed(inRow < 0 ? "cold" : "warm");
      context.fillRect(x(from), bottom, x(to) - x(from) + 0.4, -height(inRow));
      context.fillStyle = Palettes.themed(inColumn < 0 ? "cold" : "warm");
      context.fillRect(right, y(from), height(inColumn), y(to) - y(from) + 0.4);
    }
    context.restore();
    context.fillStyle = Palettes.themed("quiet");
    context.font = "11px system-ui, 'Liberation Sans', Arial, sans-serif";
    context.textAlign = "left";
    context.fillText(`row ${Data.residues(i, matrix.bin)}`, LEFT, bottom + 13);
    context.textAlign = "right";
    context.fillText(`column ${Data.residues(j, matrix.bin)}`, WIDTH - 2, TOP - 24);
  }

  function drawLegend(context, view) {
    const { range, matrix } = view;
    const top = TOP + SIZE + GAP + PROFILE + 14;
    const from = matrix.isSigned ? -range.high : range.low;
    for (let i = 0; i < 240; i++) {
      context.fillStyle = Palettes.css(i / 239, matrix.isSigned);
      context.fillRect(LEFT + 240 + i, top, 1.5, 12);
    }
    context.fillStyle = Palettes.themed("text");
    context.font = FONT;
    context.textAlign = "right";
    context.fillText(Data.number(from), LEFT + 232, top + 11);
    context.textAlign = "left";
    const unit = `${Data.number(range.high)} (square-root scale)`;
    context.fillText(unit, LEFT + 488, top + 11);
    context.fillStyle = Palettes.themed("quiet");
    context.fillText(view.caption, LEFT, top + 32);
  }

  /**
   * Draws the map. `view` has: matrix, range, start {row, column}, size (residues in the window),
   * cursor {row, column}, contacts (pairs i < j), axes (names of columns and rows), caption, label.
   */
  function draw(canvas, view) {
    const context = Palettes.prepared(canvas, WIDTH, HEIGHT);
    canvas.setAttribute("aria-label", view.label);
    const scale = SIZE / view.size;
    const x = (position) => LEFT + (position - view.start.column) * scale;
    const y = (position) => TOP + (position - view.start.row) * scale;
    const { image, bin } = imageFor(view.matrix, view.range, view.size);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, SIZE, SIZE);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(
      image, view.start.column / bin, view.start.row / bin, view.size / bin, view.size / bin,
      LEFT, TOP, SIZE, SIZE,
    );
    drawContacts(context, view, x, y, scale);
    drawCross(context, view, x, y);
    context.restore();
    drawAxes(context, view, x, y);
    drawProfiles(context, view, x, y);
    drawLegend(context, view);
  }

  /** The residue pair below a pointer, or null outside of the map. */
  function pairAt(canvas, event, view) {
    const box = canvas.getBoundingClientRect();
    const cell = SIZE / view.size;
    const down = ((event.clientY - box.top) * HEIGHT) / box.height - TOP;
    const across = ((event.clientX - box.left) * WIDTH) / box.width - LEFT;
    const row = view.start.row + Math.floor(down / cell);
    const column = view.start.column + Math.floor(across / cell);
    const within = (n, start) => n >= start && n < Math.min(start + view.size, Data.length);
    return within(row, view.start.row) && within(column, view.start.column) ? { row, column } : null;
  }

  return { draw, pairAt };
})();
