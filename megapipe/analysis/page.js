"use strict";
// Draws timelines: a row per rank, each action with its microbatch, and below them the microbatches or bytes that it holds.

const ROW = 50, CELL = 30, LEVEL = 12, LEFT = 56, RIGHT = 52, HEAD = 24;
const size = bytes => {
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(bytes) / 3)));
  return `${number(+(bytes / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}B`;
};
const number = value => String(+value.toPrecision(6));

// data: begin and end of what is seen at first; unit; ranks (of each stage); numSlices; kinds;
// panels, each with a title, rows of [stage, kind, microbatch, slice, start, end] per rank, pairs (by rank the places of
// the first actions of overlapped pairs), bytes per rank as [held, from, to] where they are known, and waits of [text, start, end] per rank.
function drawTimeline(box, data, zooms = true) {
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  box.className = "timeline" + (zooms ? " zooms" : "");
  box.innerHTML = "<svg></svg>";
  box.append(tip);
  const svg = box.firstChild;
  const numRanks = data.panels[0].rows.length, numChunks = data.ranks.length / numRanks;
  let { begin, end } = data;

  function draw() {
    const width = Math.max(100, box.clientWidth - LEFT - RIGHT), scale = width / (end - begin);
    const parts = [];
    let top = 0;
    data.panels.forEach((panel, index) => {
      parts.push(`<text x="0" y="${top + 15}">${panel.title}</text>`);
      top += panel.title ? HEAD : 4;
      panel.rows.forEach((row, rank) => {
        const levels = levelsOf(panel, rank), y = top + ROW * rank;
        parts.push(`<text x="0" y="${y + 20}">rank ${rank}</text>`);
        if (levels.length)
          parts.push(`<text x="${LEFT + width + 4}" y="${y + CELL + LEVEL}">${panel.bytes ? size(most(levels)) : number(most(levels) / scaleOf(data))}</text>`);
        parts.push(`<svg x="${LEFT}" y="${y}" width="${width}" height="${ROW}">`);
        for (const [text, from, to] of panel.waits?.[rank] ?? [])
          if (to > begin && from < end)
            parts.push(`<rect class="wait" x="${(from - begin) * scale}" y="8" width="${(to - from) * scale}" height="14"
              data-tip="${text}"/>`);
        for (const [held, from, to] of levels)
          parts.push(`<rect class="level" x="${(from - begin) * scale}" width="${(to - from) * scale}"
            y="${CELL + 3 + LEVEL * (1 - held / panel.most)}" height="${LEVEL * held / panel.most}"/>`);
        row.forEach((action, at) => parts.push(cell(panel, index, rank, at, scale)));
        parts.push("</svg>");
      });
      top += ROW * numRanks;
    });
    parts.push(axis(top, width, scale));
    svg.setAttribute("height", top + 22);
    svg.innerHTML = parts.join("");
  }

  function levelsOf(panel, rank) {
    return panel.bytes?.[rank] ?? heldBy(panel.rows[rank], data.kinds);
  }

  function cell(panel, index, rank, at, scale) {
    const row = panel.rows[rank], pairs = panel.pairs?.[rank] ?? [];
    let [stage, kind, microbatch, slice, from, to] = row[at], y = 0, height = CELL;
    if (pairs.includes(at)) [to, height] = [row[at + 1][5], CELL / 2]; // F above B
    if (pairs.includes(at - 1)) [from, y, height] = [row[at - 1][4], CELL / 2, CELL / 2];
    if (to < begin || from > end) return "";
    const x = (from - begin) * scale, width = (to - from) * scale, shade = Math.floor(stage / numRanks) % 2;
    const short = unitName(microbatch, slice), label = width > 7 * (short.length + 3) ? name(row[at]) : short;
    const text = width > 7 * short.length
      ? `<text class="label" x="${x + width / 2}" y="${y + height / 2 + 4}" style="fill:${data.kinds[kind].inks[shade]}">${label}</text>`
      : "";
    return `<rect class="cell${width < 4 ? " narrow" : ""}" x="${x}" y="${y}" width="${width}" height="${height}" fill="${data.kinds[kind].colours[shade]}"
      data-at="${index},${rank},${at}"/>` + text;
  }

  function axis(top, width, scale) {
    const wanted = 80 / scale, power = 10 ** Math.floor(Math.log10(wanted));
    const step = power * [1, 2, 5, 10].find(factor => factor * power >= wanted), ticks = [];
    for (let time = Math.ceil(begin / step) * step; time <= end; time += step)
      ticks.push(`<text class="tick" x="${LEFT + (time - begin) * scale}" y="${top + 14}">${number(time)}</text>`);
    return ticks.join("") + `<text class="tick" x="${LEFT + width + 4}" y="${top + 14}">${data.unit}</text>`;
  }

  function explain(index, rank, at) {
    const row = data.panels[index].rows[rank], action = row[at], [stage, kind, microbatch, slice, from, to] = action;
    const waited = from - (at ? row[at - 1][5] : Math.min(...data.panels[index].rows.map(one => one[0][4])));
    const lines = [
      `${name(action)}: ${data.kinds[kind].label} of ${data.numSlices > 1 ? `slice ${slice} of ` : ""}microbatch ${microbatch} ` +
        `through stage ${stage}`,
      `from ${number(from)} to ${number(to)} ${data.unit}, after waiting ${number(waited)}`,
    ];
    const { needs: [letter, step] } = data.kinds[kind], source = stage + step;
    if (source in data.ranks)
      lines.push(`needs ${source}${letter}${unitName(microbatch, slice)} of ` +
        (data.ranks[source] === rank ? "the same rank" : `rank ${data.ranks[source]}`));
    return lines.join("\n");
  }

  svg.addEventListener("pointermove", event => {
    const { at, tip: text } = event.target.dataset;
    tip.hidden = !at && !text;
    tip.textContent = at ? explain(...at.split(",").map(Number)) : text ?? "";
    const place = box.getBoundingClientRect(), x = event.clientX - place.left;
    tip.style.left = `${Math.min(x + 12, Math.max(0, place.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - place.top + 14}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (zooms) {
    const show = (from, to) => { [begin, end] = [from, to]; draw(); };
    const perPixel = () => (end - begin) / Math.max(100, box.clientWidth - LEFT - RIGHT);
    svg.addEventListener("wheel", event => {
      event.preventDefault();
      const at = begin + (event.clientX - box.getBoundingClientRect().left - LEFT) * perPixel();
      const factor = 1.002 ** event.deltaY;
      show(at - (at - begin) * factor, at + (end - at) * factor);
    }, { passive: false });
    svg.addEventListener("pointermove", event => {
      if (event.buttons === 1) show(begin - event.movementX * perPixel(), end - event.movementX * perPixel());
    });
    svg.addEventListener("dblclick", () => show(data.begin, data.end));
  }
  for (const panel of data.panels) panel.most = Math.max(...panel.rows.map((_, rank) => most(levelsOf(panel, rank))));
  draw();
  new ResizeObserver(draw).observe(box);
}

const unitName = (microbatch, slice) => slice ? `${microbatch}.${slice}` : `${microbatch}`;
const name = ([stage, kind, microbatch, slice]) => stage + kind[0] + unitName(microbatch, slice);
const most = levels => Math.max(0, ...levels.map(([held]) => held));
const scaleOf = data => data.ranks.length / data.panels[0].rows.length * data.numSlices;

// [held, from, to]: how many units of work are in flight, each from the start of its F to the end of its W.
function heldBy(row, kinds) {
  const changes = row.map(([, kind, , , from, to]) => [kinds[kind].held > 0 ? from : to, kinds[kind].held])
    .filter(([, change]) => change).sort(([a, x], [b, y]) => a - b || x - y);
  if (!changes.some(([, change]) => change < 0)) return []; // forwards only
  const levels = [];
  let held = 0, before = 0;
  for (const [time, change] of changes) {
    if (held && time > before) levels.push([held, before, time]);
    [held, before] = [held + change, time];
  }
  return levels;
}

function drawLegend(box, data) {
  const swatch = colour => `<i style="background:${colour}"></i>`;
  const used = kind => data.panels.some(panel => panel.rows.some(row => row.some(action => action[1] === kind)));
  const numShades = data.ranks.length > data.panels[0].rows.length ? 2 : 1;
  const parts = Object.entries(data.kinds).filter(([kind]) => used(kind))
    .map(([, { label, colours }]) => colours.slice(0, numShades).map(swatch).join("") + label);
  if (numShades > 1) parts.push("dark: odd chunks");
  if (data.panels.some(panel => panel.pairs?.some(one => one.length))) parts.push("F above B: overlapped pair");
  if (data.panels.some(panel => panel.waits)) parts.push(swatch("var(--wait)") + "waits for messages");
  parts.push(swatch("var(--faint)") + `${data.panels.some(panel => panel.bytes) ? "bytes" : "microbatches"} held, with the most at the right`);
  box.className = "legend";
  box.innerHTML = parts.map(part => `<span>${part}</span>`).join("");
}
