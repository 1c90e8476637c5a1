
// A click on a column's head sorts its table; the box above hides what does not hold its words.
const key = (row, at) => {
  const cell = row.cells[at], said = cell?.dataset.v ?? cell?.textContent.trim().replaceAll(",", "");
  return !said || said === "–" ? null : isNaN(said) ? said : +said;
};
const rank = k => (k === null ? 2 : typeof k === "string" ? 1 : 0);
const order = (a, b) => rank(a) - rank(b) ||
  (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
for (const head of document.querySelectorAll("thead th")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], down = head.ariaSort === "ascending";
    for (const other of head.parentNode.cells) other.ariaSort = null;
    head.ariaSort = down ? "descending" : "ascending";
    const rows = [...body.rows].map(row => [key(row, head.cellIndex), row]);
    rows.sort(([a], [b]) => rank(a) - rank(b) || (down ? order(b, a) : order(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  head.tabIndex = 0;
  head.title = "sort";
  head.onclick = sort;
  head.onkeydown = event => event.key === "Enter" && sort();
}
const box = document.createElement("input");
box.type = "search";
box.placeholder = "filter: variant, oracle, dtype…";
box.ariaLabel = "filter rows by words";
document.querySelector("nav").append(box);
box.oninput = () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const part of document.querySelectorAll("tbody tr, section > details, .box, li")) {
    const above = part.closest("section > details")?.querySelector("summary").textContent;
    let head = part.closest(".scroll");
    while (head && head.tagName !== "H3") head = head.previousElementSibling;
    const said = [above, head?.textContent, part.textContent].join(" ").toLowerCase();
    part.hidden = !words.every(word => said.includes(word));
  }
};
