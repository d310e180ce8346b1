"use strict";
// What the page is of: the protein, the models, and how to read their maps.

(() => {
  const get = (id) => document.getElementById(id);
  const { protein, models } = Content;

  function fillProvenance() {
    document.title = `${protein.identifier.slice(0, 80)} – protlm inspect`;
    get("title").textContent = `Attention on ${protein.identifier.slice(0, 200)}`;
    get("description").textContent = protein.header === protein.identifier ? "" : protein.header;
    const rows = [["Protein", `${Data.length.toLocaleString("en")} residues, from ${protein.source}`]];
    for (const model of models) {
      rows.push([
        models.length > 1 ? `Model ${model.label}` : "Model",
        `${models.length > 1 ? "" : `${model.name}: `}${model.attention}, ${model.objective}, ` +
          `${model.layers} layers × ${model.heads_per_layer} heads, ` +
          `${model.parameters.toLocaleString("en")} parameters; SHA-256 of the weights ${model.hash}`,
      ]);
    }
    rows.push(["Made", `by protlm ${Content.version} on ${Content.date}`]);
    for (const [term, text] of rows) {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = term;
      dd.textContent = text;
      get("provenance").append(dt, dd);
    }
    for (const one of Data.statistics) {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = one.label;
      dd.textContent = `${one.meaning}${one.unit ? ` (${one.unit})` : ""}`;
      get("meanings").append(dt, dd);
    }
  }

  function fillFooter() {
    const meanings = [...new Set(models.map((model) => `${model.attention}: entry (i, j) is ${model.meaning}`))];
    const all = models.flatMap((model) => model.heads);
    const full = all.filter((head) => head.bin === 1).length;
    const reduced = full === all.length ? "" :
      ` ${full} of ${all.length} maps are full, those of the most contact-like heads; the others are reduced ` +
      `to cells of ${all.find((head) => head.bin > 1).bin} residues.`;
    get("footer-maps").textContent =
      `Rows attend to columns. ${meanings.join("; ")}. The special tokens <cls> and <eos> are left out of the ` +
      `maps, and rows are not normalized again; the statistic "sink mass" is the mean weight of a row on them.${reduced} ` +
      "The table of strongest pairs has weights as computed; other weights are shown with their precision.";
  }

  fillProvenance();
  fillFooter();
})();
