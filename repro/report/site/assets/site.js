"use strict";
// Filtering and sorting of the table of verdicts, folded parts that a link points into, and reloading of a live page.
(() => {
  const table = document.getElementById("every-verdict");
  if (table) {
    const rows = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells];
    const field = (name) => document.getElementById(name);
    const tiles = [...document.querySelectorAll(".tile")];
    const place = new Map(rows.map((row, i) => [row, i]));
    const folded = rows.map((row) => row.dataset.text.toLowerCase());

    // A telephone would scroll for minutes through all rows; the rest comes when it is asked for, and in print.
    const FIRST = 60;
    let all = false;

    const filter = () => {
      const words = field("search").value.toLowerCase().split(/\s+/).filter(Boolean);
      const label = field("label").value, system = field("system").value, tier = field("tier").value;
      let found = 0;
      // In the order of the table, which sorting changes.
      [...table.tBodies[0].rows].forEach((row) => {
        const i = place.get(row);
        const keep = (!label || row.dataset.label === label) && (!system || row.dataset.system === system) &&
          (!tier || row.dataset.tier.split(/\W+/).includes(tier)) && words.every((word) => folded[i].includes(word));
        found += keep;
        row.hidden = !keep || (!all && found > FIRST);
      });
      tiles.forEach((tile) => tile.setAttribute("aria-pressed", String(tile.dataset.label === label)));
      field("shown").textContent = `${found} of ${rows.length} fit` + (!all && found > FIRST ? `, the first ${FIRST} are shown` : "");
      field("more").hidden = all || found <= FIRST;
      field("more").textContent = `Show all ${found}`;
    };

    const value = (row, column, kind) => {
      const cell = row.cells[column];
      if (kind === "text") return cell.textContent.trim();
      return cell.dataset.sort === "" ? NaN : Number(cell.dataset.sort);
    };
    const sort = (column, descending) => {
      const kind = heads[column].dataset.kind;
      const order = (a, b) => {
        const x = value(a, column, kind), y = value(b, column, kind);
        if (kind === "text") return x.localeCompare(y, "en", { numeric: true });
        return x - y;
      };
      // What has no number stays at the end in either direction.
      const without = (row) => kind !== "text" && Number.isNaN(value(row, column, kind));
      const sorted = [...rows].sort((a, b) => (without(a) - without(b)) ||
        (without(a) ? 0 : (descending ? order(b, a) : order(a, b))) || place.get(a) - place.get(b));
      heads.forEach((head, i) => i === column
        ? head.setAttribute("aria-sort", descending ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
      table.tBodies[0].append(...sorted);
      filter();
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () =>
      sort(column, head.getAttribute("aria-sort") === "ascending")));
    const by = field("sort-by");
    heads.forEach((head, column) => by.add(new Option(head.textContent.trim(), column)));
    by.addEventListener("change", () => sort(Number(by.value), false));

    ["search", "label", "system", "tier"].forEach((name) => field(name).addEventListener("input", filter));
    table.closest("section").querySelector("form").addEventListener("reset", () => setTimeout(filter));
    tiles.forEach((tile) => tile.addEventListener("click", () => {
      const pressed = tile.getAttribute("aria-pressed") === "true";
      field("label").value = pressed ? "" : tile.dataset.label;
      filter();
      if (!pressed) table.closest("section").scrollIntoView();
    }));
    field("more").addEventListener("click", () => { all = true; filter(); });
    addEventListener("beforeprint", () => { all = true; filter(); });
    filter();
  }

  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const inside = target.querySelector(":scope > details");
    if (inside) inside.open = true;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => document.querySelectorAll("article.verdict > details, details.parts").forEach((part) => { part.open = true; }));

  const live = document.body.dataset.live;
  if (live) {
    let seen = null;
    setInterval(async () => {
      try {
        const now = await (await fetch(live, { cache: "no-store" })).text();
        if (seen !== null && now !== seen) location.reload();
        seen = now;
      } catch { /* the server has stopped; what is shown stays */ }
    }, 3000);
  }
})();
