// Adds to the drawn charts: values read off in all of them at once, a drag that zooms, a double click that shows
// everything again, names that hide their lines, and the choice of the axis and the scale. It draws nothing.
"use strict";
{
  const charts = document.getElementById("charts"), looks = {over: "time", scale: "automatic"}, hidden = new Set();
  let zoom = [0, 1], dragged = null; // shares of the axis
  const SMALLEST = 1 / 100; // of the axis: lines have few points in less, and labels few digits

  function make(name, attributes, ...children) {
    const node = Object.assign(document.createElement(name), attributes);
    node.append(...children);
    return node;
  }
  function figures() { // those that are seen
    return [...charts.querySelectorAll("[data-looks]:not([hidden])")].map((box) => {
      const svg = box.querySelector("svg"), labels = svg.querySelector(".x");
      const [x0, x1, left, right] = labels ? labels.dataset.x.split(" ").map(Number) : [0, 1, 0, 1];
      const columns = [...svg.querySelectorAll('g[pointer-events="stroke"] > path')];
      return {box, svg, labels, x0, x1, left, right, columns, text: box.querySelector(".read"), wide: box.parentNode.className.includes("wide")};
    });
  }
  function shown(x, over) {
    if (over !== "time") return Math.round(x).toLocaleString("en");
    return x < 100 ? `${+x.toPrecision(3)} s` : x < 6000 ? `${+(x / 60).toPrecision(3)} min` : `${+(x / 3600).toPrecision(3)} h`;
  }
  function share(event, figure) { // of the axis, under the pointer
    const box = figure.svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * figure.svg.viewBox.baseVal.width;
    const seen = Math.min(1, Math.max(0, (px - figure.left) / (figure.right - figure.left)));
    return zoom[0] + seen * (zoom[1] - zoom[0]);
  }
  function read(from, to) { // says the values at `to`, and marks what lies between
    for (const {text, columns, left, right} of figures()) {
      const place = (column) => (Number(column.getAttribute("d").match(/[\d.]+/)[0]) - left) / (right - left);
      const near = (at) => columns.reduce((best, each) => Math.abs(place(each) - at) < Math.abs(place(best) - at) ? each : best);
      const [first, last] = columns.length && to !== null ? [near(from), near(to)].map(place).sort((a, b) => a - b) : [1, 0];
      for (const column of columns) {
        column.setAttribute("stroke", place(column) >= first && place(column) <= last ? "currentColor" : "none");
        column.setAttribute("stroke-opacity", 0.12);
      }
      const rows = first <= last ? near(to).textContent.split("\n") : [];
      text.textContent = rows.filter((row) => ![...hidden].some((name) => row.startsWith(`${name} `))).join(" · ");
    }
  }
  function show() {
    for (const box of charts.querySelectorAll("[data-looks]"))
      if (box.dataset.looks) box.hidden = !box.dataset.looks.split("|").includes(`${looks.over} ${looks.scale}`);
    for (const {box, svg} of figures()) { // the values under the pointer are in one picture of each axis
      const columns = [...box.parentNode.querySelectorAll('g[pointer-events="stroke"]')];
      const own = columns.find((each) => each.closest("[data-looks]").dataset.looks.startsWith(`${looks.over} `));
      if (own && !svg.contains(own)) svg.querySelector(".plot").append(own);
    }
    for (const line of charts.querySelectorAll("[data-line]")) line.style.display = hidden.has(line.dataset.line) ? "none" : "";
    const zoomed = zoom[0] > 0 || zoom[1] < 1, scale = 1 / (zoom[1] - zoom[0]);
    for (const figure of figures()) {
      if (!figure.labels || figure.wide) continue;
      const start = figure.left + zoom[0] * (figure.right - figure.left);
      figure.box.classList.toggle("zoomed", zoomed);
      figure.svg.querySelector(".plot")?.setAttribute("transform", zoomed ? `translate(${figure.left - start * scale} 0) scale(${scale} 1)` : "");
      for (const label of figure.labels.children) {
        label.dataset.text ??= label.textContent;
        const at = zoom[0] + (label.getAttribute("x") - figure.left) / (figure.right - figure.left) * (zoom[1] - zoom[0]);
        label.textContent = zoomed ? shown(figure.x0 + at * (figure.x1 - figure.x0), looks.over) : label.dataset.text;
      }
    }
  }
  function choice(name, values) {
    const select = make("select", {}, ...values.map((value) => make("option", {textContent: value})));
    select.addEventListener("change", () => { looks[name] = select.value; zoom = [0, 1]; show(); });
    return make("label", {}, `${name} `, select, " ");
  }
  const colours = new Map();
  for (const line of charts.querySelectorAll("[data-line]"))
    if (!colours.has(line.dataset.line)) colours.set(line.dataset.line, line.lastChild.getAttribute("stroke"));
  const keys = [...colours].map(([name, colour]) => {
    const key = make("button", {ariaPressed: true}, make("span", {textContent: "● ", style: `color:${colour}`}), name);
    key.addEventListener("click", () => { if (!hidden.delete(name)) hidden.add(name); key.ariaPressed = !hidden.has(name); show(); });
    return key;
  });
  charts.before(
    make("p", {}, choice("over", ["time", "step"]), choice("scale", ["automatic", "linear", "logarithmic"]), ...keys),
    make("small", {textContent: "Drag across a chart to zoom, double-click to see everything again."}));

  charts.addEventListener("pointerdown", (event) => {
    const figure = figures().find((each) => each.svg.contains(event.target) && !each.wide);
    if (figure) { dragged = share(event, figure); figure.svg.setPointerCapture(event.pointerId); }
  });
  charts.addEventListener("pointermove", (event) => {
    const figure = figures().find((each) => each.svg.contains(event.target));
    const at = figure && !figure.wide ? share(event, figure) : null;
    read(at === null ? null : dragged ?? at, at);
    if (figure?.wide) figure.text.textContent = event.target.querySelector?.(":scope > title")?.textContent ?? "";
  });
  charts.addEventListener("pointerup", (event) => {
    const figure = figures().find((each) => each.svg.contains(event.target));
    if (dragged !== null && figure) {
      const ends = [dragged, share(event, figure)].sort((a, b) => a - b);
      if (ends[1] - ends[0] > Math.max(SMALLEST, (zoom[1] - zoom[0]) / 50)) { zoom = ends; show(); }
    }
    dragged = null;
    read(null, null);
  });
  for (const end of ["pointerleave", "pointercancel"]) // a finger that scrolls the page cancels its drag
    charts.addEventListener(end, () => { dragged = null; read(null, null); });
  charts.addEventListener("dblclick", () => { zoom = [0, 1]; show(); });
}
