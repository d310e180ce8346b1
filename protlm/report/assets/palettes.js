"use strict";
// Colors: viridis for weights, blue to red for differences, and those of the theme.

const Palettes = (() => {
  const VIRIDIS = [
    "440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c",
    "1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725",
  ];
  const BLUE_RED = [
    "053061", "2065ab", "4393c3", "90c4dd", "d1e5f0", "f7f6f6",
    "fddbc7", "f3a481", "d6604d", "b1182b", "67001f",
  ];

  function table(anchors) {
    const rgb = anchors.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    const colors = new Uint8Array(256 * 3);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (rgb.length - 1);
      const low = Math.min(Math.floor(place), rgb.length - 2);
      for (let c = 0; c < 3; c++) {
        colors[i * 3 + c] = Math.round(rgb[low][c] + (place - low) * (rgb[low + 1][c] - rgb[low][c]));
      }
    }
    return colors;
  }
  const viridis = table(VIRIDIS);
  const blueRed = table(BLUE_RED);

  /** The place of a weight on its palette, 0 to 1, on a square-root scale. */
  function unit(w, range, isSigned) {
    if (range.high === 0) return isSigned ? 0.5 : 0;
    if (isSigned) {
      return 0.5 + 0.5 * Math.sign(w) * Math.min(Math.sqrt(Math.abs(w) / range.high), 1);
    }
    const low = Math.sqrt(range.low);
    const t = (Math.sqrt(Math.max(w, 0)) - low) / (Math.sqrt(range.high) - low);
    return Math.min(Math.max(t, 0), 1);
  }

  function css(t, isSigned) {
    const colors = isSigned ? blueRed : viridis;
    const at = Math.round(t * 255) * 3;
    return `rgb(${colors[at]} ${colors[at + 1]} ${colors[at + 2]})`;
  }

  /** Returns black or white, whichever is legible on the color at t. */
  function ink(t, isSigned) {
    const colors = isSigned ? blueRed : viridis;
    const at = Math.round(t * 255) * 3;
    const luminance = 0.299 * colors[at] + 0.587 * colors[at + 1] + 0.114 * colors[at + 2];
    return luminance > 130 ? "#000000" : "#ffffff";
  }

  /** Draws a matrix on a canvas of its own, one pixel a cell. */
  function image(matrix, range) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = matrix.side;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(matrix.side, matrix.side);
    const colors = matrix.isSigned ? blueRed : viridis;
    matrix.weights.forEach((w, place) => {
      const at = Math.round(unit(w, range, matrix.isSigned) * 255) * 3;
      pixels.data[place * 4] = colors[at];
      pixels.data[place * 4 + 1] = colors[at + 1];
      pixels.data[place * 4 + 2] = colors[at + 2];
      pixels.data[place * 4 + 3] = 255;
    });
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  /** A color of the theme, by the name of its variable in page.css. */
  const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Prepares a canvas of width × height CSS pixels for sharp screens and for print. */
  function prepared(canvas, width, height) {
    const scale = Math.max(window.devicePixelRatio || 1, 2);
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = themed("panel");
    context.fillRect(0, 0, width, height);
    return context;
  }

  return { unit, css, ink, image, themed, prepared };
})();
