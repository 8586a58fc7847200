// A table: sorted, filtered, grouped, copied as CSV, walked by keyboard. Of a long one only the rows
// in sight are in the page.

const ROW = 26; // height of a row in pixels, as in the style sheet
const TALLEST = 460; // pixels that a table takes at most, as in the style sheet: it may grow when rows are drawn
const WHOLE = 60; // rows up to which a table is drawn whole

// Columns: { key, label, kind, help, optional sum: false }.
// source(group) returns entries { cells: {key: value}, group, select }.
class Table {
  constructor(host, { id, columns, source, sort = "", groups = [], onselect, selected, caption }) {
    Object.assign(this, { id, columns, source, groups, onselect, selected });
    this.open = new Set();
    const initial = { sort, filter: "", group: "" };
    this.view = tableViews[id] = { ...initial, initial, restore: () => this.restore() };
    this.active = 0;
    this.build(host, caption);
  }

  build(host, caption) {
    this.filter = element("input", {
      type: "search", placeholder: "Filter", "aria-label": `Filter ${caption}`,
      oninput: () => this.change({ filter: this.filter.value }),
    });
    this.group = element(
      "select",
      { "aria-label": `Group ${caption} by`, onchange: () => this.change({ group: this.group.value }) },
      element("option", { value: "" }, "no groups"),
      ...this.groups.map(([key, label]) => element("option", { value: key }, `by ${label}`)),
    );
    this.copied = element("button", { type: "button", onclick: () => this.copy() }, "Copy as CSV");
    this.status = element("span", { class: "status", role: "status" });
    this.heads = this.columns.map((column) => {
      const button = element(
        "button",
        { type: "button", title: column.help || null, onclick: () => this.sortBy(column.key) },
        column.label,
      );
      return element("th", { scope: "col", class: column.kind }, button);
    });
    this.body = element("tbody");
    this.table = element(
      "table",
      { "aria-label": caption },
      element("thead", {}, element("tr", {}, ...this.heads)),
      this.body,
    );
    this.scroll = element(
      "div",
      {
        class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}: rows`, id: `${this.id}-rows`,
        onscroll: () => this.draw(), onkeydown: (event) => this.key(event),
      },
      this.table,
    );
    const tools = element("div", { class: "tools" }, this.filter);
    if (this.groups.length) tools.append(this.group);
    tools.append(this.copied, this.status);
    host.append(tools, this.scroll);
  }

  restore() {
    this.filter.value = this.view.filter;
    if (!this.groups.some(([key]) => key === this.view.group)) this.view.group = "";
    const sorted = this.view.sort.replace(/^-/, "");
    if (sorted && !this.columns.some((column) => column.key === sorted)) this.view.sort = this.view.initial.sort;
    this.group.value = this.view.group;
    this.refresh();
  }

  change(change) {
    Object.assign(this.view, change);
    this.scroll.scrollTop = 0;
    this.active = 0;
    writeFragment();
    this.refresh();
  }

  sortBy(key) {
    const numeric = this.columns.find((column) => column.key === key).kind !== "text";
    const [first, second] = numeric ? ["-" + key, key] : [key, "-" + key];
    this.change({ sort: this.view.sort === first ? second : first });
  }

  // Make the list of lines anew: entries that pass the filter, sorted, under the lines of groups.
  refresh() {
    const { sort, filter, group } = this.view;
    const key = sort.replace(/^-/, ""), sign = sort.startsWith("-") ? -1 : 1;
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = this.columns.filter((column) => column.kind === "text").map((column) => column.key);
    const entries = this.source(group).filter((entry) => {
      const all = texts.map((name) => entry.cells[name]).join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    });
    const order = (a, b) => {
      const [x, y] = [a.cells[key], b.cells[key]];
      return sign * (typeof x === "string" ? (x < y ? -1 : x > y ? 1 : 0) : (x ?? -Infinity) - (y ?? -Infinity) || 0);
    };
    if (sort) entries.sort(order); // else they keep their order
    this.lines = entries;
    if (group) {
      const members = new Map();
      for (const entry of entries) {
        if (!members.has(entry.group)) members.set(entry.group, []);
        members.get(entry.group).push(entry);
      }
      const groups = [...members].map(([label, of]) => ({ label, of, cells: this.sums(label, of) }));
      if (sort) groups.sort(order);
      this.lines = groups.flatMap((made) => [made, ...(this.open.has(made.label) ? made.of : [])]);
    }
    this.count = entries.length;
    this.status.textContent = `${whole(entries.length)} rows` + (group ? `, ${whole(this.lines.filter((l) => l.of).length)} groups` : "");
    this.heads.forEach((head, i) => {
      const own = this.columns[i].key === key;
      head.setAttribute("aria-sort", own ? (sign > 0 ? "ascending" : "descending") : "none");
    });
    this.active = Math.min(this.active, Math.max(0, this.lines.length - 1));
    this.drawn = null;
    this.draw();
  }

  sums(label, entries) {
    const cells = {};
    for (const { key, kind, sum } of this.columns) {
      if (kind === "text") cells[key] = "";
      else if (sum === false) cells[key] = null;
      else cells[key] = entries.reduce((total, entry) => total + entry.cells[key], 0);
    }
    cells[this.columns[0].key] = label;
    return cells;
  }

  // Draw the rows in sight between two spacers.
  draw() {
    const count = this.lines.length;
    let [start, end] = [0, count];
    if (count > WHOLE) {
      const seen = Math.ceil(Math.max(this.scroll.clientHeight, TALLEST) / ROW);
      start = Math.max(0, Math.min(Math.floor(this.scroll.scrollTop / ROW) - 5, count - seen - 10));
      end = Math.min(count, start + Math.min(seen, 40) + 10);
    }
    const drawn = `${start} ${end}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const rows = [];
    if (start > 0) rows.push(this.spacer(start));
    for (let i = start; i < end; i += 1) rows.push(this.row(this.lines[i], i));
    if (end < count) rows.push(this.spacer(count - end));
    this.body.replaceChildren(...rows);
    this.table.setAttribute("aria-rowcount", count + 1);
    this.scroll.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
  }

  spacer(rows) {
    const cell = element("td", { colspan: this.columns.length, style: { height: `${rows * ROW}px` } });
    return element("tr", { class: "spacer", "aria-hidden": "true" }, cell);
  }

  row(line, i) {
    const cells = this.columns.map(({ key, kind }, column) => {
      const value = line.cells[key];
      let shown = value === null || value === undefined ? "" : FORMATS[kind](value);
      if (line.of && column === 0) shown = `${this.open.has(line.label) ? "▾" : "▸"} ${shown || "(none)"} (${line.of.length})`;
      return element("td", { class: kind, title: kind === "text" ? shown : null }, shown);
    });
    const chosen = !line.of && this.selected && this.selected(line);
    return element(
      "tr",
      {
        id: `${this.id}-${i}`, "aria-rowindex": i + 2,
        class: (line.of ? "group " : "") + (i === this.active ? "active" : ""),
        "aria-selected": chosen ? "true" : null, "aria-expanded": line.of ? String(this.open.has(line.label)) : null,
        onclick: () => { this.active = i; this.enter(line); },
      },
      ...cells,
    );
  }

  enter(line) {
    if (line.of) {
      if (!this.open.delete(line.label)) this.open.add(line.label);
      this.refresh();
    } else {
      if (this.onselect) this.onselect(line);
      this.redraw();
    }
  }

  redraw() {
    this.drawn = null;
    this.draw();
  }

  // Bring a line into sight, without taking the focus.
  show(matches) {
    const i = this.lines.findIndex((line) => !line.of && matches(line));
    if (i >= 0) this.move(i);
    else this.redraw();
  }

  move(i) {
    this.active = Math.max(0, Math.min(i, this.lines.length - 1));
    const top = this.active * ROW, height = this.scroll.clientHeight - 2 * ROW;
    if (top < this.scroll.scrollTop) this.scroll.scrollTop = top;
    else if (top > this.scroll.scrollTop + height) this.scroll.scrollTop = top - height;
    this.redraw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.scroll.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
    if (event.target !== this.scroll) return;
    if (event.key in moves) this.move(this.active + moves[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.lines.length) this.enter(this.lines[this.active]);
    else return;
    event.preventDefault();
  }

  // A text that spreadsheets would run as a formula gets an apostrophe in front.
  csv() {
    const quoted = (value) => `"${String(value).replace(/"/g, '""').replace(/^([=+\-@\t\r])/, "'$1")}"`;
    const cell = (line) => ({ key, kind }) =>
      kind === "text" ? quoted(line.cells[key]) : (line.cells[key] ?? "");
    const lines = [this.columns.map((column) => quoted(column.label))];
    for (const line of this.lines) lines.push(this.columns.map(cell(line)));
    return lines.map((cells) => cells.join(",")).join("\r\n") + "\r\n";
  }

  async copy() {
    const csv = this.csv();
    try {
      await navigator.clipboard.writeText(csv);
    } catch {
      const area = element("textarea", { class: "copying" });
      area.value = csv;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    this.copied.textContent = "Copied";
    setTimeout(() => { this.copied.textContent = "Copy as CSV"; }, 1500);
  }
}
