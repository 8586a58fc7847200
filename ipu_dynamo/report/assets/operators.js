// The table of operators: rows equal in operator, types, line and direction are one.

const OPERATOR_COLUMNS = [
  { key: "operator", label: "Operator", kind: "text" },
  { key: "line", label: "Line", kind: "text" },
  { key: "cycles", label: "Cycles", kind: "cycles", help: "in a step, on all IPUs of a replica" },
  { key: "share", label: "Share", kind: "percent", help: "of the cycles of all operators" },
  { key: "wasted", label: "Wasted", kind: "cycles", help: "cycles less the largest of the three bounds: products, exchange, memory" },
  { key: "count", label: "Runs", kind: "count", help: "in a step" },
  { key: "compute", label: "Compute", kind: "cycles" },
  { key: "exchange", label: "Exchange", kind: "cycles" },
  { key: "relayout", label: "Re-layout", kind: "cycles" },
  { key: "reduction", label: "Reduction", kind: "cycles" },
  { key: "overhead", label: "Overhead", kind: "cycles" },
  { key: "amp", label: "AMP", kind: "percent", sum: false, help: "cycles that its products take at the peak of their kind, as a share of its cycles" },
  { key: "flops", label: "FLOPs", kind: "flops" },
  { key: "bytes", label: "Bytes", kind: "bytes", sum: false, help: "of operands and results of one run" },
  { key: "temporary", label: "Temporary", kind: "bytes", sum: false, help: "on a tile" },
  { key: "mark", label: "Mark", kind: "text", help: "F: read in a source, D: derived, fitted: to measurements, M: recalled" },
  { key: "plan", label: "Plan", kind: "text" },
  { key: "types", label: "Types", kind: "text" },
  { key: "module", label: "Module", kind: "text", help: "of the parameter that it reads, else of the operator before it" },
  { key: "direction", label: "Direction", kind: "text" },
  { key: "stage", label: "Stage", kind: "text" },
  { key: "ipu", label: "IPU", kind: "text" },
];
const OPERATOR_GROUPS = [["line", "line"], ["module", "module"], ["operator", "operator"], ["stage", "stage"], ["ipu", "IPU"]];
const ADDED = ["compute", "exchange", "relayout", "reduction", "overhead", "cycles", "wasted", "flops", "bound_flops"];
const CERTAIN = ["", "F", "D", "fitted", "M", "no formula"];

// Uses of one kind become an entry; with a group, those of one kind in each group.
function operatorEntries(group) {
  const { kinds } = view.operators, rows = operatorRows(), places = operatorPlaces();
  const entries = new Map();
  const add = (row, place, i) => {
    const kind = rows.kind[row], count = place.count[i] * rows.times[row];
    const names = {
      module: text(place.module[i]), stage: place.stage[i] < 0 ? "" : String(place.stage[i]), ipu: String(place.ipu[i]),
    };
    const label = { line: text(kinds.line[kind]), operator: text(kinds.operator[kind]), ...names }[group] ?? "";
    const key = `${kind} ${label}`;
    let entry = entries.get(key);
    if (!entry) {
      const cells = {
        operator: text(kinds.operator[kind]), types: text(kinds.types[kind]), line: text(kinds.line[kind]),
        direction: text(kinds.direction[kind]), plan: text(rows.plan[row]), bytes: rows.nbytes[row],
        count: 0, temporary: 0, certain: 0, module: new Set(), stage: new Set(), ipu: new Set(),
      };
      for (const name of ADDED) cells[name] = 0;
      entry = { cells, group: label, kind };
      entries.set(key, entry);
    }
    const { cells } = entry;
    cells.count += count;
    for (const name of ADDED) cells[name] += count * rows[name][row];
    cells.temporary = Math.max(cells.temporary, rows.temporary[row]);
    cells.certain = Math.max(cells.certain, rows.mark[row]);
    for (const name of ["module", "stage", "ipu"]) cells[name].add(names[name]);
  };
  rows.places.forEach((at, row) => places[at].ipu.forEach((_, i) => add(row, places[at], i)));
  for (const { cells } of entries.values()) {
    cells.share = view.operators.cycles ? cells.cycles / view.operators.cycles : 0;
    cells.amp = cells.flops && cells.cycles ? cells.bound_flops / cells.cycles : null;
    cells.mark = CERTAIN[cells.certain];
    for (const name of ["module", "stage", "ipu"]) cells[name] = several([...cells[name]]);
  }
  return [...entries.values()];
}

function several(names) {
  return names.length <= 4 ? names.join(", ") : `${names.slice(0, 3).join(", ")} and ${names.length - 3} more`;
}

function drawOperators() {
  const table = new Table(section("operators"), {
    id: "operators", caption: "Operators", columns: OPERATOR_COLUMNS, groups: OPERATOR_GROUPS, sort: "-cycles",
    source: operatorEntries,
    selected: (line) => line.kind === selection.operator,
    onselect: (line) => select({ operator: line.kind === selection.operator ? null : line.kind }),
  });
  table.refresh();
  follow((before) => {
    if (before.operator === selection.operator) return;
    if (selection.operator === null) table.redraw();
    else table.show((line) => line.kind === selection.operator);
  });
}
