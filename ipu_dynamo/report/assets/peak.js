// Memory over program steps: the chart, the live tensors at the cursor, the profile over tiles.

let memoryChart = null;

function stackedChart(host, memory) {
  const steps = Float64Array.from({ length: memory.steps }, (_, i) => i);
  const always = steps.map(() => memory.always);
  const activations = steps.map((_, i) => memory.always + memory.activations[i]);
  const temporaries = steps.map((_, i) => activations[i] + memory.temporaries[i]);
  const limit = steps.map(() => view.ipus[selection.ipu].limit);
  const stepped = uPlot.paths.stepped({ align: 1 });
  const area = (label, name) => ({
    label, stroke: color(name), fill: color(name), width: 1, paths: stepped, points: { show: false },
  });
  const axis = { stroke: color("--text"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
  const chart = new uPlot({
    width: Math.max(320, host.clientWidth), height: 220,
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, 1.05 * high] } },
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { show: false } },
    axes: [
      { ...axis, label: "program step" },
      { ...axis, size: 80, values: (_, ticks) => ticks.map(FORMATS.bytes) },
    ],
    series: [
      {}, area("temporaries", "--category-8"), area("activations", "--category-7"), area("always live", "--category-0"),
      { label: "limit", stroke: color("--bad"), dash: [6, 4], width: 1.5, points: { show: false } },
    ],
    hooks: { draw: [drawSelectedStep] },
  }, [steps, temporaries, activations, always, limit], host);
  chart.over.addEventListener("click", () => {
    if (chart.cursor.idx != null && chart.select.width === 0) select({ step: chart.cursor.idx });
  });
  return chart;
}

function drawSelectedStep(chart) {
  if (selection.step === null) return;
  const x = chart.valToPos(selection.step, "x", true), { top, height } = chart.bbox;
  chart.ctx.save();
  chart.ctx.strokeStyle = color("--text");
  chart.ctx.lineWidth = 2;
  chart.ctx.beginPath();
  chart.ctx.moveTo(x, top);
  chart.ctx.lineTo(x, top + height);
  chart.ctx.stroke();
  chart.ctx.restore();
}

const kindName = (kind) => (kind < 0 ? "another call" : text(view.operators.kinds.operator[kind]));
const kindLine = (kind) => (kind < 0 ? "" : text(view.operators.kinds.line[kind]));

// The entries of the table of live tensors: what is always live, and what lives at this step.
function liveEntries() {
  const memory = memoryOf(selection.ipu), always = [], peak = [];
  for (const tensor of memory.tensors) {
    const cells = Object.fromEntries(Object.entries(tensor).map(([key, value]) => [key, key === "bytes" ? value : text(value)]));
    (tensor.always ? always : peak).push({ cells });
  }
  const atPeak = selection.step === null || selection.step === memory.peak;
  if (atPeak || memory.steps === 0) return [...always, ...peak];
  const live = liveAt(memory, selection.step).map(({ name, type, bytes, maker, reader }) => ({
    cells: {
      name, type, bytes, category: "activations", maker: kindName(maker), line: kindLine(maker), reader: kindName(reader),
    },
    kind: maker,
  }));
  return [...always, ...live];
}

function drawPeak() {
  const host = section("peak");
  const chartHost = element("div", {
    class: "chart", tabindex: 0, role: "group", id: "memory-chart",
    "aria-label": "memory over program steps; arrow keys move the step",
    onkeydown: (event) => {
      const memory = memoryOf(selection.ipu);
      const from = selection.step ?? memory.peak ?? 0;
      const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: memory.steps - 1 }[event.key];
      if (to === undefined || memory.steps === 0) return;
      select({ step: Math.max(0, Math.min(to, memory.steps - 1)) });
      event.preventDefault();
    },
  });
  const ipus = element("select", {
    "aria-label": "IPU", id: "peak-ipu", onchange: () => select({ ipu: Number(ipus.value) }),
  }, ...view.ipus.map((ipu, i) => element("option", { value: i }, ipu.name)));
  const toPeak = element("button", { type: "button", id: "to-peak", onclick: () => select({ step: memoryOf(selection.ipu).peak }) }, "To the peak");
  const status = element("p", { role: "status", id: "step-status" });
  const legend = [["always live", 0], ["activations", 7], ["temporaries", 8]].map(([label, i]) =>
    element("span", {}, element("i", { style: { background: `var(--category-${i})` } }), label));
  const tiles = element("p", { id: "tile-profile" });
  host.append(element("div", { class: "tools" }, ipus, toPeak, element("span", { class: "legend" }, ...legend)), chartHost, status);
  const tableHost = element("div");
  host.append(tableHost, tiles);
  const table = new Table(tableHost, {
    id: "tensors", caption: "Live tensors", sort: "-bytes", source: liveEntries, groups: [],
    columns: [
      { key: "name", label: "Tensor", kind: "text" }, { key: "type", label: "Type", kind: "text" },
      { key: "bytes", label: "Bytes", kind: "bytes" }, { key: "category", label: "Category", kind: "text" },
      { key: "maker", label: "Made by", kind: "text" }, { key: "line", label: "Line", kind: "text" },
      { key: "reader", label: "Last read by", kind: "text" },
    ],
    onselect: (line) => { if (line.kind >= 0) select({ operator: line.kind, step: selection.step }); },
  });
  const redrawChart = () => {
    memoryChart?.destroy();
    memoryChart = memoryOf(selection.ipu).steps ? stackedChart(chartHost, memoryOf(selection.ipu)) : null;
  };
  follow((before) => {
    const memory = memoryOf(selection.ipu), ipu = view.ipus[selection.ipu];
    ipus.value = String(selection.ipu);
    if (before.ipu !== selection.ipu || !memoryChart) redrawChart();
    else memoryChart.redraw(false);
    toPeak.disabled = memory.peak === null;
    const step = selection.step ?? memory.peak;
    if (step === null) {
      status.textContent = memory.steps ? `${ipu.name}: the peak is outside of calls.` : `${ipu.name}: no program steps.`;
    } else {
      const part = partOf(memory, step), call = calls();
      const bytes = memory.always + memory.activations[step] + memory.temporaries[step];
      status.textContent = `${ipu.name}, step ${whole(step)} of ${whole(memory.steps)}` +
        (step === memory.peak ? " (the peak)" : "") +
        `, in ${text(call.name[part.call])}: ${kindName(memory.kinds[step])}; always live ` +
        `${FORMATS.bytes(memory.always)}, activations ${FORMATS.bytes(memory.activations[step])}, ` +
        `temporaries ${FORMATS.bytes(memory.temporaries[step])}, together ${FORMATS.bytes(bytes)}.`;
    }
    const { least, median, low, central, high, limit } = ipu.tile;
    tiles.textContent = `Tiles of ${ipu.name} at the peak: least ${FORMATS.bytes(least)}, median ${FORMATS.bytes(median)}, ` +
      `fullest ${FORMATS.bytes(central)} (${FORMATS.bytes(low)} to ${FORMATS.bytes(high)}), limit ${FORMATS.bytes(limit)}.`;
    if (before.ipu !== selection.ipu || before.step !== selection.step || !table.lines) table.refresh();
  });
  const again = () => { if (memoryChart) redrawChart(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let width = 0;
  new ResizeObserver(() => {
    if (memoryChart && chartHost.clientWidth && chartHost.clientWidth !== width) {
      width = chartHost.clientWidth;
      memoryChart.setSize({ width, height: 220 });
    }
  }).observe(chartHost);
}
