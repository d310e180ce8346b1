"use strict";
// What the residue in the row of the cross attends to in the relatives before the protein.

const Relatives = (() => {
  const get = (id) => document.getElementById(id);
  const percent = (x) => `${(100 * x).toFixed(x < 0.1 ? 2 : 1)} %`;
  const residuesOf = new WeakMap();

  /** The relative and the residue, from 0, of a number through all relatives. */
  function find(relatives, number) {
    const at = relatives.findIndex((one) => {
      if (number < one.residues.length) return true;
      number -= one.residues.length;
      return false;
    });
    return { relative: relatives[at], residue: number };
  }

  function numbers(head) {
    if (!residuesOf.has(head)) residuesOf.set(head, new Uint32Array(Data.bytes(head.residues).buffer));
    return residuesOf.get(head);
  }

  function name({ name, identity }) {
    const made = document.createElement("span");
    made.textContent = name;
    made.title = identity === null ? name : `${name}: identity ${percent(identity)}`;
    return made;
  }

  /** The residue of the protein in the column of that of a relative. */
  function aligned(relative, residue) {
    const column = relative.columns && relative.columns[residue];
    return column !== null && column >= 0 && column < Data.length ? Data.residue(column) : "–";
  }

  function strongest(head, relatives, row) {
    const mass = Data.decode(head.mass).weights;
    const width = head.relatives.length + 1;
    return head.relatives.map((at, place) =>
      Tables.row("td", [name(relatives[at]), percent(mass[row * width + place]), percent(head.mean[place])]));
  }

  function residues(head, relatives, row) {
    const weights = Data.decode(head.weights).weights;
    const count = weights.length / Data.length;
    return Array.from({ length: count }, (_, place) => row * count + place)
      .filter((place) => weights[place] > 0)
      .map((place) => {
        const { relative, residue } = find(relatives, numbers(head)[place]);
        return Tables.row("td", [name(relative), `${relative.residues[residue]}${residue + 1}`,
          aligned(relative, residue), percent(weights[place])]);
      });
  }

  function show(model, open, row) {
    const context = model.relatives;
    get("relatives-section").hidden = !context;
    if (!context) return;
    const { relatives, tokens } = context;
    const head = open && context.heads.find((one) => one.layer === open.layer &&
      (one.head ?? open.head) === open.head);
    // Heads of relatives see nothing else; they are one, the mean of the open layer.
    const isApart = context.heads.some((one) => one.head === null);
    const shown = isApart ? "are heads of relatives, which see nothing else" : "is the rest of a row";
    get("relatives-note").textContent =
      `The model reads the protein after ${relatives.length} relatives (${tokens.toLocaleString("en")} tokens), the ` +
      `first context. Maps have the columns of the protein alone; here ${shown}. Weights on a relative include ` +
      "its special tokens; \u201caligned to\u201d is the residue of the protein in the same column of the alignment.";
    const mass = head && Data.decode(head.mass).weights;
    const total = head ? mass[(row + 1) * (head.relatives.length + 1) - 1] : 0;
    const seen = isApart
      ? `heads of relatives of layer ${open && open.layer}: the mean of their weights.`
      : `${open && Data.headName(open)}: ${percent(total)} of the weight is on relatives.`;
    get("relatives-reading").textContent = !open
      ? "Open a head to see what it attends to in relatives."
      : `${Data.residue(row)} in ` + (total ? seen : `${Data.headName(open)}: no weight is on relatives.`);
    const isEmpty = !total;
    Tables.fill(get("relatives"), Tables.row("th", ["relative", "weight", "mean of rows"]),
      isEmpty ? [] : strongest(head, relatives, row));
    Tables.fill(get("relatives-residues"), Tables.row("th", ["relative", "residue", "aligned to", "weight"]),
      isEmpty ? [] : residues(head, relatives, row));
    for (const id of ["relatives", "relatives-residues"]) get(id).hidden = isEmpty;
  }

  return { show };
})();
