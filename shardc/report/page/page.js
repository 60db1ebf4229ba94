"use strict";
// Draws the panels of the page from its data. Each is drawn when it is first seen, each part of a tree when it is opened.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const AXES = ["#3b76af", "#c9752a", "#4a8f60", "#8265aa", "#b5482a", "#3d9695", "#a8648a", "#8b7440"];

// -- elements and texts

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter(child => child !== undefined && child !== null && child !== false));
  return made;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function bytesText(count) {
  if (count === null || Number.isNaN(count)) return "unknown";
  if (count < 1024) return `${Math.round(count)} byte${count === 1 ? "" : "s"}`;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    count /= 1024;
    if (count < 1023.95) return `${count.toFixed(1)} ${unit}`;
  }
  return `${(count / 1024).toFixed(1)} TiB`;
}
function secondsText(seconds) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]) {
    if (seconds >= scale) {
      const value = seconds / scale;
      return `${value.toFixed(Math.max(0, 3 - String(Math.trunc(value)).length))} ${unit}`;
    }
  }
  return "0 s";
}
const share = part => h("span", {class: "share", "aria-hidden": "true"}, h("i", {style: `width: ${(100 * part).toFixed(1)}%`}));
const chip = (colour, text) => h("span", {class: "chip"}, h("i", {style: `background: ${colour}`}), text);

function panel(id, title, about, draw) {
  const body = h("div");
  const made = h("section", {id}, h("h2", {}, title), about && h("p", {class: "about"}, about), body);
  document.getElementById("panels").append(made);
  const seen = new IntersectionObserver(entries => {
    if (entries.some(entry => entry.isIntersecting)) {
      seen.disconnect();
      draw(body);
    }
  }, {rootMargin: "400px"});
  seen.observe(made);
}

function table({columns, rows}) {
  const side = i => columns[i].startsWith(">") ? "number" : undefined;
  return h("div", {class: "wide"}, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((name, i) => h("th", {class: side(i)}, name.replace(">", ""))))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, i) => h("td", {class: side(i)}, cell)))))));
}

// -- meshes, and the arrays on them

const colourOf = (mesh, axis) => AXES[mesh.axes.findIndex(([name]) => name === axis) % AXES.length];

// The pieces along one dimension: each axis, in order, cuts the block so far into pieces of ceil(block / n).
function extent(array, mesh, dim, at) {
  let begin = 0, block = array.shape[dim], end = block;
  for (const axis of array.cuts[dim]) {
    const size = new Map(mesh.axes).get(axis);
    block = Math.ceil(block / size);
    begin = Math.min(begin + at[axis] * block, end);
    end = Math.min(begin + block, end);
  }
  return [begin, end];
}

function strip(array, mesh) {
  const sizes = new Map(mesh.axes), step = 7;
  const made = s("svg", {class: "strip", viewBox: `0 0 54 ${step * Math.max(1, array.shape.length)}`, "aria-hidden": "true"});
  array.shape.forEach((_, dim) => {
    const axes = array.cuts[dim].filter(axis => sizes.get(axis) > 1);
    const pieces = Math.min(18, axes.reduce((n, axis) => n * sizes.get(axis), 1));
    for (let i = 0; i < pieces; i++) {
      const width = 54 / pieces;
      made.append(s("rect", {x: i * width, y: dim * step, width: width - (pieces > 1), height: step - 2,
        fill: axes.length ? colourOf(mesh, axes[axes.length - 1]) : "var(--line)"}));
    }
  });
  return made;
}

function held(array, mesh, at) {
  const ends = array.shape.map((size, dim) => [...extent(array, mesh, dim, at), size]);
  if (ends.some(([begin, end, size]) => begin === end && size)) return "nothing";
  const texts = ends.map(([begin, end, size]) => end - begin === size ? ":" : `${begin}:${end}`);
  return texts.every(text => text === ":") ? "all" : texts.join(", ");
}

const channels = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
const mixed = (colour, white) => `rgb(${channels(colour).map(c => Math.round(c + (255 - c) * white)).join(" ")})`;

// A piece is a stripe for each axis that cuts, in a shade of the axis's colour for the place along it.
function stripes(mesh, cut, at, x, y, width, height) {
  const high = height / (cut.length || 1), last = axis => new Map(mesh.axes).get(axis) - 1;
  const colour = axis => axis === undefined ? "#d3d8de" : mixed(colourOf(mesh, axis), 0.82 - 0.42 * at[axis] / last(axis));
  return (cut.length ? cut : [undefined]).map((axis, i) => s("rect", {class: "stripe", x, y: y + i * high, width, height: high, fill: colour(axis)}));
}

// The places along axes of a piece's number, the last axis counting fastest.
function placesOf(mesh, axes, number) {
  const at = {};
  for (const axis of axes.slice().reverse()) {
    const size = new Map(mesh.axes).get(axis);
    at[axis] = number % size;
    number = Math.floor(number / size);
  }
  return at;
}

const LETTER = 6.7;
// A label in as few lines as fit into a cell: one, or one or two for each dimension; none if it cannot.
function label(text, x, y, wide, high) {
  const long = line => line.length * LETTER > wide - 4, cut = by => line => long(line) ? line.split(by) : [line];
  const lines = cut(/(?<=,) /)(text).flatMap(cut(/(?<=:)/));
  if (lines.some(long) || lines.length * 12 > high - 2) return [];
  return lines.map((line, i) => s("text", {class: "in", x: x + wide / 2, y: y + high / 2 + 12 * (i - (lines.length - 1) / 2)}, line));
}

// The devices of the mesh, and the dimensions of the array below them: the same colours are the same piece.
function drawPlaces(array, mesh) {
  const axes = mesh.axes.filter(([, n]) => n > 1), most = [16, 8, 4];
  const order = axes.slice().reverse(), shown = order.map(([, n], i) => Math.min(n, most[Math.min(i, 2)]));
  const [columns, rows] = [shown[0] || 1, shown[1] || 1], facets = shown.slice(2).reduce((a, b) => a * b, 1);
  const some = Math.min(facets, 4), left = 16, between = 22;
  const side = Math.max(14, Math.min(64, Math.floor(320 / columns), Math.floor((400 / some - between) / rows)));
  const breadth = Math.max(side, Math.min(110, Math.floor(320 / columns)));
  const [wide, high] = [Math.max(left + columns * breadth, 190), some * (rows * side + between)];
  const cells = [], cut = dim => array.cuts[dim].filter(axis => new Map(mesh.axes).get(axis) > 1);
  const cutting = array.cuts.flatMap((_, dim) => cut(dim));
  const name = i => order[i] ? `${order[i][0]}=${order[i][1]}` : "";
  const grid = s("svg", {viewBox: `0 0 ${wide} ${high}`, width: wide, role: "img", "aria-label": `devices of the mesh and what each holds`});
  for (let facet = 0; facet < some; facet++) {
    const top = facet * (rows * side + between) + 14, fixed = {};
    let rest = facet;
    order.slice(2).forEach(([axis], i) => { fixed[axis] = rest % shown[i + 2]; rest = Math.floor(rest / shown[i + 2]); });
    const where = Object.entries(fixed).map(([axis, i]) => `, ${axis} ${i}`).join("");
    if (name(0)) grid.append(s("text", {x: left, y: top - 4}, `${name(0)} \u2192${where}`));
    if (name(1)) grid.append(s("text", {transform: `translate(10 ${top + rows * side}) rotate(-90)`}, `${name(1)} \u2192`));
    for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
      const at = {...Object.fromEntries(mesh.axes.map(([axis]) => [axis, 0])), ...fixed};
      if (order[0]) at[order[0][0]] = x;
      if (order[1]) at[order[1][0]] = y;
      const text = held(array, mesh, at);
      const place = [left + x * breadth, top + y * side, breadth, side];
      const cell = s("rect", {x: place[0], y: place[1], width: breadth, height: side, rx: 3, fill: "transparent"},
        s("title", {}, `${Object.entries(at).map(([axis, i]) => `${axis}=${i}`).join(", ")}: ${text}`));
      cell.addEventListener("mouseenter", () => light(cells.filter(c => c.text === text), array, mesh, at));
      cells.push({cell, text});
      grid.append(...stripes(mesh, text === "nothing" ? [] : cutting, at, ...place), ...label(text, ...place), cell);
    }
  }
  const bars = s("svg", {width: 340, viewBox: `0 0 340 ${Math.max(1, array.shape.length) * 34}`, role: "img", "aria-label": "dimensions and their pieces"});
  const parts = [];
  array.shape.forEach((size, dim) => {
    const sizes = array.cuts[dim].map(axis => new Map(mesh.axes).get(axis)), count = sizes.reduce((a, b) => a * b, 1);
    const block = sizes.reduce((n, by) => Math.ceil(n / by), size);
    const by = array.cuts[dim].length ? ` = ${count} x ${block} over ${array.cuts[dim].join(", ")}` : ", whole";
    bars.append(s("text", {x: 0, y: dim * 34 + 11}, `dimension ${dim}: ${size}${by}`));
    const drawn = Math.min(count, 64);
    for (let i = 0; i < drawn; i++) {
      const begin = Math.min(i * block, size), place = [i * 340 / drawn, dim * 34 + 15, 340 / drawn, 13];
      const part = s("rect", {x: place[0], y: place[1], width: place[2], height: 13, fill: "transparent"});
      parts.push({part, dim, begin: count > drawn ? -1 : begin});
      bars.append(...stripes(mesh, begin < size ? cut(dim) : [], placesOf(mesh, array.cuts[dim], i), ...place), part);
    }
  });
  function light(alike, of, on, at) {
    cells.forEach(({cell}) => cell.classList.toggle("lit", alike.some(c => c.cell === cell)));
    parts.forEach(({part, dim, begin}) => part.classList.toggle("lit", extent(of, on, dim, at)[0] === begin));
  }
  const copies = axes.filter(([axis]) => !array.cuts.flat().includes(axis) && !array.partial.includes(axis));
  const hidden = order.some(([, n], i) => n > shown[i]) || facets > some;
  return [grid, array.shape.length > 0 && bars,
    array.partial.length > 0 && h("p", {class: "about"}, `Partial: the value is the ${array.op} of what the devices along ${array.partial.join(", ")} hold.`),
    copies.length > 0 && h("p", {class: "about"}, `Devices along ${copies.map(([axis]) => axis).join(", ")} hold the same.`),
    hidden && h("p", {class: "about"}, `The first devices along each axis, of ${mesh.axes.reduce((n, [, m]) => n * m, 1)}.`)];
}

// A box of rows that scrolls, and below it how many rows are hidden: scroll bars may not be seen.
function scrolled(rows, box) {
  const button = h("button", {onclick: () => box.scrollBy({top: 0.8 * box.clientHeight, behavior: "smooth"})});
  const below = h("p", {class: "below", hidden: true}, button);
  const tell = () => {
    const end = box.scrollTop + box.clientHeight + 4, hidden = [...rows.children].filter(row => row.offsetTop + row.offsetHeight > end).length;
    button.textContent = `\u25be ${hidden} more row${hidden === 1 ? "" : "s"}: scroll`;
    below.hidden = !hidden;
    box.classList.toggle("goes-on", hidden > 0);
  };
  box.addEventListener("scroll", tell);
  new ResizeObserver(tell).observe(box);  // it is called at once too
  return [box, below];
}

function drawArrays(body) {
  const picture = h("div", {class: "picture", "aria-live": "polite"});
  const lists = h("div");
  let chosen = null;
  function choose(row, array) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = row;
    row.classList.add("chosen");
    const mesh = data.meshes[array.mesh], name = mesh.name ? `, ${mesh.name}` : "";
    picture.replaceChildren(h("h3", {}, array.path), h("p", {class: "about"}, `${array.type} at ${array.placement}${name}; ${array.bytes} per device`),
      ...drawPlaces(array, mesh).filter(Boolean));
  }
  function list(group, query) {
    const rows = group.rows.filter(row => `${row.path} ${row.type} ${row.placement} ${row.why} ${data.meshes[row.mesh].name}`.toLowerCase().includes(query));
    const made = h("tbody"), staged = data.meshes.length > 1;
    const more = begin => {
      rows.slice(begin, begin + 200).forEach(array => {
        const mesh = data.meshes[array.mesh];
        const row = h("tr", {onclick: () => choose(row, array)},
          h("td", {class: "code"}, h("button", {class: "code"}, array.path)),
          staged && h("td", {}, mesh.name), h("td", {class: "code"}, array.type),
          h("td", {class: "code"}, array.placement, array.padded && " padded", strip(array, mesh)), h("td", {}, array.why), h("td", {class: "number"}, array.bytes));
        made.append(row);
      });
      if (begin + 200 < rows.length) {
        const next = h("tr", {}, h("td", {colspan: 6}, h("button", {onclick: () => { next.remove(); more(begin + 200); }}, `${rows.length - begin - 200} more`)));
        made.append(next);
      }
    };
    more(0);
    const names = ["path", ...(staged ? ["on"] : []), "type", "placement", "why"];
    return [h("h3", {}, group.title), ...(rows.length ? scrolled(made, h("div", {class: "arrays wide", tabindex: 0}, h("table", {},
      h("thead", {}, h("tr", {}, names.map(n => h("th", {}, n)), h("th", {class: "number"}, "per device"))), made))) : [])];
  }
  const draw = query => lists.replaceChildren(...data.arrays.flatMap(group => list(group, query)).filter(Boolean));
  const search = h("input", {type: "search", id: "array-search", placeholder: "path, type, placement ...", "aria-label": "Search arrays",
    oninput: () => draw(search.value.toLowerCase())});
  const first = data.meshes[0], meshes = new Set(data.meshes.map(mesh => JSON.stringify(mesh.axes)));
  const chips = meshes.size === 1 ? first.axes.map(([axis, n]) => chip(colourOf(first, axis), `${axis} = ${n}`)) : [];
  body.append(h("div", {class: "controls"}, search, h("span", {}, chips)), h("div", {class: "places"}, lists, picture));
  draw("");
  const split = data.arrays[0].rows.findIndex(array => array.cuts.some(axes => axes.length));  // the first one that shows something
  const row = lists.querySelectorAll("tbody tr")[Math.min(199, Math.max(0, split))];
  if (row) row.click();
  else picture.remove();
}

// -- the program by module

function drawProgram(body) {
  const {texts, nodes, lines, moves} = data.program;
  const tree = nodes.map(([name, above]) => ({name: texts[name], above, inside: [], lines: [], seconds: 0, bytes: 0}));
  const found = lines.map(([node, line, operations, makes, seconds]) => ({
    node, line: texts[line] || "made by shardc", operations: texts[operations], makes: texts[makes], seconds, bytes: 0, moves: []}));
  for (const [line, kind, axes, value, src, dst, why, count, bytes, seconds] of moves) {
    found[line].bytes += bytes === null ? NaN : bytes;
    found[line].moves.push({text: `${texts[kind]} over ${texts[axes] || "no axis"}: ${texts[value]}`, from: texts[src], to: texts[dst],
      why: texts[why], count, bytes, seconds});
  }
  found.forEach(line => { const node = tree[line.node]; node.lines.push(line); node.seconds += line.seconds; node.bytes += line.bytes; });
  for (let i = tree.length - 1; i > 0; i--) {  // each node stands before those inside it
    const above = tree[tree[i].above];
    above.seconds += tree[i].seconds;
    above.bytes += tree[i].bytes;
    above.inside.unshift(tree[i]);
  }
  const root = tree[0], whole = root.seconds || 1;
  let byTime = false;
  const figures = of => [share(of.seconds / whole), h("span", {class: "number"}, of.seconds ? secondsText(of.seconds) : "-"),
    h("span", {class: "number"}, of.bytes !== 0 ? bytesText(of.bytes) : "-")];
  const path = node => node.above < 0 ? "" : `${path(tree[node.above])}${node.above > 0 ? "/" : ""}${node.name}`;

  function lineRow(line, depth, name) {
    return h("div", {class: "row line", style: `--depth: ${depth}`}, h("span", {class: "line-name"},
      name && h("small", {}, name), h("span", {class: "code"}, line.line),
      h("small", {}, line.operations, line.makes && ` \u2192 ${line.makes}`),
      line.moves.map(move => h("small", {class: "move"}, `${move.text}, ${move.from} \u2192 ${move.to}`, h("br"),
        `${move.why}; ${move.count > 1 ? `${move.count} times, ` : ""}${bytesText(move.bytes)}, ${secondsText(move.seconds)}`))), ...figures(line));
  }
  function children(node, depth, into) {
    const inside = byTime ? node.inside.slice().sort((a, b) => b.seconds - a.seconds) : node.inside;
    const own = byTime ? node.lines.slice().sort((a, b) => b.seconds - a.seconds) : node.lines;
    const all = [...inside.map(child => () => nodeRow(child, depth)), ...own.map(line => () => lineRow(line, depth))];
    const more = begin => {
      into.append(...all.slice(begin, begin + 120).map(make => make()));
      if (begin + 120 < all.length) {
        const next = h("div", {class: "row"}, h("span", {}, h("button", {onclick: () => { next.remove(); more(begin + 120); }}, `${all.length - begin - 120} more`)));
        into.append(next);
      }
    };
    more(0);
  }
  function nodeRow(node, depth) {
    const made = h("details", {ontoggle: () => { if (made.open && made.children.length === 1) children(node, depth + 1, made); }},
      h("summary", {class: "row", style: `--depth: ${depth}`}, h("span", {class: "name code"}, node.name), ...figures(node)));
    return made;
  }
  const rows = h("div", {class: "tree"}), says = h("span", {role: "status"});
  function draw() {
    const query = search.value.trim().toLowerCase();
    rows.replaceChildren(h("div", {class: "row heads"}, h("span", {}, "module, line"), h("span", {}, "share of time"),
      h("span", {class: "number"}, "time"), h("span", {class: "number"}, "bytes sent")));
    says.textContent = "";
    if (!query) return children(root, 0, rows);
    const hits = found.filter(line => `${path(tree[line.node])} ${line.line} ${line.operations} ${line.moves.map(m => m.text).join(" ")}`.toLowerCase().includes(query));
    if (byTime) hits.sort((a, b) => b.seconds - a.seconds);
    says.textContent = `${hits.length} line${hits.length === 1 ? "" : "s"}${hits.length > 200 ? ", the first 200" : ""}`;
    rows.append(...hits.slice(0, 200).map(line => lineRow(line, 0, path(tree[line.node]))));
  }
  const search = h("input", {type: "search", id: "program-search", placeholder: "module, line, operation, collective ...", "aria-label": "Search the program", oninput: draw});
  const sort = h("input", {type: "checkbox", onchange: () => { byTime = sort.checked; draw(); }});
  body.append(h("div", {class: "controls"}, search, h("label", {}, sort, " most time first"), says), rows);
  draw();
}

function drawTotals(body) {
  const most = Math.max(...data.totals.map(row => row[4]), 1e-30), whole = data.totals.reduce((n, row) => n + row[3], 0) || 1;
  body.append(h("div", {class: "wide"}, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "over"), h("th", {}, "collective"), ["times", "bytes", "of all bytes", "time"].map(n => h("th", {class: "number"}, n)), h("th", {style: "width: 26%"}, ""))),
    h("tbody", {}, data.totals.map(([axes, kind, count, bytes, seconds]) => h("tr", {}, h("td", {}, axes), h("td", {}, kind),
      [String(count), bytesText(bytes), bytes === null ? "" : `${(100 * bytes / whole).toFixed(1)}%`, secondsText(seconds)].map(t => h("td", {class: "number"}, t)),
      h("td", {style: "vertical-align: middle"}, share(seconds / most))))))));
}

// -- along the time of a call

function area(values, top, height) {
  const step = 1000 / values.length;
  return `M0 ${height}` + values.map((v, i) => `L${(i * step).toFixed(1)} ${(height - v / top * height).toFixed(2)}L${((i + 1) * step).toFixed(1)} ${(height - v / top * height).toFixed(2)}`).join("") + `L1000 ${height}Z`;
}
function band(height, label, ...shapes) {
  return s("svg", {class: "band", viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", width: "100%", height, role: "img", "aria-label": label}, ...shapes);
}
const across = (y, colour) => s("path", {d: `M0 ${y}H1000`, stroke: colour, "stroke-width": 1.5, "stroke-dasharray": "6 4", "vector-effect": "non-scaling-stroke"});

function pointed(element, says, tell, rest) {
  says.textContent = rest;
  element.addEventListener("mousemove", event => {
    const plot = event.target.closest("svg");
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    says.textContent = tell(Math.min(0.9999, Math.max(0, (event.clientX - box.left) / box.width)), plot);
  });
  element.addEventListener("mouseleave", () => { says.textContent = rest; });
}

function drawCourse(body) {
  const {extent: whole, kinds, bytes, where, limit, peak, filled} = data.course, n = bytes.length;
  const fullest = Math.max(...bytes), near = fullest > limit / 3, top = 1.05 * (near ? Math.max(limit, fullest) : fullest);
  const says = h("p", {class: "says"}), lanes = h("div", {class: "plot"});
  for (const [name, colour, shares] of kinds)
    lanes.append(h("div", {class: "lane"}, h("span", {}, name), band(22, `${name} along the call`, s("path", {d: area(shares, 1, 22), fill: colour}))));
  const memory = band(120, "bytes in memory along the call", s("path", {d: area(bytes, top, 120), fill: "#6f86a0"}),
    near && across(120 - limit / top * 120, "var(--full)"), s("path", {d: `M${(peak + 0.5) / n * 1000} 0V120`, stroke: "var(--ink)", "vector-effect": "non-scaling-stroke"}));
  const note = near ? `the dashed line is the limit, ${bytesText(limit)}` : `of ${bytesText(limit)}`;
  lanes.append(h("div", {class: "lane"}, h("span", {}, `memory: ${bytesText(fullest)} at the peak; ${note}`), memory),
    h("div", {class: "lane"}, h("span"), h("div", {class: "ruler"},
      [0, 0.25, 0.5, 0.75, 1].map(part => h("span", {}, part ? secondsText(part * whole) : "0")))));
  pointed(lanes, says, at => {
    const i = Math.floor(at * n), parts = kinds.filter(k => k[2][i] > 0.005).map(k => `${k[0]} ${Math.round(100 * k[2][i])}%`);
    return `${secondsText(at * whole)}: ${bytesText(bytes[i])} in memory; ${where[i] || "nothing"}; ${parts.join(", ")}`;
  }, `The peak is at ${secondsText((peak + 0.5) / n * whole)}, in ${where[peak] || "nothing"}. Point at a place to see what runs there.`);
  body.append(lanes, says, h("h3", {}, "In memory at the peak"), table(filled));
}

function drawRanks(body) {
  const {ranks, worst, label, filled} = data.ranks, says = h("p", {class: "says"}), lanes = h("div", {class: "plot"});
  const most = Math.max(...ranks.map(rank => Math.max(...rank.bytes)));
  ranks.forEach((rank, number) => {
    const near = most > rank.limit / 3, top = 1.05 * (near ? Math.max(rank.limit, most) : most);
    lanes.append(h("div", {class: "lane"}, h("span", {}, `rank ${number}: ${rank.text}`), s("svg", {class: "band", viewBox: "0 0 1000 44", preserveAspectRatio: "none", width: "100%", height: 44,
      role: "img", "aria-label": `memory of rank ${number}`, "data-rank": number}, s("path", {d: area(rank.bytes, top, 44), fill: "#6f86a0"}), near && across(44 - rank.limit / top * 44, "var(--full)"))));
  });
  pointed(lanes, says, (at, plot) => {
    const rank = ranks[plot.dataset.rank];
    return `rank ${plot.dataset.rank} at ${secondsText(at * rank.extent)}: ${bytesText(rank.bytes[Math.floor(at * rank.bytes.length)])}. At its peak: ${rank.parts.map(([kind, size]) => `${size} ${kind}`).join(", ")}`;
  }, "Point at a place to see the bytes there.");
  body.append(lanes, says, h("h3", {}, `In memory at the peak of rank ${worst}, during ${label}`), table(filled));
}

// -- runs

const lighter = (colour, chunk) => mixed(colour, Math.min(0.6, 0.35 * chunk));
function inkOn(colour, chunk) {
  const part = Math.min(0.6, 0.35 * chunk), [r, g, b] = channels(colour).map(c => c + (255 - c) * part);
  return 0.299 * r + 0.587 * g + 0.114 * b < 130 ? "#ffffff" : "#1b1f24";
}

function drawRun(body) {
  const {title, kinds, rows, tracks, number, seconds} = data.chart, several = tracks.length > 1;
  const says = h("p", {class: "says"}), names = h("div", {class: "names"}), lanes = h("div", {class: "rows"});
  const used = new Set(tracks.flatMap(t => t.spans.flatMap(row => row.map(span => span[0]))));
  const time = value => seconds ? secondsText(value) : value.toPrecision(4);
  function draw() {
    const width = Math.max(200, lanes.clientWidth * zoom.value - 2), made = [];
    names.replaceChildren();
    rows.forEach((row, at) => tracks.forEach((track, i) => {
      names.append(h("div", {}, i === 0 ? row : "", several && h("span", {class: "track-name"}, ` ${track.name}`)));
      const paths = new Map(), texts = [];
      for (const [kind, chunk, label, begin, end] of track.spans[at]) {
        const key = `${kind} ${chunk}`, x = begin * width / 1e6, size = Math.max(0.4, (end - begin) * width / 1e6 - 0.5);
        paths.set(key, `${paths.get(key) || ""}M${x.toFixed(1)} 1h${size.toFixed(1)}v18h${(-size).toFixed(1)}z`);
        if (label.length * 6.4 + 3 < size) texts.push(s("text", {x: (x + size / 2).toFixed(1), y: 10.5, fill: inkOn(kinds[kind][1], chunk)}, label));
      }
      made.push(h("div", {}, s("svg", {class: track.unknown[at] ? "band unknown" : "band", width, height: 20, role: "img", "aria-label": `${row}, ${track.name}`, "data-track": i, "data-row": at},
        [...paths].map(([key, d]) => { const [kind, chunk] = key.split(" "); return s("path", {d, fill: lighter(kinds[kind][1], +chunk)}); }), texts)));
      if (i === tracks.length - 1 && several) { names.append(h("div", {class: "gap"})); made.push(h("div", {class: "gap"})); }
    }));
    const marks = Math.max(4, Math.round(width / 160));
    const ruler = extent => h("div", {class: "ruler", style: `width: ${width}px`}, Array.from({length: marks + 1}, (_, i) => h("span", {}, i ? time(i / marks * extent) : "0")));
    const scales = new Set(tracks.map(track => track.extent)).size > 1 ? tracks : tracks.slice(0, 1);
    scales.forEach(track => { names.append(h("div", {class: "track-name"}, scales.length > 1 ? track.name : "")); made.push(ruler(track.extent)); });
    lanes.replaceChildren(...made);
  }
  const zoom = h("input", {type: "range", min: 1, max: 20, step: 0.5, value: 1, "aria-label": "Zoom", oninput: draw});
  const legend = kinds.map(([text, colour], i) => used.has(i) && chip(colour, text)).filter(Boolean);
  body.append(h("p", {class: "about"}, title, tracks.map(t => [h("br"), t.headline])),
    h("div", {class: "controls"}, h("label", {}, "zoom ", zoom), h("span", {}, legend, number, tracks.some(t => t.unknown.includes(true)) && "; hatched: unknown time")), h("div", {class: "run"}, names, lanes), says);
  pointed(lanes, says, (at, plot) => {
    const track = tracks[plot.dataset.track], spot = at * 1e6, span = track.spans[plot.dataset.row].find(([,,, begin, end]) => begin <= spot && spot < end);
    const text = span ? `${span[2]}, ${kinds[span[0]][0]}: ${time(span[3] / 1e6 * track.extent)} to ${time(span[4] / 1e6 * track.extent)}, ${time((span[4] - span[3]) / 1e6 * track.extent)}` : track.unknown[plot.dataset.row] ? "unknown time" : "idle";
    return `${rows[plot.dataset.row]}, ${track.name}, ${time(at * track.extent)}: ${text}`;
  }, "Point at a task to see its times.");
  new ResizeObserver(() => {  // it is called at once too
    if (!names.childElementCount) draw();
    draw();  // in the width that the names leave
  }).observe(body);
}

function drawSchedule(body) {
  const colours = {F: "#a9c6e3", B: "#f0c39b", I: "#f0d79f", W: "#aed3b9"}, made = h("pre", {class: "grid wide"});
  for (const line of data.schedule) {
    for (const part of line.split(/(\d+[FBIW]\d+)/)) {
      const kind = /^\d+([FBIW])\d+$/.exec(part);
      made.append(kind ? h("b", {style: `background: ${colours[kind[1]]}`}, part) : part);
    }
    made.append("\n");
  }
  body.append(made);
}

if (data.arrays) panel("places", "Mesh and arrays", new Set(data.meshes.map(mesh => mesh.devices)).size > 1 ? `${data.meshes.length} meshes` : `${data.meshes.length > 1 ? `${data.meshes.length} meshes, each of ` : ""}${data.meshes[0].devices}`, drawArrays);
if (data.chart) panel("run", "Timeline", "", drawRun);
if (data.schedule) panel("schedule", "Schedule", "A row for each rank: stage, task, microbatch; a column is one unit of time.", drawSchedule);
if (data.program) panel("program", "Program by module", `What each module and line takes, ${data.words.program}, and what moves there, and why. Time that overlaps is counted.`, drawProgram);
if (data.totals && data.totals.length) panel("totals", "What moves, by axis and kind", data.words.totals, drawTotals);
if (data.course) panel("course", "Time and memory along the call", "Operations one after the other, as the program has them; a loop is drawn as one iteration that takes the time of all." + data.words.course, drawCourse);
if (data.ranks) panel("ranks", "Memory of each rank", "Bytes on each device, along the planned call.", drawRanks);
