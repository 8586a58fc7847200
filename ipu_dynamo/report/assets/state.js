// What every section uses: the view, numbers as text, elements, and the one selection.

const view = JSON.parse(document.getElementById("view").textContent);
const text = (index) => view.strings[index];

// --- numbers ---
const DIGITS = /\B(?=(\d{3})+(?!\d))/g;
const whole = (n) => String(Math.round(n)).replace(DIGITS, ",");
function scaled(n, base, units) {
  let i = 0;
  while (Math.abs(n) >= base && i < units.length - 1) { n /= base; i += 1; }
  const digits = i === 0 || Math.abs(n) >= 100 ? 0 : Math.abs(n) >= 10 ? 1 : 2;
  return n.toFixed(digits) + (units[i] ? " " + units[i] : "");
}
const FORMATS = {
  text: (value) => value,
  count: whole,
  cycles: whole,
  bytes: (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB"]),
  flops: (n) => scaled(n, 1000, ["", "k", "M", "G", "T", "P"]),
  seconds: (n) => scaled(1e6 * n, 1000, ["µs", "ms", "s"]),
  percent: (n) => (n === null ? "" : (100 * n).toFixed(1) + " %"),
};

// A column of integers, as pack in views/compact.py writes it: differences, equal ones once.
function unpack(packed) {
  const bytes = atob(packed), values = [];
  let i = 0, last = 0;
  const varint = () => {
    let n = 0, factor = 1, byte;
    do {
      byte = bytes.charCodeAt(i++);
      n += (byte & 127) * factor;
      factor *= 128;
    } while (byte & 128);
    return n;
  };
  while (i < bytes.length) {
    const n = varint(), size = Math.floor(n / 4);
    for (let times = n % 2 ? varint() + 1 : 1; times > 0; times -= 1) {
      last += Math.floor(n / 2) % 2 ? -size : size;
      values.push(last);
    }
  }
  return values;
}

// --- elements: names are data, so text is set as text and never read as HTML ---
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}
const section = (id) => document.querySelector(`#${id} > .body`);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- the selection: an IPU, an operator (a kind of rows), a program step; and each table's view ---
const selection = { ipu: 0, operator: null, step: null };
const tableViews = {}; // by table: { sort, filter, group }
const followers = []; // functions that draw what is selected
let written = null;

function readFragment() {
  const read = new URLSearchParams(location.hash.slice(1));
  const number = (name, end) => {
    const n = read.has(name) ? Number(read.get(name)) : NaN;
    return Number.isInteger(n) && n >= 0 && n < end ? n : null;
  };
  selection.ipu = number("ipu", view.ipus.length) ?? view.chosen;
  selection.operator = number("operator", view.operators.kinds.operator.length);
  selection.step = number("step", memoryOf(selection.ipu).steps);
  for (const [id, shown] of Object.entries(tableViews)) {
    for (const key of ["sort", "filter", "group"]) {
      shown[key] = read.get(`${id}.${key}`) ?? shown.initial[key];
    }
  }
}

function writeFragment() {
  const write = new URLSearchParams();
  for (const key of ["ipu", "operator", "step"]) {
    if (selection[key] !== null) write.set(key, selection[key]);
  }
  for (const [id, shown] of Object.entries(tableViews)) {
    for (const key of ["sort", "filter", "group"]) {
      if (shown[key] !== shown.initial[key]) write.set(`${id}.${key}`, shown[key]);
    }
  }
  written = "#" + write;
  if (location.hash !== written) location.replace(written);
}

function follow(draw) {
  followers.push(draw);
}

// Select an IPU, an operator or a step; the other two follow where they say nothing else.
function select(change) {
  const before = { ...selection };
  Object.assign(selection, change);
  if ("ipu" in change && change.ipu !== before.ipu && !("step" in change)) selection.step = null;
  if ("step" in change && change.step !== null && !("operator" in change)) {
    const kind = memoryOf(selection.ipu).kinds[selection.step];
    selection.operator = kind >= 0 ? kind : null;
  } else if (change.operator != null && !("step" in change)) {
    selectStepOf(change.operator);
  }
  writeFragment();
  followers.forEach((draw) => draw(before));
}

// Select the first step that runs an operator: of the selected IPU, else of the first that has one.
function selectStepOf(kind) {
  const ipus = [selection.ipu, ...view.ipus.keys()];
  for (const ipu of ipus) {
    const step = memoryOf(ipu).kinds.indexOf(kind);
    if (step >= 0) {
      selection.ipu = ipu;
      selection.step = step;
      return;
    }
  }
}

window.addEventListener("hashchange", () => {
  if (location.hash === written) return;
  const before = { ...selection };
  readFragment();
  Object.values(tableViews).forEach((shown) => shown.restore());
  followers.forEach((draw) => draw(before));
});

// --- what the program runs, unpacked when it is first asked for ---
const unpackAll = (columns) =>
  Object.fromEntries(Object.entries(columns).map(([name, packed]) => [name, unpack(packed)]));
function once(make) {
  let made;
  return () => (made ??= make());
}
const operatorRows = once(() => unpackAll(view.operators.rows)); // by row: its kind, and costs of a run
const operatorPlaces = once(() => view.operators.places.map(unpackAll)); // where rows run, how often
const blocks = once(() => view.blocks.map(unpack)); // by block: the row of each of its steps
const calls = once(() => unpackAll(view.calls)); // by call: name, ipu, stage, direction, block, cycles, line
const kindOfStep = (block, step) => (step < 0 ? -1 : operatorRows().kind[blocks()[block][step]]);

const memories = new Map();
// Memory of an IPU over the steps of its calls of a micro-batch, in program order.
function memoryOf(ipu) {
  if (!memories.has(ipu)) memories.set(ipu, makeMemory(view.memory[ipu]));
  return memories.get(ipu);
}
function makeMemory({ always, peak, tensors, blocks: packedBlocks, calls: packedCalls }) {
  const memoryBlocks = packedBlocks.map(unpackBlock);
  const { call, block, held } = unpackAll(packedCalls.columns);
  const made = { always, peak, tensors, activations: [], temporaries: [], kinds: [], parts: [] };
  call.forEach((number, i) => {
    const own = memoryBlocks[block[i]];
    made.parts.push({ start: made.kinds.length, call: number, own, held: unpackAll(packedCalls.held[i]) });
    own.activations.forEach((bytes, step) => {
      made.activations.push(held[i] + bytes);
      made.temporaries.push(own.temporaries[step]);
      made.kinds.push(kindOfStep(own.block, step));
    });
  });
  made.steps = made.kinds.length;
  return made;
}
function unpackBlock({ block, columns, shapes, temporaries }) {
  const { stem, number, shape, made, steps, more } = unpackAll(columns);
  const { type, nbytes } = unpackAll(shapes), { values, at } = unpackAll(temporaries);
  const last = made.map((step, i) => (steps[i] === 0 ? -1 : step + steps[i] - 1));
  const change = new Array(more.length + 1).fill(0);
  shape.forEach((own, i) => {
    change[Math.max(made[i], 0)] += nbytes[own];
    if (last[i] >= 0) change[last[i] + 1] -= nbytes[own];
  });
  let live = 0;
  return {
    block, stem, number, made, last,
    type: shape.map((own) => type[own]), nbytes: shape.map((own) => nbytes[own]),
    activations: more.map((bytes, step) => bytes + (live += change[step])),
    temporaries: at.map((position) => values[position]),
  };
}
// The part, a call, in which a step is.
function partOf(memory, step) {
  return memory.parts.findLast((part) => part.start <= step) ?? null;
}
// The values that are live at a step: { name, type, bytes, maker, reader }, operators as kinds.
function liveAt(memory, step) {
  const { start, own, held } = partOf(memory, step), at = step - start;
  const value = (of, i) => ({
    name: text(of.stem[i]) + (of.number[i] < 0 ? "" : of.number[i]), type: text(of.type[i]), bytes: of.nbytes[i],
    maker: kindOfStep(of.block, of.made[i]), reader: kindOfStep(of.block, of.last[i]),
  });
  const live = [];
  own.nbytes.forEach((_, i) => {
    if (own.made[i] <= at && (own.last[i] < 0 || at <= own.last[i])) live.push(value(own, i));
  });
  held.call.forEach((call, i) => {
    const part = memory.parts.find((other) => other.call === call);
    if (part) live.push(value(part.own, held.lifetime[i]));
  });
  return live;
}
