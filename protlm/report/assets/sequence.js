"use strict";
// The sequence strip: residues with numbers, colored by what they receive or how they are predicted.

const Sequence = (() => {
  const PER_ROW = 60;
  const box = document.getElementById("sequence");
  const letters = [];
  let marked = [];

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function fill(choose) {
    const { sequence, structure } = Content.protein;
    for (let start = 0; start < sequence.length; start += PER_ROW) {
      const row = element("div", "sequence-row");
      row.append(element("span", "sequence-number", String(start + 1)));
      const line = element("div", "sequence-letters");
      for (let i = start; i < Math.min(start + PER_ROW, sequence.length); i++) {
        const letter = element("span", "", sequence[i]);
        letter.title = Data.residue(i);
        letter.addEventListener("click", () => choose(i));
        letters.push(letter);
        line.append(letter);
      }
      if (structure) line.append(statesLine(structure.states.slice(start, start + PER_ROW)));
      row.append(line);
      box.append(row);
    }
  }

  /** Helix, strand and coil, one letter a residue below the sequence. */
  function statesLine(states) {
    const line = element("div", "states");
    for (const state of states) line.append(element("span", "", state === "C" ? "·" : state));
    line.title = "secondary structure: H helix, E strand, · coil";
    return line;
  }

  /** Colors the residues by values from 0 to `high`. */
  function color(values, high) {
    letters.forEach((letter, i) => {
      const t = high > 0 ? Math.min(Math.max(values[i] / high, 0), 1) : 0;
      letter.style.backgroundColor = Palettes.css(t, false);
      letter.style.color = Palettes.ink(t, false);
    });
  }

  /** Marks the row (solid) and the column (dashed) of the cross. */
  function mark(cursor) {
    for (const letter of marked) letter.classList.remove("in-row", "in-column");
    marked = [letters[cursor.row], letters[cursor.column]];
    marked[0].classList.add("in-row");
    marked[1].classList.add("in-column");
  }

  return { fill, color, mark, box };
})();
