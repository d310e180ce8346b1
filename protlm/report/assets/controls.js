"use strict";
// Connects the controls of the page, the keys and the printer to what is open.

(() => {
  const { get, state, models, protein } = App;
  const map = get("map");

  const listen = (id, kind, act) => get(id).addEventListener(kind, act);
  const parts = () => [protein.identifier, get("map-title").textContent];

  listen("model", "change", (event) => {
    const model = models[Number(event.target.value)];
    App.open(model, App.mostContactLike(model));
  });
  listen("order", "change", App.fillGrid);
  listen("descending", "change", App.fillGrid);
  listen("compare", "change", (event) => {
    const [m, h] = event.target.value.split(".").map(Number);
    const isChosen = event.target.value !== "" && state.head !== null;
    App.setCompared(isChosen ? { model: models[m], head: models[m].heads[h] } : null);
    App.refresh();
  });
  listen("stretch", "change", App.refresh);
  listen("contacts", "change", App.later);
  listen("stretch-logo", "change", App.drawLogo);
  listen("sequence-color", "change", App.colorSequence);
  listen("open-contacts", "click", () => App.open(state.model, null));
  listen("zoom-in", "click", () => App.zoom(0.5));
  listen("zoom-out", "click", () => App.zoom(2));
  listen("zoom-all", "click", () => App.zoom(Infinity));

  listen("save-map-png", "click", () => Export.png(map, parts()));
  listen("save-map-tsv", "click", () => Export.tsv(Export.mapRows(App.getView().matrix), parts()));
  listen("save-structure-png", "click", () => Export.png(Structure.canvas, [protein.identifier, "structure"]));
  listen("save-logo-png", "click", () => Export.png(Logo.canvas, [protein.identifier, "logo"]));
  listen("save-logo-tsv", "click", () =>
    Export.tsv(Export.predictionRows(state.model.predictions), [protein.identifier, "predictions"]));
  listen("save-statistics-tsv", "click", () =>
    Export.tsv(Export.statisticsRows(), [protein.identifier, "heads"]));

  // The cross follows the pointer until a click fixes it.
  map.addEventListener("pointermove", (event) => {
    const pair = state.isFixed ? null : Heatmap.pairAt(map, event, App.getView());
    if (pair) App.point(pair.row, pair.column);
  });
  map.addEventListener("click", (event) => {
    const pair = Heatmap.pairAt(map, event, App.getView());
    if (pair) App.point(pair.row, pair.column, !state.isFixed);
  });
  map.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    App.zoom(event.deltaY < 0 ? 0.8 : 1.25);
  }, { passive: false });

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  function moveCross(event) {
    const by = event.shiftKey ? 10 : 1;
    const [down, right] = STEPS[event.key];
    App.point(state.cursor.row + by * down, state.cursor.column + by * right);
  }
  map.addEventListener("keydown", (event) => {
    const acts = {
      "+": () => App.zoom(0.5),
      "=": () => App.zoom(0.5),
      "-": () => App.zoom(2),
      0: () => App.zoom(Infinity),
      " ": () => App.point(state.cursor.row, state.cursor.column, !state.isFixed),
    };
    const act = event.key in STEPS ? () => moveCross(event) : acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  Sequence.box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    moveCross(event);
  });
  Logo.canvas.addEventListener("click", (event) => {
    const position = Logo.positionAt(event);
    if (position !== null) App.point(state.cursor.row, position);
  });
  listen("spin", "change", (event) => Structure.setSpinning(event.target.checked));

  // Paper is light. The theme of the screen returns afterwards.
  window.addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    App.refresh();
  });
  window.addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    App.refresh();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", App.refresh);

  App.fillChoices();
  App.fillPrecision();
  App.fillLogo();
  App.fillFeatures();
  Sequence.fill((position) => App.point(state.cursor.row, position));
  App.fillGrid();
  const first = App.mostContactLike(models[0]);
  const [pair] = first.pairs;
  if (pair) state.cursor = { row: pair[0], column: pair[1] };
  App.open(models[0], first);
  if (protein.structure && !window.matchMedia("(prefers-reduced-motion: reduce)").matches) {
    get("spin").checked = true;
    Structure.setSpinning(true);
  }
  document.documentElement.dataset.ready = "true";
})();
