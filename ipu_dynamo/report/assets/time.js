// Where cycles go, and the timeline.

function fixedTable(id, { caption, columns, rows }, more = {}) {
  const table = new Table(section(id), {
    id: more.name ?? id, caption, columns,
    source: () => rows.map((values, i) => ({
      cells: Object.fromEntries(columns.map(({ key, kind }, column) => [key, kind === "text" ? text(values[column]) : values[column]])),
      position: i,
    })),
    ...more,
  });
  table.refresh();
  return table;
}

// A bar for each IPU: the columns of the table between its name and its total.
const CYCLE_COLORS = [0, 1, 7, 2, 5, 3, 4, 9, 10, 8, 6];

function cycleBars() {
  const columns = view.cycles.columns.slice(1, -1), idle = columns.length - 1;
  const paint = (i) => (i === idle ? { class: "idle" } : { style: { background: `var(--category-${CYCLE_COLORS[i]})` } });
  const legend = columns.map(({ label }, i) => element("span", {}, element("i", paint(i)), label));
  const end = Math.max(1, ...view.cycles.rows.map((row) => row.at(-1)));
  const bars = view.cycles.rows.map((row) => {
    const parts = columns.map(({ label }, i) => {
      const part = element("span", { ...paint(i), title: `${label}: ${whole(row[i + 1])}` });
      part.classList.add("part");
      part.style.width = `${(100 * row[i + 1]) / end}%`;
      return part;
    });
    const words = columns.map(({ label }, i) => `${label} ${whole(row[i + 1])}`).join(", ");
    return element("div", { class: "cycle-bar" }, element("span", {}, text(row[0])),
      element("div", { class: "bar", role: "img", "aria-label": `cycles of ${text(row[0])}: ${words}` }, ...parts));
  });
  return [element("p", { class: "legend" }, ...legend), element("div", { class: "bars" }, ...bars)];
}

function drawCycles() {
  section("cycles").append(...cycleBars());
  const table = fixedTable("cycles", view.cycles, {
    selected: (line) => line.position === selection.ipu,
    onselect: (line) => select({ ipu: line.position }),
  });
  follow((before) => { if (before.ipu !== selection.ipu) table.redraw(); });
}

const WORKS = { call: 0, write: 1, copy: 3, host: 4, "off chip": 2, replicas: 7, update: 8 }; // colours of categories
const LIGHT = [1, 4, 7]; // those on which text is black

function drawTimeline() {
  const host = section("timeline");
  if (!view.timeline.sections.length) {
    host.append(element("p", {}, "This program has no timeline."));
    return;
  }
  const zoom = { value: 1 };
  const canvas = element("div", { class: "lanes" });
  const scroll = element("div", { class: "timeline", tabindex: 0, role: "region", "aria-label": "timeline; the table below has the same calls" }, canvas);
  const resize = (factor) => {
    zoom.value = Math.max(1, Math.min(64, zoom.value * factor));
    canvas.style.width = `${100 * zoom.value}%`;
  };
  const works = Object.entries(WORKS).map(([name, i]) =>
    element("span", {}, element("i", { style: { background: `var(--category-${i})` } }), name));
  host.append(
    element("div", { class: "tools" },
      element("button", { type: "button", onclick: () => resize(2), "aria-label": "zoom in" }, "+"),
      element("button", { type: "button", onclick: () => resize(0.5), "aria-label": "zoom out" }, "−"),
      element("span", { class: "legend" }, ...works, element("span", {}, element("i", { class: "idle" }), "idle"))),
    scroll,
  );
  const sections = view.timeline.sections.map((part) => ({ ...part, spans: unpackAll(part.spans) }));
  const total = sections.reduce((sum, part) => sum + part.cycles, 0) || 1;
  const place = (n) => `${(100 * n) / total}%`;
  const tracks = [...view.ipus.map((ipu) => ipu.name), "links, host"];
  const heads = element("div", { class: "heads" });
  const lanes = tracks.map((name) => element("div", { class: "lane" }, element("span", { class: "track" }, name)));
  const drawn = [];
  let start = 0;
  for (const part of sections) {
    const repeats = part.count === 1 ? "" : ` × ${whole(part.count)}`;
    heads.append(element("span", {
      class: "head", title: `${part.name}${repeats}: ${whole(part.cycles)} cycles each`,
      style: { left: place(start), width: place(part.cycles) },
    }, part.name + repeats));
    const { spans } = part;
    spans.start.forEach((begin, i) => {
      const call = spans.call[i], name = text(spans.name[i]), work = WORKS[view.timeline.works[spans.work[i]]];
      const batch = spans.micro_batch[i] < 0 ? "" : `, micro-batch ${spans.micro_batch[i]}`;
      const box = element("div", {
        class: "span", title: `${name}${batch}: ${whole(spans.cycles[i])} cycles from ${whole(begin)} of ${part.name}`,
        style: {
          left: place(start + begin), width: place(spans.cycles[i]),
          background: `var(--category-${work})`, color: LIGHT.includes(work) ? "#000" : "#fff",
        },
        onclick: () => selectCall(call, spans.track[i]),
      }, name);
      box.call = call;
      drawn.push(box);
      lanes[spans.track[i] < 0 ? lanes.length - 1 : spans.track[i]].append(box);
    });
    start += part.cycles;
  }
  canvas.append(heads, ...lanes);
  const rows = once(() => calls().name.map((name, i) => ({
    cells: {
      call: text(name), ipu: view.ipus[calls().ipu[i]].name, stage: String(calls().stage[i]),
      direction: text(calls().direction[i]), cycles: calls().cycles[i], line: text(calls().line[i]),
    },
    position: i,
  })));
  const table = new Table(host, {
    id: "calls", caption: "Calls of a micro-batch", source: () => [...rows()],
    columns: [
      { key: "call", label: "Call", kind: "text" }, { key: "ipu", label: "IPU", kind: "text" },
      { key: "stage", label: "Stage", kind: "text" }, { key: "direction", label: "Direction", kind: "text" },
      { key: "cycles", label: "Cycles", kind: "cycles" }, { key: "line", label: "Line", kind: "text" },
    ],
    selected: (line) => line.position === callOfStep(),
    onselect: (line) => selectCall(line.position, calls().ipu[line.position]),
  });
  table.refresh();
  if (view.measured.rows.length) {
    host.append(element("h3", {}, view.measured.caption));
    fixedTable("timeline", view.measured, { name: "measured" });
  }
  follow(() => {
    const chosen = callOfStep();
    lanes.forEach((lane, i) => lane.classList.toggle("chosen", i === selection.ipu));
    drawn.forEach((box) => box.classList.toggle("chosen", chosen !== null && box.call === chosen));
    table.redraw();
  });
}

// The call in which the selected step is; null without a step.
function callOfStep() {
  const memory = memoryOf(selection.ipu);
  return selection.step === null || !memory.steps ? null : partOf(memory, selection.step).call;
}

function selectCall(call, track) {
  if (track < 0) return;
  const part = call < 0 ? undefined : memoryOf(track).parts.find((other) => other.call === call);
  select(part && part.own.activations.length ? { ipu: track, step: part.start } : { ipu: track });
}
