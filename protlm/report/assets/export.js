"use strict";
// Pictures and tables to keep: PNG files of canvases, and tab-separated tables.

const Export = (() => {
  const plain = (text) => text.replace(/[^A-Za-z0-9.-]+/g, "_").replace(/^[._-]+/, "");

  /** A file name that any system takes; names of proteins and models may contain anything. */
  function fileName(parts, suffix) {
    const name = plain(parts.join("_"));
    return `${name.slice(0, 100) || "page"}${suffix}`;
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function png(canvas, parts) {
    canvas.toBlob((blob) => save(blob, fileName(parts, ".png")), "image/png");
  }

  function tsv(rows, parts) {
    const text = rows.map((row) => row.join("\t")).join("\n");
    save(new Blob([`${text}\n`], { type: "text/tab-separated-values" }), fileName(parts, ".tsv"));
  }

  /** The weights of a map: one row for each residue (or bin) that attends. */
  function mapRows(matrix) {
    const names = Array.from({ length: matrix.side }, (_, cell) => Data.residues(cell, matrix.bin));
    const rows = names.map((name, i) => [
      name,
      ...Array.from(matrix.weights.subarray(i * matrix.side, (i + 1) * matrix.side), (w) => w.toPrecision(6)),
    ]);
    return [["residue", ...names], ...rows];
  }

  function statisticsRows() {
    const labels = Content.statistics.map((one) => one.name);
    const rows = Content.models.flatMap((model) =>
      model.heads.map((head) => [
        plain(model.label), head.layer, head.head, ...head.statistics.map((x) => (x === null ? "" : x)),
      ]));
    return [["model", "layer", "head", ...labels], ...rows];
  }

  function predictionRows(predictions) {
    const rows = predictions.probabilities.map((p, i) => [
      i + 1, Content.protein.sequence[i], predictions.entropy[i], ...p,
    ]);
    return [["position", "residue", "entropy", ...predictions.letters], ...rows];
  }

  return { png, tsv, mapRows, statisticsRows, predictionRows, fileName };
})();
