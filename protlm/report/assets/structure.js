"use strict";
// The C-alpha trace of the structure, turned by dragging, by keys, or by itself.

const Structure = (() => {
  const SIDE = 420;
  const canvas = document.getElementById("structure");
  const structure = Content.protein.structure;
  let turn = [1, 0, 0, 0, 1, 0, 0, 0, 1];
  let points = [];
  let radius = 1;
  let view = { pairs: [], cursor: null, activity: null };
  let spinning = false;

  function center() {
    const known = structure.ca.filter((atom) => atom !== null);
    const mean = [0, 1, 2].map((c) => known.reduce((sum, atom) => sum + atom[c], 0) / known.length);
    points = structure.ca.map((atom) => atom && atom.map((x, c) => x - mean[c]));
    radius = Math.max(...points.filter(Boolean).map((p) => Math.hypot(...p)), 1);
  }

  function rotate(byX, byY) {
    const [cx, sx, cy, sy] = [Math.cos(byX), Math.sin(byX), Math.cos(byY), Math.sin(byY)];
    const step = [cy, 0, sy, sx * sy, cx, -sx * cy, -cx * sy, sx, cx * cy];
    const product = new Array(9).fill(0);
    for (let i = 0; i < 3; i++) {
      for (let j = 0; j < 3; j++) {
        for (let k = 0; k < 3; k++) product[3 * i + j] += step[3 * i + k] * turn[3 * k + j];
      }
    }
    turn = product;
    redraw();
  }

  function project(point) {
    const [x, y, z] = [0, 1, 2].map((i) => turn[3 * i] * point[0] + turn[3 * i + 1] * point[1] + turn[3 * i + 2] * point[2]);
    const scale = (SIDE / 2 - 14) / radius;
    return { x: SIDE / 2 + x * scale, y: SIDE / 2 - y * scale, z: z / radius };
  }

  /** Blue at the first residue, through grey, to orange at the last; nearer parts are stronger. */
  function chainColor(position, depth) {
    const t = position / Math.max(points.length - 1, 1);
    const ends = [[32, 110, 200], [150, 150, 150], [214, 104, 16]];
    const [from, to, s] = t < 0.5 ? [ends[0], ends[1], t * 2] : [ends[1], ends[2], t * 2 - 1];
    const rgb = from.map((x, c) => Math.round(x + s * (to[c] - x)));
    return `rgb(${rgb.join(" ")} / ${(0.55 + 0.45 * (depth + 1) / 2).toFixed(2)})`;
  }

  function line(context, from, to, color, width, dashes) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y);
    context.stroke();
  }

  function redraw() {
    const context = Palettes.prepared(canvas, SIDE, SIDE);
    const placed = points.map((point) => point && project(point));
    const segments = [];
    for (let i = 0; i + 1 < placed.length; i++) {
      if (placed[i] && placed[i + 1]) segments.push({ i, z: (placed[i].z + placed[i + 1].z) / 2 });
    }
    segments.sort((a, b) => a.z - b.z);
    context.lineCap = "round";
    for (const { i, z } of segments) {
      line(context, placed[i], placed[i + 1], chainColor(i, z), 3.5 + 2 * z, []);
    }
    if (view.activity) drawActivity(context, placed);
    for (const [i, j] of view.activity ? [] : view.pairs) {
      if (!placed[i] || !placed[j]) continue;
      const near = isContact(i, j);
      line(context, placed[i], placed[j], Palettes.themed(near ? "accent" : "mark"), 1.6, near ? [] : [4, 4]);
    }
    if (view.cursor) drawCursor(context, placed);
  }

  /** Marks residues by discs, larger where a sparse feature is more active. */
  function drawActivity(context, placed) {
    const top = Math.max(...view.activity);
    context.fillStyle = Palettes.themed("mark");
    context.strokeStyle = Palettes.themed("text");
    context.lineWidth = 1;
    context.setLineDash([]);
    placed.forEach((point, position) => {
      if (!point || !view.activity[position]) return;
      context.beginPath();
      context.arc(point.x, point.y, 3 + (6 * view.activity[position]) / top, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    });
  }

  function drawCursor(context, placed) {
    const ends = [view.cursor.row, view.cursor.column].map((position) => placed[position]);
    context.setLineDash([]);
    if (ends[0] && ends[1]) line(context, ends[0], ends[1], Palettes.themed("cross"), 2, []);
    [view.cursor.row, view.cursor.column].forEach((position, at) => {
      if (!ends[at]) return;
      context.fillStyle = Palettes.themed("cross");
      context.beginPath();
      context.arc(ends[at].x, ends[at].y, 4.5, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = Palettes.themed("text");
      context.font = "12px system-ui, 'Liberation Sans', Arial, sans-serif";
      context.fillText(Data.residue(position), ends[at].x + 7, ends[at].y - 5);
    });
  }

  /** The distance of two C-beta atoms in ångström, or null where one is unknown. */
  function distance(i, j) {
    const [a, b] = structure ? [structure.cb[i], structure.cb[j]] : [null, null];
    return a && b ? Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]) : null;
  }
  function isContact(i, j) {
    const found = distance(i, j);
    return found !== null && found < 8;
  }

  function spin() {
    if (!spinning) return;
    if (!document.hidden) rotate(0, 0.012);
    requestAnimationFrame(spin);
  }
  function setSpinning(isSpinning) {
    const starts = isSpinning && !spinning;
    spinning = isSpinning;
    if (starts) requestAnimationFrame(spin);
  }

  function listen() {
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) rotate(event.movementY * 0.01, event.movementX * 0.01);
    });
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("keydown", (event) => {
      const turns = { ArrowLeft: [0, -0.1], ArrowRight: [0, 0.1], ArrowUp: [-0.1, 0], ArrowDown: [0.1, 0] };
      if (!(event.key in turns)) return;
      event.preventDefault();
      rotate(...turns[event.key]);
    });
  }

  /** Shows pairs of residues, or the activity of a feature, and the cross on the trace. */
  function show(pairs, cursor, activity) {
    view = { pairs, cursor, activity };
    if (!structure) return;
    const marked = activity ? `${activity.filter(Boolean).length} active residues` : `${pairs.length} pairs`;
    const name = `C-alpha trace of ${Data.length} residues with ${marked}, the cross at ` +
      `${Data.residue(cursor.row)} and ${Data.residue(cursor.column)}`;
    canvas.setAttribute("aria-label", name);
    redraw();
  }

  if (structure) {
    center();
    listen();
  }
  return { show, distance, setSpinning, canvas };
})();
