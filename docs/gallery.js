"use strict";
// All schedules for as many ranks and microbatches as are chosen. `gallery` is described in generate.py.

const control = id => document.getElementById(id);

// What drawTimeline wants, from a row of letters per rank: each action has its own, and "." is a unit of idle time. A
// "+" precedes the forward of an overlapped pair. Microbatches and slices follow from the order.
function decode(letters, { ranks, numChunks, numSlices }) {
  const unit = 1 / (numChunks * numSlices), numRanks = letters.length;
  const stageOf = (rank, chunk) => ranks.findIndex((of, stage) => of === rank && Math.floor(stage / numRanks) === chunk);
  const rows = [], pairs = [];
  letters.forEach((row, rank) => {
    const counts = {}, actions = [], paired = [];
    let time = 0;
    for (const letter of row) {
      if (letter === ".") time += unit;
      else if (letter === "+") paired.push(actions.length);
      else {
        const code = letter.charCodeAt(0) - 65, kind = gallery.kinds_in_order[code % 4], chunk = Math.floor(code / 4);
        const count = counts[letter] ?? 0, slice = count % numSlices, end = time + (kind === "BW" ? 2 : 1) * unit;
        counts[letter] = count + 1;
        actions.push([stageOf(rank, chunk), kind, Math.floor(count / numSlices),
          kind === "F" ? slice : numSlices - 1 - slice, time, end]);
        time = end;
      }
    }
    rows.push(actions);
    pairs.push(paired);
  });
  return { title: "", rows, pairs };
}

function drawAll() {
  const [numRanks, m] = [control("ranks").value, control("m").value];
  control("m-shown").textContent = m;
  const shown = gallery.schedules.map(({ name, plans }) => {
    const plan = plans[numRanks], panel = decode(plan.letters[m - 1], plan);
    const end = Math.max(...panel.rows.map(row => row.at(-1)[5]));
    return { ...gallery, ...plan, name, unit: "", panels: [panel], begin: 0, end };
  });
  const ranks = shown.map(data => data.ranks).find(all => all.length > numRanks);
  drawLegend(control("legend"), { ...gallery, ranks, panels: shown.flatMap(data => data.panels) });
  const longest = Math.max(...shown.map(data => data.end));
  for (const data of shown) {
    const busy = data.panels[0].rows.flat().reduce((sum, action) => sum + action[5] - action[4], 0);
    const held = Math.max(...data.panels[0].rows.map(row => most(heldBy(row, gallery.kinds)))) / scaleOf(data);
    control(`${data.name}-figures`).textContent = `step ${number(data.end)}, bubble ` +
      `${(100 * (1 - busy / data.end / numRanks)).toFixed(1)} %` + (held ? `, ${number(held)} microbatches held` : "");
    drawTimeline(control(data.name), { ...data, end: longest }, false);
  }
}

control("schedules").innerHTML = gallery.schedules.map(({ name, about }) =>
  `<h2>${name}: <span id="${name}-figures"></span></h2><p>${about}</p><div class="scrolls"><div id="${name}"></div></div>`).join("");
control("ranks").addEventListener("input", drawAll);
control("m").addEventListener("input", drawAll);
drawAll();
