"use strict";
// What is open, and the controls that change it.

const App = (() => {
  const get = (id) => document.getElementById(id);
  const PAIRS = 20;
  const { protein, models } = Content;

  // `head` is null where the predicted contacts of the model are open.
  const state = {
    model: models[0],
    head: null,
    compared: null,
    feature: null,
    cursor: { row: 0, column: 0 },
    start: { row: 0, column: 0 },
    size: Data.length,
    isFixed: false,
  };
  let view = null;
  let pending = false;

  // ---- the open map ----

  function openMatrix() {
    if (state.head === null) {
      return Data.matrixOf({ map: state.model.contacts.map, bin: 1 });
    }
    const matrix = Data.matrixOf(state.head);
    return state.compared ? Data.difference(matrix, Data.matrixOf(state.compared.head)) : matrix;
  }

  function nameOf(model, head) {
    const name = head === null ? "predicted contacts" : Data.headName(head);
    return models.length > 1 ? `${name} of ${model.label}` : name;
  }

  function title() {
    const name = nameOf(state.model, state.head);
    const first = name[0].toUpperCase() + name.slice(1);
    return state.compared ? `${first}, less ${nameOf(state.compared.model, state.compared.head)}` : first;
  }

  /** Computes the view anew when another map is open. */
  function refresh() {
    const matrix = openMatrix();
    const pairs = state.head ? state.head.pairs : Data.topPairs(matrix, PAIRS);
    view = { ...view, matrix, pairs, range: Data.range(matrix, get("stretch").checked) };
    get("compare").disabled = state.head === null;
    get("map-title").textContent = title();
    get("map-note").textContent = note(matrix);
    Grid.mark(state.head, state.compared && state.compared.head);
    get("pairs-note").textContent = state.head
      ? `The largest weights of ${nameOf(state.model, state.head)} between residues 6 or more apart.`
      : "The most probable contacts between residues 6 or more apart.";
    Tables.pairs(pairs, (row, column) => point(row, column, true));
    Tables.statistics(open, () => state.head);
    colorSequence();
    drawLogo();
    draw();
  }

  function drawLogo() {
    const { predictions } = state.model;
    if (predictions) Logo.draw(predictions, get("stretch-logo").checked);
  }

  function note(matrix) {
    if (state.head === null) return "Contact probabilities from the attention of all heads.";
    const heads = state.compared ? [state.head, state.compared.head] : [state.head];
    const errors = heads.map((head) => Data.number(head.error)).join(" and ");
    const cells = matrix.bin === 1
      ? "One cell is one residue pair."
      : `One cell is the largest weight of ${matrix.bin} × ${matrix.bin} residue pairs; ` +
        `for the full map, make the page with --layers ${state.head.layer} --heads ${state.head.head}.`;
    return `${cells} Weights are stored in 8 bits; the largest error of this map is ${errors}.`;
  }

  function contactPairs() {
    return protein.structure && get("contacts").checked ? protein.structure.contacts : [];
  }

  function draw() {
    pending = false;
    view = {
      ...view,
      start: state.start,
      size: state.size,
      cursor: state.cursor,
      axes: state.head ? ["residue attended to", "residue that attends"] : ["residue", "residue"],
      contacts: contactPairs(),
      caption: `${protein.identifier.slice(0, 40)}: ${title().slice(0, 70)}`,
      label: `Map of ${title()}. ${reading()}`,
    };
    Heatmap.draw(get("map"), view);
    get("reading").textContent = reading();
    Sequence.mark(state.cursor);
    Relatives.show(state.model, state.head, state.cursor.row);
    Structure.show(view.pairs, state.cursor, state.feature && Features.activity(state.feature));
    if (state.model.predictions) {
      Logo.mark(state.cursor.column);
      get("logo-reading").textContent = Logo.reading(state.model.predictions, state.cursor.column);
    }
  }
  /** Draws at the next frame, once, however often it is called. */
  function later() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  /** The weight below the cross, in words. */
  function reading() {
    const { matrix } = view;
    const { row, column } = state.cursor;
    const [i, j] = [Math.floor(row / matrix.bin), Math.floor(column / matrix.bin)];
    const place = i * matrix.side + j;
    const step = Data.halfStep(matrix, place);
    const w = Data.number(matrix.weights[place]) + (step === null ? "" : ` ± ${Data.number(step)}`);
    const names = [Data.residues(i, matrix.bin), Data.residues(j, matrix.bin)];
    const what = state.head === null ? "probability" : state.compared ? "difference of weights" : "weight";
    const kind = matrix.bin > 1 && !state.compared ? `largest ${what}` : what;
    const far = Structure.distance(row, column);
    const distance = far === null ? "" : `; Cβ–Cβ of ${Data.residue(row)} and ${Data.residue(column)} ` +
      `${far.toFixed(1)} Å${far < 8 ? ", in contact" : ""}`;
    return `Row ${names[0]}, column ${names[1]}: ${kind} ${w}${distance}${state.isFixed ? " (fixed)" : ""}`;
  }

  // ---- actions ----

  function open(model, head) {
    const isOther = model !== state.model;
    state.model = model;
    state.head = head;
    if (head === null || (state.compared && state.compared.head === head)) setCompared(null);
    if (isOther) {
      get("model").value = String(models.indexOf(model));
      fillGrid();
      fillPrecision();
      fillLogo();
      fillFeatures();
    }
    refresh();
  }

  /** The head of the highest precision or, without a structure, of the highest pair contrast. */
  function mostContactLike(model) {
    const [first] = Data.statistics;
    const value = (head) => head.statistics[first.at] ?? -Infinity;
    return model.heads.reduce((best, head) => (value(head) > value(best) ? head : best));
  }

  function setCompared(choice) {
    state.compared = choice;
    const at = choice ? `${models.indexOf(choice.model)}.${choice.model.heads.indexOf(choice.head)}` : "";
    get("compare").value = at;
  }

  function choose(head, isCompared) {
    if (isCompared && head !== state.head && state.head !== null) {
      setCompared({ model: state.model, head });
      refresh();
    } else {
      open(state.model, head);
    }
  }

  const clamp = (n, low, high) => Math.min(Math.max(n, low), high);

  function point(row, column, isFixed = state.isFixed) {
    const last = Data.length - 1;
    state.cursor = { row: clamp(row, 0, last), column: clamp(column, 0, last) };
    state.isFixed = isFixed;
    for (const axis of ["row", "column"]) {
      const at = state.cursor[axis];
      if (at < state.start[axis]) state.start = { ...state.start, [axis]: at };
      if (at >= state.start[axis] + state.size) {
        state.start = { ...state.start, [axis]: at - state.size + 1 };
      }
    }
    later();
  }

  function zoom(factor) {
    const size = clamp(Math.round(state.size * factor), Math.min(8, Data.length), Data.length);
    const start = (axis) =>
      clamp(Math.round(state.cursor[axis] - size / 2), 0, Data.length - size);
    state.start = size === Data.length ? { row: 0, column: 0 } : { row: start("row"), column: start("column") };
    state.size = size;
    later();
  }

  // ---- parts of the page ----

  function fillGrid() {
    const value = get("order").value;
    Grid.fill(state.model, value === "" ? null : Number(value), get("descending").checked, choose);
    Grid.mark(state.head, state.compared && state.compared.head);
  }

  function option(value, text) {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = text;
    return made;
  }

  function fillChoices() {
    get("model").append(...models.map((model, at) => option(String(at), model.label)));
    get("model-label").hidden = models.length === 1;
    const orders = Data.statistics.map((one) => option(String(one.at), one.label));
    get("order").append(option("", "layer and head"), ...orders);
    const heads = models.flatMap((model, m) =>
      model.heads.map((head, h) => option(`${m}.${h}`, nameOf(model, head))));
    get("compare").append(option("", "no other head"), ...heads);
    const colors = [option("received", "mean weight that a residue receives (last head opened)")];
    if (models.some((model) => model.predictions)) colors.push(option("entropy", "entropy of the prediction"));
    if (models.some((model) => model.features)) colors.push(option("feature", "activity of the open sparse feature"));
    get("sequence-color").append(...colors);
    get("contacts-label").hidden = protein.structure === null;
    get("structure-section").hidden = protein.structure === null;
  }

  function fillFeatures() {
    const { features } = state.model;
    get("features-section").hidden = !features;
    state.feature = null;
    if (!features) return;
    const number = (n) => n.toLocaleString("en");
    const named = features.is_described
      ? "those with a name, other than a single amino acid, and the strongest others" : "the strongest";
    get("features-note").textContent =
      `${number(features.active)} of the ${number(features.latents)} features of layer ${features.layer} are active ` +
      `here. These ${features.listed.length} are ${named}: where each is active, and its highest activity. Select one to open it, and again to ` +
      "close it: it colors the sequence and marks the structure, in place of the pairs. Up and down arrows move " +
      "between features.";
    Features.fill(features, openFeature);
    Features.mark(features, null);
  }

  function openFeature(feature) {
    state.feature = feature === state.feature ? null : feature;
    get("sequence-color").value = state.feature ? "feature" : "received";
    Features.mark(state.model.features, state.feature);
    colorSequence();
    later();
  }

  function colorSequence() {
    if (get("sequence-color").value === "feature") {
      const open = state.feature;
      Sequence.color(open ? Features.activity(open) : new Float32Array(Data.length), open ? open.activity.scale : 1);
      get("sequence-legend").textContent =
        open ? `feature ${open.number}; dark: 0; bright: ${Data.number(open.activity.scale)}` : "no feature is open";
      return;
    }
    const byEntropy = get("sequence-color").value === "entropy" && state.model.predictions;
    const legend = get("sequence-legend");
    if (byEntropy) {
      Sequence.color(state.model.predictions.entropy, Math.log(20));
      legend.textContent = "dark: certain; bright: any residue (ln 20 = 3.00 nats)";
      return;
    }
    if (state.head === null) return;
    const received = Data.decode(state.head.received).weights;
    const top = Math.max(...received);
    Sequence.color(received, top);
    legend.textContent = `dark: 0; bright: ${Data.number(top)}`;
  }

  function fillPrecision() {
    const { contacts } = state.model;
    get("precision-section").hidden = contacts === null;
    if (contacts === null) return;
    const known = contacts.precision.length > 0;
    get("precision-note").textContent =
      (known ? "Contacts among the most probable pairs, by separation in the chain. " : "") +
      (contacts.heads_used ? `The regression uses ${contacts.heads_used} heads.`
        : "The regression gives no head a weight: all pairs are equally probable.");
    if (known) Tables.precision(contacts);
    else get("precision").replaceChildren();
  }

  function fillLogo() {
    const { predictions } = state.model;
    get("logo-section").hidden = !predictions;
    if (!predictions) return;
    const how = predictions.kind === "masked"
      ? "with this residue masked and all others given"
      : "given the residues before it (the model is causal)";
    get("logo-note").textContent =
      `The distribution over 20 amino acids at each position, ${how}. The height of a stack is its ` +
      "information, log2 20 less the entropy; the letter below is the residue of the protein. Stretched, " +
      "the axis ends at the 95th percentile, and higher stacks are cut to it.";
  }

  return { state, get, refresh, later, point, zoom, open, mostContactLike, setCompared, fillGrid, fillChoices, fillPrecision,
    fillLogo, fillFeatures, drawLogo, colorSequence, models, protein, getView: () => view };
})();
