"use strict";
// The sparse features: a strip along the sequence for each, which opens it.

const Features = (() => {
  const CELLS = 300;
  const RESIDUES = 12;
  const box = document.getElementById("features");
  let buttons = [];

  const activity = (feature) => Data.decode(feature.activity).weights;
  const nameOf = ({ number, name }) => (name ? `${number} ${name.concept}` : String(number));

  /** The residues at which a feature is active, and the activity, in decreasing order. */
  function residues(feature) {
    const found = Array.from(activity(feature), (value, position) => ({ position, value }));
    return found.filter((one) => one.value > 0).sort((a, b) => b.value - a.value);
  }

  /** One cell a residue or, of a long protein, the largest of several, so that no peak is lost. */
  function strip(feature) {
    const canvas = document.createElement("canvas");
    const values = activity(feature);
    const step = Math.ceil(values.length / CELLS);
    canvas.width = Math.ceil(values.length / step);
    canvas.height = 1;
    const context = canvas.getContext("2d");
    for (let cell = 0; cell < canvas.width; cell++) {
      const top = Math.max(...values.subarray(cell * step, (cell + 1) * step));
      context.fillStyle = Palettes.css(top / feature.activity.scale, false);
      context.fillRect(cell, 0, 1, 1);
    }
    return canvas;
  }

  function button(feature, open) {
    const [made, name, peak] = ["button", "span", "span"].map((tag) => document.createElement(tag));
    const found = residues(feature);
    made.type = "button";
    name.textContent = nameOf(feature);
    peak.textContent = `${Data.residue(found[0].position)} ${Data.number(found[0].value)}`;
    made.append(name, strip(feature), peak);
    made.title = `Feature ${nameOf(feature)}: active at ${found.length} of ${Data.length} residues, most at ` +
      peak.textContent;
    made.setAttribute("aria-label", made.title);
    made.addEventListener("click", () => open(feature));
    return { feature, element: made };
  }

  box.addEventListener("keydown", (event) => {
    const at = buttons.findIndex((one) => one.element === document.activeElement);
    const next = buttons[at + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] || NaN)];
    if (!next) return;
    event.preventDefault();
    for (const one of buttons) one.element.tabIndex = one === next ? 0 : -1;
    next.element.focus();
  });

  function fill(features, open) {
    buttons = features.listed.map((feature) => button(feature, open));
    buttons.forEach((one, at) => (one.element.tabIndex = at ? -1 : 0));
    box.replaceChildren(...buttons.map((one) => one.element));
  }

  /** What is known of a feature, in words. */
  function measured(features, { name }) {
    if (!features.is_described) return "no table of names was given (--description)";
    if (!name) return "it has no name in the table";
    const [f1, low, high, chance] = ["F1", "low", "high", "by chance"].map((one) => name[one].toFixed(2));
    const controls = name["beyond controls"] === "True" ? "above" : "not above";
    return `${name.concept}, F1 ${f1} (95 % interval ${low} to ${high}; by chance ${chance}), ${controls} all controls`;
  }

  function mark(features, open) {
    for (const one of buttons) one.element.setAttribute("aria-pressed", String(one.feature === open));
    const [reading, list] = ["feature-reading", "feature-proteins"].map((id) => document.getElementById(id));
    const examples = open && open.name ? open.name.examples.split("; ").filter(Boolean) : [];
    list.parentElement.hidden = examples.length === 0;
    list.replaceChildren(...examples.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
    if (!open) {
      reading.textContent = "No feature is open.";
      return;
    }
    const found = residues(open);
    const listed = found.slice(0, RESIDUES).map((one) => `${Data.residue(one.position)} ${Data.number(one.value)}`);
    reading.textContent = `Feature ${open.number}: ${measured(features, open)}. Active here at ${found.length} ` +
      `of ${Data.length} residues: ${listed.join(", ")}${found.length > RESIDUES ? ", ..." : ""}.`;
  }

  return { fill, mark, activity };
})();
