"use strict";
// Without this script the page says the same; it only sorts tables, copies them and unfolds for print.

const ORDERS = ["none", "ascending", "descending"];

function cells(row) {
  return Array.from(row.cells);
}

// The place of a heading among the columns: with two rows of headings, its index in its own row is not it.
function columnsOf(table) {
  const rows = Array.from(table.tHead.rows);
  const taken = rows.map(() => []);
  const found = new Map();
  rows.forEach((row, r) => {
    let at = 0;
    for (const cell of cells(row)) {
      while (taken[r][at]) at += 1;
      for (let down = 0; down < cell.rowSpan && r + down < rows.length; down += 1) {
        for (let along = 0; along < cell.colSpan; along += 1) taken[r + down][at + along] = true;
      }
      if (cell.dataset.sort) found.set(cell, at);
      at += cell.colSpan;
    }
  });
  return found;
}

function compare(kind, column, sign) {
  return (a, b) => {
    const [one, other] = [a.cells[column], b.cells[column]];
    if (kind === "text") return sign * one.textContent.localeCompare(other.textContent, "en", { numeric: true });
    const [x, y] = [one.dataset.value, other.dataset.value];
    // What is missing comes last whichever way is up; words sort as words.
    if (x === undefined && y === undefined) return sign * one.textContent.localeCompare(other.textContent, "en");
    if (x === undefined) return 1;
    if (y === undefined) return -1;
    return sign * (Number(x) - Number(y));
  };
}

function makeSortable(table) {
  const body = table.tBodies[0];
  const original = Array.from(body.rows);
  const columns = columnsOf(table);
  for (const [heading, column] of columns) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      // Best first, then the other way, then as it was.
      const first = heading.dataset.better === "up" ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = { none: first, [first]: second, [second]: "none" }[heading.getAttribute("aria-sort")];
      for (const other of columns.keys()) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", order);
      const rows = original.slice();
      if (order !== ORDERS[0]) rows.sort(compare(heading.dataset.sort, column, order === "ascending" ? 1 : -1));
      body.append(...rows);
    });
  }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers that keep the clipboard from pages opened as files still copy a selection.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function offerCopies(line) {
  line.prepend("Headings sort. ");
  for (const link of Array.from(line.querySelectorAll("a.take"))) {
    const button = document.createElement("button");
    button.type = "button";
    const words = "copy " + link.textContent;
    button.textContent = words;
    button.addEventListener("click", async () => {
      const address = link.getAttribute("href");
      await copy(decodeURIComponent(address.slice(address.indexOf(",") + 1)));
      button.textContent = "copied";
      setTimeout(() => { button.textContent = words; }, 1500);
    });
    line.append(button);
  }
}

document.querySelectorAll("table.numbers").forEach(makeSortable);
document.querySelectorAll(".takes").forEach(offerCopies);

let unfolded = [];
window.addEventListener("beforeprint", () => {
  unfolded = Array.from(document.querySelectorAll("details:not([open])"));
  for (const each of unfolded) each.open = true;
});
window.addEventListener("afterprint", () => {
  for (const each of unfolded) each.open = false;
});
