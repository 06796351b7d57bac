// The four drawings. Each takes its data and the element to fill, and draws an SVG with axes, units and legends.
const PHASES = ["pack", "network", "in_domain", "unpack", "load"];
const LINK_NAME = { network: "network", in_domain: "in-domain", local: "local copy" };
const colour = (name) => `var(--${name.replace("_", "-")})`;

function svg(parent, tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function canvas(where, width, height, label) {
  where.replaceChildren();
  return svg(where, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

function hover(element, text) {
  element.dataset.tip = text;
}

// Square root, so that small amounts stay visible beside large ones; the legend shows the same curve.
const shade = (share) => (0.1 + 0.9 * Math.sqrt(share)).toFixed(3);

const ranksOf = (block) => (block.first === block.last ? `rank ${block.first}` : `ranks ${block.first}-${block.last}`);

function drawHeat(where, heat) {
  const left = 64, top = 40, side = 450, bottom = 92;
  const rows = heat.rows.length, columns = heat.columns.length;
  const root = canvas(where, left + side + 14, top + side + bottom, "Heat map of bytes from sender to receiver");
  if (!rows) return svg(root, "text", { x: left, y: top }, "Nothing moves.");
  const w = side / columns, h = side / rows;
  svg(root, "rect", { x: left, y: top, width: side, height: side, class: "heat-ground" });
  const most = heat.links.map((_, link) => Math.max(0, ...heat.cells.map((cell) => cell[2 + link])));
  for (const cell of heat.cells) {
    const amounts = cell.slice(2);
    const link = amounts.indexOf(Math.max(...amounts));
    const gap = w > 6 && h > 6 ? 0.6 : 0;
    const box = svg(root, "rect", {
      class: "heat-cell", x: (left + cell[1] * w).toFixed(2), y: (top + cell[0] * h).toFixed(2),
      width: (w - gap).toFixed(2), height: (h - gap).toFixed(2), fill: colour(heat.links[link]),
      "fill-opacity": shade(amounts[link] / most[link]),
    });
    const parts = amounts.map((bytes, i) => (bytes ? `${LINK_NAME[heat.links[i]]}: ${size(bytes)}` : "")).filter(Boolean);
    hover(box, `${ranksOf(heat.rows[cell[0]])} to ${ranksOf(heat.columns[cell[1]])}\n${parts.join("\n")}`);
  }
  heatAxis(root, heat.rows, left, top, h, false);
  heatAxis(root, heat.columns, left, top, w, true);
  svg(root, "text", { x: left + side / 2, y: 12, "text-anchor": "middle", class: "name" }, "receives (joint rank)");
  svg(root, "text", {
    x: 0, y: 0, "text-anchor": "middle", class: "name", transform: `translate(11 ${top + side / 2}) rotate(-90)`,
  }, "sends (joint rank)");
  heatLegend(root, heat, most, left, top + side + 16, side);
}

// Rank numbers along one edge, and a bracket per side of the refit.
function heatAxis(root, blocks, left, top, step, across) {
  const every = Math.max(1, Math.ceil(blocks.length / 8));
  blocks.forEach((block, i) => {
    if (i % every) return;
    const at = (across ? left : top) + i * step + Math.min(step / 2, 8);
    svg(root, "text", across ? { x: at, y: top - 5, "text-anchor": "middle" }
      : { x: left - 6, y: at + 4, "text-anchor": "end" }, block.first);
  });
  for (let i = 1; i < blocks.length; i++) {
    if (blocks[i].side === blocks[i - 1].side) continue;
    const at = (across ? left : top) + i * step;
    svg(root, "line", across ? { x1: at, x2: at, y1: top, y2: top + 450, class: "axis" }
      : { y1: at, y2: at, x1: left, x2: left + 450, class: "axis" });
  }
}

function heatLegend(root, heat, most, left, y, width) {
  let x = left;
  heat.links.forEach((link, i) => {
    if (!most[i]) return;
    const id = `ramp-${link}`;
    const gradient = svg(root, "linearGradient", { id });
    for (const offset of [0, 0.04, 0.16, 0.36, 0.64, 1]) {
      svg(gradient, "stop", { offset, "stop-color": colour(link), "stop-opacity": shade(offset) });
    }
    svg(root, "rect", { x, y: y + 6, width: 130, height: 10, fill: `url(#${id})`, class: "heat-ramp" });
    svg(root, "text", { x, y }, LINK_NAME[link]);
    svg(root, "text", { x, y: y + 29 }, "0");
    svg(root, "text", { x: x + 130, y: y + 29, "text-anchor": "end" }, size(most[i]));
    x += width / 3 + 5;
  });
  const per = heat.block_ranks > 1 ? `${heat.block_ranks} x ${heat.block_ranks} ranks` : "a pair of ranks";
  svg(root, "text", { x: left, y: y + 52 }, `One cell is ${per}, coloured by its busier link; each ramp has its own top.`);
  const sides = [...new Set(heat.rows.map((block) => block.side))];
  const text = sides.map((s) => `${s === "both" ? "both sides" : s + "s"} from rank ${heat.rows.find((b) => b.side === s).first}`);
  svg(root, "text", { x: left, y: y + 68 }, `Senders: ${text.join(", ")}.`);
}

function drawTimeline(where, timeline, figures, bound) {
  const left = 78, width = 560, lane = 36, top = 4;
  const busy = PHASES.filter((phase) => timeline.lanes[phase].length);
  const height = top + busy.length * lane;
  const root = canvas(where, left + width + 22, height + 52, "Time line of the phases of all buckets");
  const end = Math.max(figures.predicted_seconds, bound);
  const scale = timeScale(end), x = (t) => left + width * t / end;
  for (const tick of ticks(end * scale.factor, 6)) {
    const at = x(tick / scale.factor);
    svg(root, "line", { x1: at, x2: at, y1: top, y2: height, class: "gridline" });
    svg(root, "text", { x: at, y: height + 15, "text-anchor": "middle" }, String(+tick.toPrecision(6)));
  }
  svg(root, "text", { x: left + width, y: height + 32, "text-anchor": "end" }, `time (${scale.unit})`);
  busy.forEach((phase, row) => {
    svg(root, "text", { x: left - 8, y: top + row * lane + lane / 2 + 4, "text-anchor": "end", class: "name" }, phase.replace("_", "-"));
    for (const [from, to, spent] of timeline.lanes[phase]) {
      const share = Math.min(1, spent / Math.max(to - from, 1e-12));
      const box = svg(root, "rect", {
        class: "span", x: x(from).toFixed(2), y: top + row * lane + 6, width: Math.max(0.4, x(to) - x(from) - 0.3).toFixed(2),
        height: lane - 12, fill: colour(phase), "fill-opacity": (0.18 + 0.82 * share).toFixed(3), rx: 1,
      });
      hover(box, `${phase.replace("_", "-")}: ${seconds(from)} to ${seconds(to)}, busy ${seconds(spent)}`);
    }
  });
  svg(root, "line", { x1: x(bound), x2: x(bound), y1: top - 4, y2: height, class: "boundline" });
  svg(root, "text", {
    x: x(bound), y: height + 32, "text-anchor": x(bound) > left + width * 0.5 ? "end" : "start", class: "boundtext",
    dx: x(bound) > left + width * 0.8 ? -70 : 0,
  }, `bound ${seconds(bound)}`);
}

// Horizontal bars; `parts` of one bar are stacked. Returns nothing, labels every value.
function drawBars(where, bars, label, show, mark) {
  const left = 148, width = 420, lane = 25, right = 112, top = 4;
  const height = top + bars.length * lane;
  const root = canvas(where, left + width + right, height + (mark ? 20 : 22), label);
  const most = Math.max(1e-12, mark ? mark.value : 0, ...bars.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0)));
  bars.forEach((bar, row) => {
    const y = top + row * lane;
    svg(root, "text", { x: left - 8, y: y + 16, "text-anchor": "end", class: "name" }, bar.name);
    let at = left;
    for (const part of bar.parts) {
      const long = width * part.value / most;
      const box = svg(root, "rect", { class: "bar", x: at.toFixed(2), y: y + 4, width: long.toFixed(2), height: lane - 9, fill: colour(part.colour), rx: 1.5 });
      hover(box, `${bar.name}\n${part.name}: ${show(part.value)}`);
      at += long;
    }
    svg(root, "text", { x: at + 7, y: y + 16, class: "value" }, bar.value);
  });
  svg(root, "line", { x1: left, x2: left, y1: top, y2: height, class: "axis" });
  if (mark) {
    const x = left + width * mark.value / most;
    svg(root, "line", { x1: x, x2: x, y1: top - 2, y2: height + 14, class: "boundline" });
    svg(root, "text", { x: x + 5, y: height + 13, class: "boundtext" }, mark.name);
    return;
  }
  let x = left;
  for (const part of bars[0].parts) {
    svg(root, "rect", { x, y: height + 8, width: 10, height: 10, fill: colour(part.colour), rx: 2 });
    svg(root, "text", { x: x + 15, y: height + 17 }, part.name);
    x += 112;
  }
}
