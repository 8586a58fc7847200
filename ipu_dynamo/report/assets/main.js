// Draw the sections in their order, then what the URL says is selected.

function drawMachine() {
  const host = section("machine");
  host.append(...view.machine.paragraphs.map((line) => element("p", {}, line)));
  for (const name of ["marks", "unknown", "calibration", "constants"]) {
    const table = view.machine[name];
    if (table.rows.length === 0) continue;
    host.append(element("h3", {}, table.caption));
    if (table.note) host.append(element("p", {}, table.note));
    fixedTable("machine", table, { name });
  }
}

function drawMade() {
  section("made").append(
    element("dl", { class: "made" }, ...view.made.flatMap(([label, value]) =>
      [element("dt", {}, label), element("dd", {}, element("code", {}, value))])),
  );
}

const head = document.getElementById("headline");
head.textContent = view.headline;
head.className = view.verdict.replaceAll(" ", "-");
document.title = view.title;
drawOverview();
drawPeak();
drawOperators();
drawCycles();
drawTimeline();
drawMachine();
drawMade();
document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => {
  const target = document.getElementById(button.dataset.section);
  target.scrollIntoView();
  target.querySelector("h2").focus({ preventScroll: true });
}));
readFragment();
Object.values(tableViews).forEach((shown) => shown.restore());
followers.forEach((draw) => draw({ ipu: -1, operator: -1, step: -1 }));
