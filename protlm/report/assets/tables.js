"use strict";
// Tables: statistics of heads, strongest pairs, and the precision of predicted contacts.

const Tables = (() => {
  function cell(tag, content) {
    const made = document.createElement(tag);
    made.append(content);
    return made;
  }
  function button(text, act, label) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    if (label) made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  }
  function row(tag, contents) {
    const made = document.createElement("tr");
    made.append(...contents.map((content) => cell(tag, content)));
    return made;
  }
  function fill(table, head, rows) {
    const [top, body] = [document.createElement("thead"), document.createElement("tbody")];
    top.append(head);
    body.append(...rows);
    table.replaceChildren(top, body);
  }

  let order = { statistic: null, sign: 1 };

  /** All heads of all models; a heading sorts, a name opens the head. */
  function statistics(open, selected) {
    const table = document.getElementById("statistics");
    const named = Content.models.length > 1;
    const again = (statistic) => () => {
      order = { statistic, sign: order.statistic === statistic ? -order.sign : -1 };
      statistics(open, selected);
    };
    const heading = row("th", [
      ...(named ? ["model"] : []),
      button("head", again(null)),
      ...Data.statistics.map((one) => button(one.label, again(one.at))),
    ]);
    const columns = [...heading.children].slice(named ? 1 : 0);
    columns.forEach((th, at) => {
      const isSorted = (at === 0 ? null : Data.statistics[at - 1].at) === order.statistic;
      th.scope = "col";
      th.setAttribute("aria-sort", !isSorted ? "none" : order.sign > 0 ? "ascending" : "descending");
    });
    const rows = sorted().map(({ model, head }) => {
      const name = Data.headName(head);
      const made = row("td", [
        ...(named ? [model.label] : []),
        button(`${head.layer}-${head.head}`, () => open(model, head), `Open ${name}`),
        ...Data.statistics.map((one) => Data.number(head.statistics[one.at])),
      ]);
      made.classList.toggle("selected", head === selected());
      return made;
    });
    fill(table, heading, rows);
  }

  function sorted() {
    const all = Content.models.flatMap((model) => model.heads.map((head) => ({ model, head })));
    if (order.statistic === null) return all;
    const value = (one) => one.head.statistics[order.statistic];
    return all.sort((a, b) => (value(a) === null) - (value(b) === null) || order.sign * (value(a) - value(b)));
  }

  /** The strongest pairs of the open map; a pair moves the cross. */
  function pairs(listed, choose) {
    const table = document.getElementById("pairs");
    const known = Content.protein.structure !== null;
    const heading = row("th", ["attends", "to", "weight", "apart", ...(known ? ["Cβ–Cβ"] : [])]);
    const rows = listed.map(([i, j, w]) => {
      const far = Structure.distance(i, j);
      const names = [Data.residue(i), Data.residue(j)];
      return row("td", [
        button(names[0], () => choose(i, j), `Show ${names[0]} and ${names[1]}`),
        names[1],
        Data.number(w),
        String(Math.abs(i - j)),
        ...(known ? [far === null ? "unresolved" : `${far.toFixed(1)} Å${far < 8 ? " contact" : ""}`] : []),
      ]);
    });
    fill(table, heading, rows);
  }

  function precision(contacts) {
    const table = document.getElementById("precision");
    const labels = [...new Set(contacts.precision.map((one) => one.pairs))];
    const ranges = [...new Set(contacts.precision.map((one) => one.range))];
    const found = (range, label) => contacts.precision.find((one) => one.range === range && one.pairs === label);
    const rows = ranges.map((range) =>
      row("td", [
        range,
        ...labels.map((label) => {
          const { hits, asked } = found(range, label);
          return asked ? `${((100 * hits) / asked).toFixed(0)} % (${hits}/${asked})` : "–";
        }),
      ]));
    fill(table, row("th", ["separation", ...labels]), rows);
  }

  return { row, fill, statistics, pairs, precision };
})();
