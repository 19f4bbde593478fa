"use strict";
// Sorts, filters and draws one table of the document. A cell is [text, tone]. Text is untrusted: it
// is set as `textContent` only.
const make = (name, props = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), props);
  made.append(...inside);
  return made;
};
const put = (node, text, tone = "") => {
  if (node.textContent !== text) node.textContent = text;
  if ((node.dataset.tone || "") !== tone) node.dataset.tone = tone;
  return node;
};

const tables = (() => {
  const MISSING = "–";
  const inOrder = new Intl.Collator("en", { numeric: true });

  // Returns the rows that contain each word of a filter, and no word that has a "!" before it.
  const filtered = ({ rows }, filter) => {
    const words = filter.toLowerCase().split(/\s+/).filter((word) => word.replace("!", ""));
    return rows.filter(({ key, reason, cells }) => {
      const text = [key, reason, ...cells.map(([shown]) => shown)].join("\n").toLowerCase();
      return words.every((word) => (word.startsWith("!")
        ? !text.includes(word.slice(1)) : text.includes(word)));
    });
  };

  // Returns the number to sort by: a clock in seconds; of "3/4", the first number.
  const number = (text) => (text.includes(":")
    ? text.split(":").reduce((all, part) => 60 * all + Number.parseFloat(part), 0)
    : Number.parseFloat(text.replace("<", "")));
  // Sorts numbers from the largest and words from A; "-" reverses. Unknown values are always last.
  const sorted = ({ columns }, rows, sort) => {
    const at = columns.findIndex(({ key }) => key === sort.replace(/^-/, ""));
    if (at < 0) return rows;
    const sign = sort.startsWith("-") ? -1 : 1;
    return [...rows].sort((one, other) => {
      const [first, second] = [one.cells[at][0], other.cells[at][0]];
      if ([first, second].includes(MISSING)) return (first === MISSING) - (second === MISSING);
      if (columns[at].numeric) return sign * (number(second) - number(first));
      return sign * inOrder.compare(first, second);
    });
  };

  // Draws rows into a table element. Each row keeps its `tbody`, so that the focus stays with it.
  const drawer = (node) => {
    const bodies = new Map();
    let shape = "", shown = [], width = 0;

    const bodyOf = (row, on) => {
      const cells = shown.map(({ at, column }) => {
        const cell = make(at ? "td" : "th", { className: column.numeric ? "" : "words" });
        cell.dataset.at = at;
        return cell;
      });
      const link = on.href(row.key) && make("a", { href: on.href(row.key) });
      if (link) cells[0].append(link);
      const pick = make("input", { type: "checkbox" });
      pick.setAttribute("aria-label", row.key);
      pick.addEventListener("change", () => on.choose(row.key, pick.checked));
      const why = make("td", { colSpan: shown.length + 1 });
      const picked = make("td", { className: "pick" }, pick);
      const body = make("tbody", {}, make("tr", {}, picked, ...cells),
        make("tr", { className: "why" }, why));
      return { body, link, pick, why, places: [link || cells[0], ...cells.slice(1)] };
    };
    const title = ({ at, column }, sort, on) => {
      const button = make("button", { type: "button" },
        make("span", { textContent: column.title }), make("small", { textContent: column.unit }));
      button.addEventListener("click", () => on.sort(column.key));
      const cell = make("th", { className: column.numeric ? "" : "words" }, button);
      cell.dataset.at = at;
      if (sort.replace(/^-/, "") === column.key) {
        cell.setAttribute("aria-sort", sort.startsWith("-") ? "ascending" : "descending");
      }
      return cell;
    };
    // Leaves out columns until the table fits, those with the highest priority first.
    const fit = () => {
      const every = [...node.querySelectorAll("[data-at]")];
      for (const cell of every) cell.hidden = false;
      const columns = shown.filter(({ column }) => column.priority)
        .sort((one, other) => other.column.priority - one.column.priority);
      while (columns.length && node.offsetWidth > node.parentElement.clientWidth) {
        const { at } = columns.shift();
        for (const cell of every) if (Number(cell.dataset.at) === at) cell.hidden = true;
      }
    };

    return (table, rows, sort, on) => {
      const known = table.columns.map((column, at) => ({ at, column })).filter(({ at, column }) =>
        !column.priority || table.rows.some((row) => !["", MISSING].includes(row.cells[at][0])));
      const wanted = JSON.stringify([table.name, sort, known]);
      const isNew = shape !== wanted;
      if (isNew) {
        [shape, shown] = [wanted, known];
        for (const { body } of bodies.values()) body.remove();
        bodies.clear();
        node.tHead.rows[0].replaceChildren(make("th", { className: "pick" }),
          ...shown.map((each) => title(each, sort, on)));
      }
      const focused = rows.find(({ key }) => bodies.get(key)?.link === document.activeElement);
      const keys = new Set(rows.map(({ key }) => key));
      for (const [key, { body }] of bodies) {
        if (keys.has(key)) continue;
        body.remove();
        bodies.delete(key);
      }
      let next = node.tHead.nextElementSibling;
      for (const row of rows) {
        if (!bodies.has(row.key)) bodies.set(row.key, bodyOf(row, on));
        const { body, pick, why, places } = bodies.get(row.key);
        shown.forEach(({ at }, index) => put(places[index], ...row.cells[at].slice(0, 2)));
        put(why, row.reason, row.tone);
        why.parentElement.hidden = !row.reason;
        pick.checked = on.isChosen(row.key);
        if (body === next) next = next.nextElementSibling;
        else node.insertBefore(body, next);
      }
      if (focused) bodies.get(focused.key).link.focus({ preventScroll: true });
      const room = node.parentElement.clientWidth;
      if (isNew || room !== width || node.offsetWidth > room) fit();
      width = room;
    };
  };

  return { filtered, sorted, drawer };
})();
