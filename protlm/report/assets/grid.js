"use strict";
// The grid of heads: one thumbnail each, in the order of a statistic.

const Grid = (() => {
  const SIDE = 56;
  const box = document.getElementById("grid");
  let buttons = [];

  /** The thumbnail keeps the largest weights, so that thin lines are seen. */
  function thumbnail(head) {
    const matrix = Data.matrixOf(head);
    const small = Data.pooled(matrix, Math.max(Math.round(matrix.side / SIDE), 1));
    const image = Palettes.image(small, Data.range(small, true));
    image.setAttribute("aria-hidden", "true");
    return image;
  }

  function describe(head, statistic) {
    const listed = statistic === null ? Data.statistics.slice(0, 2)
      : Data.statistics.filter((one) => one.at === statistic);
    const values = listed.map((one) => `${one.label} ${Data.number(head.statistics[one.at])}`);
    return [Data.headName(head), ...values].join(", ");
  }

  function button(head, statistic, open) {
    const made = document.createElement("button");
    made.type = "button";
    made.append(thumbnail(head));
    const caption = document.createElement("span");
    const value = statistic === null ? null : head.statistics[statistic];
    caption.textContent = `${head.layer}-${head.head}${statistic === null ? "" : ` ${Data.number(value)}`}`;
    made.append(caption);
    const kind = head.bin === 1 ? "" : `, reduced to cells of ${head.bin} residues`;
    made.title = describe(head, statistic) + kind;
    made.setAttribute("aria-label", made.title);
    made.addEventListener("click", (event) => open(head, event.shiftKey));
    return made;
  }

  function move(event) {
    const at = buttons.findIndex((one) => one.element === document.activeElement);
    const columns = getComputedStyle(box).gridTemplateColumns.split(" ").length;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = buttons[at + steps[event.key]];
    if (next) focus(next.element);
  }
  box.addEventListener("keydown", move);

  function focus(element) {
    for (const one of buttons) one.element.tabIndex = one.element === element ? 0 : -1;
    element.focus();
  }

  /** Fills the grid. Without a statistic there is a row for each layer. */
  function fill(model, statistic, isDescending, open) {
    const heads = [...model.heads];
    if (statistic !== null) {
      const value = (head) => head.statistics[statistic];
      const sign = isDescending ? -1 : 1;
      heads.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)));
    }
    const columns = Math.min(new Set(heads.map((head) => head.head)).size, 12);
    box.style.gridTemplateColumns =
      statistic === null ? `repeat(${columns}, minmax(38px, 72px))` : "repeat(auto-fill, minmax(62px, 1fr))";
    buttons = heads.map((head) => ({ head, element: button(head, statistic, open) }));
    for (const one of buttons) one.element.tabIndex = -1;
    if (buttons.length) buttons[0].element.tabIndex = 0;
    box.replaceChildren(...buttons.map((one) => one.element));
  }

  /** Marks the open head and the one that it is compared with. */
  function mark(open, compared) {
    for (const { head, element } of buttons) {
      element.setAttribute("aria-pressed", String(head === open));
      element.classList.toggle("compared", head === compared);
      if (head === open) {
        for (const one of buttons) one.element.tabIndex = one.head === open ? 0 : -1;
        reveal(element);
      }
    }
  }

  /** Scrolls the grid, but not the page, to a head. */
  function reveal(element) {
    const [outer, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
    if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top;
    if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
  }

  return { fill, mark };
})();
