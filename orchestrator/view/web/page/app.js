"use strict";
// Draws one run. Texts, units, rounding and colours come ready-made (page_data.py); this file puts them in their places.
// Text is only ever set as text. What is looked at is in the fragment of the address, so that it survives a reload.
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (name, props = {}, ...inside) => {
    const made = Object.assign(document.createElement(name), props);
    made.append(...inside);
    return made;
  };
  // A cell is a text, or a text and a tone.
  const put = (node, cell) => {
    const [text, tone] = Array.isArray(cell) ? cell : [cell, ""];
    if (node.textContent !== text) node.textContent = text;
    if ((node.dataset.tone || "") !== tone) node.dataset.tone = tone;
    return node;
  };
  const show = (id, shown) => { byId(id).hidden = !shown; };
  const REFRESH_MS = 2000, OVERVIEW_MS = 10000, ROWS = 200, EVENTS = 300, VIEWS = ["table", "slot", "cards", "events", "jobs", "summary"];

  const source = openSource();
  show("summary-link", Boolean(source.summary));
  if (source.hint) byId("filter").placeholder = source.hint;

  // ---- What is looked at.

  const usual = { run: "", view: "table", sort: "", filter: "", offset: "0", slot: "", field: "", range: "" };
  let state = { ...usual }, table = null, stop = () => {}, followed = "", chosen = new Set(), looked = "", jobs = null, chosenJobs = new Set();
  const address = (changes) => {
    const next = { ...state, ...changes };
    return `#${new URLSearchParams(Object.entries(next).filter(([key, value]) => key in usual && value !== usual[key]))}`;
  };
  const go = (changes) => { location.hash = address(changes); look(); };
  const turn = (changes) => { location.replace(address(changes)); look(); };

  const look = () => {
    const told = new URLSearchParams(location.hash.slice(1));
    if (told.has("code")) return login(told.get("code"));
    looked = location.hash;
    const before = state;
    state = { ...usual, ...Object.fromEntries(told) };
    if (before.filter !== state.filter) chosen = new Set();
    for (const view of VIEWS) show(`view-${view}`, view === state.view);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    show("login", false);
    show("problem", false);
    if (document.activeElement !== byId("filter")) byId("filter").value = state.filter;
    byId("back").href = address({ view: "table", slot: "" });
    if (before.run !== state.run) [table, chosen, jobs, chosenJobs] = [null, new Set(), null, new Set()];
    source.choose?.(state.run);
    const query = { sort: state.sort, filter: state.filter, offset: state.offset, limit: state.view === "table" ? ROWS : 0 };
    const wanted = JSON.stringify([state.run, query]);
    if (followed !== wanted) {
      followed = wanted;
      stop();
      stop = source.table(query, on);
    } else if (table) drawTable();
    refresh(true);
  };

  const on = {
    table: (told) => {
      table = told;
      for (const id of ["offline", "problem", "login"]) show(id, false);
      drawHead();
      drawTable();
      refresh(false);
    },
    events: (told) => { if (state.view === "events") drawEvents(byId("events"), told, EVENTS); },
    problem: (text) => { byId("problem").textContent = text; show("problem", true); },
    offline: () => show("offline", true),
    login: () => {
      followed = "";
      for (const view of VIEWS) show(`view-${view}`, false);
      show("head", false);
      show("login", true);
      byId("code").focus();
    },
  };

  const login = async (code) => {
    history.replaceState(null, "", location.pathname);
    try {
      await source.login(code.split("code=").pop().trim());
      followed = "";
      look();
    } catch (error) {
      // A code that was used already may belong to a browser that is logged in.
      look();
      if (code === byId("code").value) on.problem(error.message);
    }
  };

  // ---- Drawing.

  // Runs are listed when the page opens, and again when the list is about to be chosen from.
  const listRuns = async () => {
    const runs = await source.runs?.().catch(() => []) || [], here = table?.head.run;
    byId("chooser").replaceChildren(...runs.slice(0, 100).map((run) => make("option", {
      value: run.run_id, selected: run.run_id === here,
      textContent: `${run.run_id} · ${run.outcome}${run.workers ? ` · ${run.workers} workers` : ""}`,
    })));
    show("chooser", runs.length > 1);
  };
  let listed = "";
  const drawHead = () => {
    const head = table.head, summary = byId("summary");
    show("head", true);
    if (listed !== head.run) { listed = head.run; listRuns(); }
    document.title = `${head.mark[0]} · ${head.run}`;
    for (const id of ["run", "mark", "mode", "time", "left"]) put(byId(id), head[id]);
    byId("share").value = head.share;
    byId("jobs-line").textContent = `jobs: ${head.jobs}`;
    for (const id of ["jobs-line", "jobs-link"]) show(id, Boolean(head.jobs));
    const chips = head.states.map(([word, tone, count]) => put(make("a", { href: address({ ...usual, filter: `state:${word}` }), className: "chip" }), [`${count} ${word}`, tone]));
    const words = [head.nodes, head.tflops, ...head.totals].map((cell) => put(make("span"), cell));
    const [nodes, ...others] = words;
    if (summary.dataset.told !== JSON.stringify([head.states, head.nodes, head.tflops, head.totals])) {
      summary.dataset.told = JSON.stringify([head.states, head.nodes, head.tflops, head.totals]);
      summary.replaceChildren(nodes, ...chips, ...others);
    }
    const alerts = byId("alerts"), told = JSON.stringify(head.alerts);
    if (alerts.dataset.told !== told) {
      alerts.dataset.told = told;
      alerts.replaceChildren(...head.alerts.map((alert) => make("li", {}, make("details", {},
        put(make("summary", { className: "chip" }), alert.words),
        ...[...(alert.subjects.length > 1 ? [alert.subjects.join(", ")] : []), alert.what_to_do].map((text) => make("p", { textContent: text }))))));
    }
    byId("notices").replaceChildren(...head.notices.map((text) => make("li", { textContent: text })));
    drawCommands();
  };

  const lines = new Map();
  const newLine = (slot, columns) => {
    const cells = columns.map((column) => make(column.name === "slot" ? "th" : "td", { className: `${column.words ? "words" : ""} w-${column.width}` }));
    const link = make("a", { href: address({ view: "slot", slot }) });
    const pick = make("input", { type: "checkbox" });
    pick.setAttribute("aria-label", slot);
    pick.addEventListener("change", () => { pick.checked ? chosen.add(slot) : chosen.delete(slot); drawCommands(); });
    const at = columns.findIndex((column) => column.name === "slot");
    cells[at].scope = "row";
    cells[at].append(link);
    const why = make("td", { colSpan: columns.length + 1 });
    const body = make("tbody", {}, make("tr", {}, make("td", { className: "pick" }, pick), ...cells), make("tr", { className: "why" }, why));
    const places = [...cells];
    places[at] = link;
    return { body, link, pick, places, why };
  };
  const drawTable = () => {
    if (state.view !== "table" || !table) return;
    const { columns, order } = table, shape = JSON.stringify([columns, state.sort]);
    if (byId("titles").dataset.shape !== shape) {
      byId("titles").dataset.shape = shape;
      for (const line of lines.values()) line.body.remove();
      lines.clear();
      byId("titles").replaceChildren(make("th", { className: "pick" }), ...columns.map(title));
    }
    const focused = [...lines.entries()].find(([, line]) => line.link === document.activeElement)?.[0];
    const wanted = new Set(order);
    for (const [slot, line] of lines) if (!wanted.has(slot)) { line.body.remove(); lines.delete(slot); chosen.delete(slot); }
    for (const slot of table.rows.keys()) if (!wanted.has(slot)) table.rows.delete(slot);
    let at = byId("table").tHead.nextElementSibling;
    for (const slot of order) {
      if (!lines.has(slot)) lines.set(slot, newLine(slot, columns));
      const line = lines.get(slot), cells = table.rows.get(slot), reason = cells[cells.length - 1];
      cells.forEach((cell, index) => put(line.places[index], cell));
      put(line.why, reason);
      line.body.classList.toggle("loud", Array.isArray(reason));
      line.pick.checked = chosen.has(slot);
      if (line.body === at) at = at.nextElementSibling;
      else byId("table").insertBefore(line.body, at);
    }
    if (focused && lines.has(focused)) lines.get(focused).link.focus({ preventScroll: true });
    const begin = Number(state.offset);
    byId("count").textContent = `${order.length ? begin + 1 : 0}–${begin + order.length} / ${table.matched} (${table.total})`;
    show("pages", table.matched > ROWS);
    byId("earlier").disabled = begin === 0;
    byId("later").disabled = begin + order.length >= table.matched;
  };
  const title = (column) => {
    const is = state.sort.replace(/^-/, "") === column.name, cell = make("th", { className: `${column.words ? "words" : ""} w-${column.width}` });
    const button = make("button", { type: "button" }, make("span", { textContent: column.title[0] }), make("small", { textContent: column.title[1] }));
    if (is) cell.setAttribute("aria-sort", state.sort.startsWith("-") ? "ascending" : "descending");
    button.addEventListener("click", () => sortBy(column.name));
    cell.append(button);
    return cell;
  };
  const sortBy = (name) => turn({ offset: "0", sort: { [name]: `-${name}`, [`-${name}`]: "" }[state.sort] ?? name });

  let drawnAt = 0, drawing = 0;
  const refresh = async (now) => {
    const every = state.view === "table" ? OVERVIEW_MS : REFRESH_MS;
    if (!now && performance.now() - drawnAt < every) return;
    drawnAt = performance.now();
    const mine = ++drawing, { view, slot } = state;
    try {
      const told = await { table: source.overview, slot: () => source.slot(slot), cards: source.cards, events: source.events, jobs: source.jobs, summary: source.summary }[view]?.();
      if (mine !== drawing || !told) return;
      if (view === "table" && told.charts.length) charts.draw(byId("overview"), told.charts.slice(0, 2), told, [told.from, told.to]);
      if (view === "cards") drawGrid(byId("cards"), told.titles, told.rows);
      if (view === "events" && now) { byId("events").replaceChildren(); drawEvents(byId("events"), told, EVENTS); }
      if (view === "summary") drawSummary(told);
      if (view === "jobs") drawJobs(told);
      if (view === "slot") await drawSlot(told, () => mine === drawing);
    } catch (error) {
      if (error.status === 401) on.login(); else if (error.status) on.problem(error.message); else throw error;
    }
  };
  const drawGrid = (node, titles, rows) => node.replaceChildren(
    make("thead", {}, make("tr", {}, ...titles.map((text) => make("th", { textContent: text })))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => put(make("td"), cell))))));
  const drawJobs = (told) => {
    const node = byId("jobs"), shape = JSON.stringify(told), names = told.rows.map(([name]) => name);
    chosenJobs = new Set([...chosenJobs].filter((name) => names.includes(name)));
    if (node.dataset.told !== shape) {
      node.dataset.told = shape;
      const focused = document.activeElement.getAttribute("aria-label");
      drawGrid(node, told.titles, told.rows.map(([, cells]) => cells));
      if (told.control) [...node.rows].forEach((row, at) => {
        if (!at) return row.prepend(make("th", { className: "pick" }));
        const name = names[at - 1], pick = make("input", { type: "checkbox", checked: chosenJobs.has(name) });
        pick.setAttribute("aria-label", name);
        pick.addEventListener("change", () => { pick.checked ? chosenJobs.add(name) : chosenJobs.delete(name); drawCommands(); });
        row.prepend(make("td", { className: "pick" }, pick));
        if (name === focused) pick.focus({ preventScroll: true });
      });
      byId("job-charts").replaceChildren(...(told.charts || []).map(([label, src]) => make("figure", {}, make("figcaption", { textContent: label }), make("img", { src, alt: label }))));
    }
    jobs = told;
    drawCommands();
  };
  const drawEvents = (node, told, most) => {
    for (const event of told) {
      const last = Number(node.firstElementChild?.dataset.number || 0);
      if (event.number <= last) continue;
      const link = event.slot ? make("a", { href: address({ view: "slot", slot: event.slot }), textContent: event.slot }) : "";
      const line = make("tr", {}, make("td", { textContent: event.time, className: "quiet" }), make("td", {}, link), put(make("td"), [event.words, event.tone]), make("td", { textContent: event.text, className: "text" }));
      line.dataset.number = event.number;
      node.prepend(line);
    }
    while (node.childElementCount > most) node.lastElementChild.remove();
  };

  const drawSlot = async (told, isStill) => {
    byId("slot").textContent = told.slot;
    put(byId("slot-state"), told.state);
    byId("slot-reason").textContent = told.reason;
    byId("facts").replaceChildren(...told.facts.map(([label, cell]) => make("div", {}, make("dt", { textContent: label }), put(make("dd"), cell))));
    byId("spans").replaceChildren(...told.spans.slice(-20).reverse().map((span) => make("tr", {}, make("td", { textContent: span.time, className: "quiet" }), put(make("td"), span.state), make("td", { textContent: span.lasted }), make("td", { textContent: span.cause, className: "text" }))));
    byId("slot-events").replaceChildren();
    drawEvents(byId("slot-events"), told.events.slice(-50), 50);
    show("output", Boolean(told.printed));
    byId("printed").textContent = told.printed;
    show("error", Boolean(told.traceback));
    byId("traceback").textContent = told.traceback || "";
    const field = state.field || told.charts[0] || told.fields[0]?.[0];
    if (byId("field").childElementCount !== told.fields.length) byId("field").replaceChildren(...told.fields.map(([key, label]) => make("option", { value: key, textContent: label })));
    byId("field").value = field;
    for (const button of byId("ranges").children) button.setAttribute("aria-pressed", button.dataset.range === state.range);
    if (!told.sampled) return byId("charts").replaceChildren();
    const [first, last] = told.sampled, from = state.range ? Math.max(first, last - Number(state.range)) : first;
    const fields = [field, ...told.charts.filter((key) => key !== field)].slice(0, source.charts);
    const found = await Promise.all(fields.map((key) => source.history(told.slot, key, from, Math.max(last, from + 1))));
    if (isStill()) charts.draw(byId("charts"), found.filter(Boolean), told, [from, Math.max(last, from + 1)]);
  };
  const drawSummary = (told) => {
    byId("missed").replaceChildren(...told.missed.map((text) => make("li", { textContent: text })));
    drawGrid(byId("figures"), told.figures.titles, told.figures.rows);
    charts.draw(byId("run-charts"), told.charts, told, [told.from, told.to]);
  };
  // ---- Commands: each names its slots, and asks before it is sent.

  const targets = () => (state.view === "jobs" ? [...chosenJobs] : state.view === "slot" ? [state.slot] : state.view === "table" ? [...chosen].filter((slot) => lines.has(slot)) : []);
  const drawCommands = () => {
    const ofJobs = state.view === "jobs", control = Boolean(ofJobs ? jobs?.control : table?.head.control);
    show("slot-words", !ofJobs);
    show("job-words", ofJobs);
    document.body.classList.toggle("control", control);
    show("commands", control && targets().length > 0);
    byId("chosen").textContent = targets().join(" ");
  };
  byId("commands").addEventListener("click", (event) => {
    const action = event.target.dataset.do, slots = targets();
    if (!action || !slots.length) return;
    byId("ask-title").textContent = event.target.textContent;
    byId("ask-slots").replaceChildren(...slots.map((slot) => make("li", { textContent: slot })));
    show("ask-amount", action === "cap");
    byId("ask-yes").onclick = async () => {
      byId("ask").close();
      const amount = action === "cap" ? { amount: byId("amount").value } : {};
      const told = await source.command({ do: action, [state.view === "jobs" ? "jobs" : "slots"]: slots, ...amount }).catch((error) => ({ effect: error.message }));
      byId("said").textContent = told.effect;
      show("said", true);
    };
    byId("ask").showModal();
  });

  // ---- Hands: forms, buttons and keys.

  byId("login-form").addEventListener("submit", (event) => { event.preventDefault(); login(byId("code").value); });
  byId("filter-form").addEventListener("submit", (event) => event.preventDefault());
  let typing = 0;
  byId("filter").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => turn({ filter: byId("filter").value, offset: "0" }), 200);
  });
  byId("chooser").addEventListener("change", () => go({ ...usual, run: byId("chooser").value }));
  byId("chooser").addEventListener("focus", listRuns);
  byId("earlier").addEventListener("click", () => go({ offset: String(Math.max(0, Number(state.offset) - ROWS)) }));
  byId("later").addEventListener("click", () => go({ offset: String(Number(state.offset) + ROWS) }));
  byId("field").addEventListener("change", () => turn({ field: byId("field").value }));
  byId("ranges").addEventListener("click", (event) => { if ("range" in event.target.dataset) turn({ range: event.target.dataset.range }); });
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  byId("ask-no").addEventListener("click", () => byId("ask").close());

  const step = (by) => {
    const links = [...document.querySelectorAll("#table tbody th a")];
    const at = links.indexOf(document.activeElement);
    links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
  };
  const sortNext = (by) => {
    const names = ["", ...table.columns.map((column) => column.name)], at = names.indexOf(state.sort.replace(/^-/, ""));
    turn({ sort: names[(at + by + names.length) % names.length], offset: "0" });
  };
  const keys = {
    "/": () => byId("filter").focus(), "?": () => byId("help").showModal(),
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    "<": () => sortNext(-1), ">": () => sortNext(1), ",": () => sortNext(-1), ".": () => sortNext(1),
    r: () => turn({ sort: state.sort.startsWith("-") ? state.sort.slice(1) : `-${state.sort}` }),
    0: () => turn({ sort: "", offset: "0" }), s: () => go({ view: "table", slot: "" }),
    d: () => go({ view: "cards", slot: "" }), e: () => go({ view: "events", slot: "" }), J: () => { if (table.head.jobs) go({ view: "jobs", slot: "" }); },
    Escape: () => (state.view === "table" ? turn({ filter: "", offset: "0" }) : go({ view: "table", slot: "" })),
  };
  document.addEventListener("keydown", (event) => {
    const typed = event.target.matches("input:not([type=checkbox]), select");
    if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
    if (typed && event.key === "Escape") { event.target.blur(); return; }
    if (typed || !keys[event.key] || (!table && event.key !== "?")) return;
    if (state.view !== "table" && ["ArrowUp", "ArrowDown", "j", "k"].includes(event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("hashchange", () => { if (location.hash !== looked) look(); });
  window.addEventListener("resize", () => refresh(true));
  look();
})();
