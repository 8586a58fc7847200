// The first screen: facts, a bar for each IPU, what limits the step.

const CATEGORY_COLORS = view.categories.map((_, i) => `--category-${i}`);

function bar(ipu, end) {
  const share = (n) => `${(100 * n) / end}%`;
  const parts = ipu.bytes.map((n, i) =>
    element("span", {
      class: "part", title: `${view.categories[i]}: ${FORMATS.bytes(n)}`,
      style: { width: share(n), background: `var(${CATEGORY_COLORS[i]})` },
    }),
  );
  const words = view.categories.map((name, i) => `${name} ${FORMATS.bytes(ipu.bytes[i])}`).join(", ");
  return element(
    "div",
    { class: "bar", role: "img", "aria-label": `${ipu.name}: ${words}; limit ${FORMATS.bytes(ipu.limit)}` },
    ...parts,
    element("span", { class: "limit", title: `limit: ${FORMATS.bytes(ipu.limit)}`, style: { left: share(ipu.limit) } }),
    element("span", {
      class: "fullest", style: { left: share(ipu.fullest) },
      title: `fullest tile: ${FORMATS.bytes(ipu.tile.central)} of ${FORMATS.bytes(ipu.tile.limit)}`,
    }),
  );
}

function drawOverview() {
  const host = section("overview");
  host.append(
    element("dl", { class: "facts" }, ...view.facts.map(([label, value, note]) =>
      element("div", { title: note || null }, element("dt", {}, label), element("dd", {}, value)))),
  );
  const legend = view.categories.map((name, i) =>
    element("span", {}, element("i", { style: { background: `var(${CATEGORY_COLORS[i]})` } }), name));
  const marks = [["limit", "limit"], ["fullest", "fullest tile"]].map(([kind, label]) =>
    element("span", {}, element("i", { class: kind }), label));
  host.append(element("p", { class: "legend" }, ...legend, ...marks));
  const end = 1.02 * Math.max(...view.ipus.map((ipu) => Math.max(ipu.limit, ipu.high, ipu.fullest)), 1);
  const heads = ["IPU", "Memory", "Bytes (low to high)", "Always live + peak", "Cycles in a step"];
  const body = element("tbody");
  const rows = view.ipus.map((ipu, i) => {
    const chosen = () => select({ ipu: i });
    return element(
      "tr",
      { onclick: chosen, class: ipu.word === "fits" ? null : ipu.word.replaceAll(" ", "-") },
      element("th", { scope: "row" }, element("button", { type: "button", onclick: chosen }, ipu.name)),
      element("td", {}, bar(ipu, end)),
      element("td", { class: "bytes" }, `${FORMATS.bytes(ipu.low)} to ${FORMATS.bytes(ipu.high)}`),
      element("td", { class: "bytes" }, `${FORMATS.bytes(ipu.always)} + ${FORMATS.bytes(ipu.rest)}`),
      element("td", { class: "cycles" }, FORMATS.cycles(ipu.cycles)),
    );
  });
  body.append(...rows.filter((_, i) => view.ipus[i].first));
  const table = element(
    "table", { class: "ipus", "aria-label": "IPUs" },
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), body);
  host.append(table);
  const hidden = view.ipus.filter((ipu) => !ipu.first).length;
  if (hidden) {
    const more = element("button", {
      type: "button", onclick: () => { body.replaceChildren(...rows); more.remove(); },
    }, `Show the other ${hidden} IPUs`);
    host.append(more);
  }
  host.append(element("p", { class: "limits" }, view.limits));
  follow(() => rows.forEach((row, i) => row.setAttribute("aria-selected", String(i === selection.ipu))));
}
