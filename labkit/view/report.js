// Charts that answer to the pointer: values are read off in all charts at once, a drag zooms, a double click shows
// everything again, a name hides its lines. No library, no network; every text is set as text.
"use strict";
function draw(data) {
  const WIDTH = 430, LEFT = 56, RIGHT = 8, TOP = 22, BOTTOM = 20, ROW = 30, SVG = "http://www.w3.org/2000/svg";
  const place = document.getElementById("charts"), hidden = new Set(), groups = [];
  let axis = data.axes[0].name, scale = "automatic";

  function svg(name, attributes, parent, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  function html(name, attributes, ...children) {
    const node = Object.assign(document.createElement(name), attributes);
    node.append(...children);
    return node;
  }
  function number(value) {
    const size = Math.abs(value);
    if (size && (size >= 1e7 || size < 1e-4)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  }
  function along(x, name) {
    if (name === "ms") return `${number(x)} ms`;
    if (name !== "time") return `${name} ${Math.round(x).toLocaleString("en")}`;
    return x < 100 ? `${number(x)} s` : x < 6000 ? `${+(x / 60).toPrecision(3)} min` : `${+(x / 3600).toPrecision(3)} h`;
  }
  function spots(low, high, name) { // ticks of the x axis; times are round in the unit in which they are shown
    const unit = name !== "time" || high < 100 ? 1 : high < 6000 ? 60 : 3600;
    return ticks(low / unit, high / unit).map((x) => x * unit);
  }
  function ticks(low, high) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 4)), rough = (high - low) / 4 / power;
    const step = power * (rough < 1.5 ? 1 : rough < 3.5 ? 2 : rough < 7.5 ? 5 : 10), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }
  function decades(low, high) {
    const found = [], few = high / low < 100;
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
      for (const times of few ? [1, 2, 5] : [1]) if (power * times >= low && power * times <= high) found.push(power * times);
    return found.filter((_, i) => few || i % Math.ceil(found.length / 4) === 0);
  }

  function closest(line, x) {
    return line.points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  }

  class Group { // charts with one x axis: they are zoomed and read together
    constructor(name, charts) {
      this.name = name; this.zoom = null;
      this.charts = charts.map((chart) => new Chart(chart, this));
      const ends = charts.flatMap((chart) => chart.bars
        ? chart.bars.flatMap((bar) => [bar[0], bar[1]])
        : chart.lines.flatMap((line) => line.points.length ? [line.points[0][0], line.points.at(-1)[0]] : []));
      this.whole = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
      if (this.whole[0] === this.whole[1]) this.whole[1] += 1;
    }
    get range() { return this.zoom || this.whole; }
    draw() { for (const chart of this.charts) chart.draw(); }
    read(x) { for (const chart of this.charts) chart.read(x); }
  }

  class Chart {
    constructor(chart, group) {
      this.chart = chart; this.group = group;
      this.width = chart.bars ? 2 * WIDTH : WIDTH;
      this.height = chart.bars ? TOP + BOTTOM + ROW * chart.rows.length : 170;
      this.title = html("b", {textContent: chart.title});
      this.said = html("span", {className: "read"}, ...(chart.kinds || []).map(([name, colour]) =>
        html("span", {}, html("i", {style: `background:${colour}`}), name)));
      const last = chart.bars ? "" : chart.lines.filter((line) => line.points.length)
        .map((line) => `${line.name} ${number(line.points.at(-1)[1])}`).join(", ");
      this.svg = svg("svg", {viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": `${chart.title}: ${last}`});
      this.box = html("figure", {className: chart.bars ? "wide" : ""},
        html("figcaption", {}, this.title, html("small", {textContent: ` ${[chart.unit, chart.note].filter(Boolean).join(" · ")}`})),
        this.svg, this.said);
      this.listen();
    }
    x(value) { const [a, b] = this.group.range; return LEFT + (this.width - LEFT - RIGHT) * (value - a) / (b - a); }
    at(event) {
      const box = this.svg.getBoundingClientRect(), [a, b] = this.group.range;
      const px = (event.clientX - box.left) / box.width * this.width;
      return a + (b - a) * Math.min(1, Math.max(0, (px - LEFT) / (this.width - LEFT - RIGHT)));
    }
    shown() { return this.chart.lines.filter((line) => !hidden.has(line.name) && line.points.length); }
    nearest(x) { // of the points that are drawn here
      if (this.chart.bars || !this.shown().length) return x;
      return this.shown().map((line) => closest(line, x)[0]).reduce((best, at) => Math.abs(at - x) < Math.abs(best - x) ? at : best);
    }
    listen() {
      let from = null;
      this.svg.addEventListener("pointerdown", (event) => { from = this.at(event); this.svg.setPointerCapture(event.pointerId); });
      this.svg.addEventListener("pointermove", (event) => {
        const x = this.at(event);
        this.group.read(this.nearest(x));
        if (from === null) return;
        this.chosen.setAttribute("x", Math.min(this.x(from), this.x(x)));
        this.chosen.setAttribute("width", Math.abs(this.x(from) - this.x(x)));
      });
      this.svg.addEventListener("pointerup", (event) => {
        const range = [from, this.at(event)].sort((a, b) => a - b), [a, b] = this.group.range;
        from = null;
        this.chosen.setAttribute("width", 0);
        if (range[1] - range[0] > (b - a) / 100) { this.group.zoom = range; this.group.draw(); }
      });
      this.svg.addEventListener("pointerleave", () => this.group.read(null));
      this.svg.addEventListener("dblclick", () => { this.group.zoom = null; this.group.draw(); });
    }
    draw() {
      this.svg.replaceChildren();
      this.y = null;
      const [a, b] = this.group.range, bottom = this.height - BOTTOM, right = this.width - RIGHT;
      const marks = spots(a, b, this.group.name);
      svg("path", {d: marks.map((x) => `M${this.x(x)} ${bottom}v4`).join(""), stroke: "currentColor", opacity: .5}, this.svg);
      for (const x of marks) svg("text", {x: this.x(x), y: this.height - 5,
        "text-anchor": this.x(x) > right - 20 ? "end" : "middle"}, this.svg, along(x, this.group.name));
      const clip = `clip${charts.indexOf(this)}`;
      svg("rect", {x: LEFT, y: TOP - 6, width: right - LEFT + 6, height: bottom - TOP + 8}, svg("clipPath", {id: clip}, this.svg));
      this.inside = svg("g", {"clip-path": `url(#${clip})`}, this.svg);
      if (this.chart.bars) this.drawBars(); else this.drawLines(a, b, bottom, right);
      for (const [x, text] of this.chart.marks || []) {
        svg("path", {d: `M${this.x(x)} ${TOP}V${bottom}`, stroke: "currentColor", "stroke-dasharray": "2 3", opacity: .6}, this.inside);
        svg("text", {x: this.x(x) + 3, y: TOP + 8}, this.inside, text);
      }
      this.cursor = svg("path", {stroke: "currentColor", opacity: .5}, this.inside);
      this.dots = svg("g", {}, this.inside);
      this.chosen = svg("rect", {y: TOP, height: bottom - TOP, fill: "currentColor", opacity: .15}, this.inside);
    }
    drawBars() {
      this.chart.rows.forEach((row, i) => svg("text", {x: LEFT - 4, y: TOP + ROW * i + 14, "text-anchor": "end"}, this.svg, row));
      for (const [from, to, row, below, colour, text] of this.chart.bars) {
        if (this.x(to) < LEFT || this.x(from) > this.width) continue;
        const bar = svg("rect", {x: this.x(from), y: TOP + ROW * row + (below ? 18 : 1), height: below ? 6 : 16,
          width: Math.max(.4, this.x(to) - this.x(from)), fill: colour}, this.inside);
        svg("title", {}, bar, text);
      }
    }
    drawLines(a, b, bottom, right) {
      const {chart} = this, lines = chart.lines.filter((line) => !hidden.has(line.name));
      const seen = lines.flatMap((line) => line.points.filter((point) => point[0] >= a && point[0] <= b).map((point) => point[1]));
      let low = Math.min(...seen), high = Math.max(...seen);
      if (!seen.length) { svg("text", {x: (LEFT + right) / 2, y: this.height / 2, "text-anchor": "middle"}, this.svg, "no data"); return; }
      if (chart.peak) high = Math.max(high, chart.peak);
      if (chart.limit && chart.limit < 4 * high) high = Math.max(high, chart.limit);
      const log = low > 0 && (scale === "logarithmic" || scale === "automatic" && !chart.from_zero && high / low > 30);
      if (!log && chart.from_zero) low = Math.min(0, low);
      if (low === high) { high += Math.abs(high) / 2 || 1; low -= log || low === 0 ? 0 : Math.abs(low) / 2; }
      const room = log ? 0 : (high - low) * .04, of = log ? Math.log : Number;
      const [bot, top] = [of(low) - (chart.from_zero ? 0 : room), of(high) + room];
      const y = this.y = (value) => bottom - (bottom - TOP) * (of(value) - bot) / (top - bot);
      for (const value of log ? decades(low, high) : ticks(low, high)) {
        svg("path", {d: `M${LEFT} ${y(value)}H${right}`, stroke: "currentColor", opacity: .15}, this.svg);
        svg("text", {x: LEFT - 4, y: y(value) + 3, "text-anchor": "end"}, this.svg, number(value));
      }
      if (chart.limit && chart.limit < 4 * high) {
        svg("path", {d: `M${LEFT} ${y(chart.limit)}H${right}`, stroke: "#e5534b", "stroke-dasharray": "8 3"}, this.inside);
        svg("text", {x: right - 2, y: y(chart.limit) + 11, "text-anchor": "end"}, this.inside, `limit ${number(chart.limit)}`);
      }
      if (chart.peak)
        svg("path", {d: `M${LEFT} ${y(chart.peak)}H${right}`, stroke: "currentColor", "stroke-dasharray": "1 3"}, this.inside);
      for (const line of lines) {
        const points = line.points.map((point) => `${this.x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
        svg("path", {d: `M${points.join("L")}`, fill: "none", stroke: line.colour, "stroke-width": line.width,
          "stroke-dasharray": line.dash, "stroke-linejoin": "round"}, this.inside);
        for (const point of line.width > 2 && points.length < 60 ? line.points : [])
          svg("circle", {cx: this.x(point[0]), cy: y(point[1]), r: 2.4, fill: line.colour}, this.inside);
      }
      if (chart.best) {
        svg("circle", {cx: this.x(chart.best[0]), cy: y(chart.best[1]), r: 5, fill: "none", stroke: "#e5534b", "stroke-width": 1.6}, this.inside);
        const above = y(chart.best[1]) > TOP + 14;
        svg("text", {x: this.x(chart.best[0]) - 8, y: y(chart.best[1]) + (above ? -6 : 14), "text-anchor": this.x(chart.best[0]) > 2 * LEFT ? "end" : "start", "font-weight": 600}, this.inside,
          `best ${number(chart.best[1])}`);
      }
    }
    read(x) {
      this.cursor.setAttribute("d", x === null ? "" : `M${this.x(x)} ${TOP}V${this.height - BOTTOM}`);
      if (this.chart.bars) return;
      this.said.replaceChildren();
      this.dots.replaceChildren();
      if (x === null) return;
      this.said.append(along(x, this.group.name));
      for (const line of this.shown()) {
        const point = closest(line, x);
        this.said.append(html("span", {}, html("i", {style: `background:${line.colour}`}), `${line.name} ${number(point[1])}`));
        if (this.y) svg("circle", {cx: this.x(point[0]), cy: this.y(point[1]), r: 3, fill: line.colour}, this.dots);
      }
    }
  }

  function choice(label, names, chosen, act) {
    const select = html("select", {}, ...names.map((name) => html("option", {textContent: name, selected: name === chosen})));
    select.addEventListener("change", () => { act(select.value); show(); });
    return html("label", {}, `${label} `, select);
  }
  let charts = [];
  function show() {
    const of = data.axes.find((each) => each.name === axis), names = new Map();
    for (const chart of of.charts) for (const line of chart.lines) if (!names.has(line.name)) names.set(line.name, line.colour);
    const keys = [...names].map(([name, colour]) => {
      const key = html("button", {ariaPressed: !hidden.has(name)}, html("i", {style: `background:${colour}`}), name);
      key.addEventListener("click", () => { if (!hidden.delete(name)) hidden.add(name); show(); });
      return key;
    });
    groups.splice(0, groups.length, new Group(axis, of.charts), ...data.timeline ? [new Group("ms", [data.timeline])] : []);
    charts = groups.flatMap((group) => group.charts);
    place.replaceChildren(
      html("p", {}, choice("over", data.axes.map((each) => each.name), axis, (value) => { axis = value; }), " ",
        choice("scale", ["automatic", "linear", "logarithmic"], scale, (value) => { scale = value; }), " ", ...keys),
      html("small", {textContent: "Drag across a chart to zoom, double-click to see everything again."}),
      html("div", {className: "charts"}, ...charts.map((chart) => chart.box)));
    for (const group of groups) group.draw();
  }
  show();
}
