"use strict";
// Shows the document of a run. The fragment of the address contains the view with its filter and
// sorting, so that a reload and a bookmark keep them.
(() => {
  const byId = (id) => document.getElementById(id);
  const show = (id, isShown) => { byId(id).hidden = !isShown; };
  // Replaces the children of a node only if its data has changed: an opened or focused child stays.
  const redraw = (node, data, makeChildren) => {
    const text = JSON.stringify(data);
    if (node.dataset.shown === text) return;
    node.dataset.shown = text;
    node.replaceChildren(...makeChildren());
  };
  const COURSE_EVERY_MS = 5000, EVENTS_MOST = 300;
  const TABLES = ["slots", "cards", "jobs"];
  const source = openSource(), draw = tables.drawer(byId("table"));

  // ---- The view.

  const DEFAULTS = { view: "slots", sort: "", filter: "", slot: "", last_s: "" };
  let state = { ...DEFAULTS }, run = null, shownHash = "";
  let chosen = new Set(), rows = [];
  const address = (changes) => {
    const next = Object.entries({ ...state, ...changes });
    return `#${new URLSearchParams(next.filter(([key, value]) => value !== DEFAULTS[key]))}`;
  };
  const go = (changes) => { location.hash = address(changes); readAddress(); };
  const apply = (changes) => { location.replace(address(changes)); readAddress(); };
  const goTo = (view) => go({ view, slot: "", sort: "", filter: "" });

  const readAddress = () => {
    shownHash = location.hash;
    const before = state, asked = new URLSearchParams(shownHash.slice(1));
    state = { ...DEFAULTS };
    for (const key of Object.keys(DEFAULTS)) if (asked.has(key)) state[key] = asked.get(key);
    if (["view", "filter"].some((key) => before[key] !== state[key])) chosen = new Set();
    show("view-table", TABLES.includes(state.view));
    for (const view of ["slot", "events"]) show(`view-${view}`, state.view === view);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      link.href = address({ view: link.dataset.view, slot: "", sort: "", filter: "" });
    }
    if (document.activeElement !== byId("filter")) byId("filter").value = state.filter;
    byId("back").href = address({ view: "slots", slot: "" });
    for (const button of byId("ranges").children) {
      button.setAttribute("aria-pressed", button.dataset.last === state.last_s);
    }
    for (const id of ["problem", "said"]) show(id, false);
    drawAll();
    drawCourse(true);
  };

  const on = {
    document: (next) => {
      const isFirst = !run;
      run = next;
      show("offline", false);
      show("problem", false);
      drawAll();
      drawCourse(isFirst);
    },
    problem: (text) => {
      put(byId("problem"), text);
      show("problem", true);
      show("offline", false);
    },
    offline: () => show("offline", true),
  };

  // ---- Drawing.

  const drawAll = () => {
    if (!run) return;
    drawHead();
    if (TABLES.includes(state.view)) drawTable();
    if (state.view === "events") drawEvents(byId("events"), run.events);
    drawCommands();
  };

  const drawHead = () => {
    const { head } = run;
    show("head", true);
    document.title = `${head.mark[0]} · ${head.run}`;
    put(byId("mark"), ...head.mark);
    for (const id of ["run", "mode"]) put(byId(id), head[id]);
    show("jobs-link", Boolean(run.tables.jobs));
    redraw(byId("headline"), head.headline, () => head.headline.map(
      ([text, tone]) => put(/^\d+ [A-Z]+$/.test(text)
        ? make("a", { href: address({ ...DEFAULTS, filter: text.split(" ")[1] }) })
        : make("span"), text, tone)));
    const words = (textContent) => make("span", { textContent });
    redraw(byId("sums"), head.sums, () => head.sums.map(words));
    redraw(byId("alerts"), run.alerts.map(({ since_unix_s, ...alert }) => alert), () =>
      run.alerts.map((alert) => make("li", {}, make("details", {},
        put(make("summary", { className: "chip" }), alert.text, alert.tone),
        make("p", { textContent: alert.what_to_do })))));
    const line = (textContent) => make("li", { textContent });
    redraw(byId("notices"), head.notices, () => head.notices.map(line));
    redraw(byId("missed"), head.missed, () => head.missed.map(line));
  };

  const hrefs = {
    slots: (slot) => address({ view: "slot", slot }),
    jobs: (slot) => address({ view: "slot", slot }),
  };
  const drawTable = () => {
    const table = run.tables[state.view];
    if (!table) return put(byId("count"), "nothing to show");
    rows = tables.sorted(table, tables.filtered(table, state.filter), state.sort);
    chosen = new Set([...chosen].filter((key) => rows.some((row) => row.key === key)));
    draw(table, rows, state.sort, {
      href: (key) => hrefs[state.view]?.(key),
      sort: sortBy,
      isChosen: (key) => chosen.has(key),
      choose: (key, isChosen) => {
        if (isChosen) chosen.add(key);
        else chosen.delete(key);
        drawCommands();
      },
    });
    put(byId("count"), `${rows.length} of ${table.rows.length}`);
  };
  const sortBy = (key) => apply({ sort: { [key]: `-${key}`, [`-${key}`]: "" }[state.sort] ?? key });

  const drawEvents = (node, events) => {
    const newest = [...events].reverse().slice(0, EVENTS_MOST);
    redraw(node, newest.map(({ number }) => number), () => newest.map((event) => make("tr", {},
      make("td", { textContent: event.time, className: "quiet" }),
      make("td", {}, event.slot
        ? make("a", { href: hrefs.slots(event.slot), textContent: event.slot }) : ""),
      put(make("td"), event.words, event.tone),
      make("td", { textContent: event.text, className: "text" }))));
  };

  // Courses change slowly, and the server needs longer for one than for a document.
  let drawnAt = 0, drawing = 0, every = COURSE_EVERY_MS;
  const drawCourse = async (isNow) => {
    if (!run || (!isNow && performance.now() - drawnAt < every)) return;
    drawnAt = performance.now();
    const mine = ++drawing, { view, slot, last_s: last } = state;
    const queries = {
      slots: { last_s: last || 600 }, slot: { slot, ...(last ? { last_s: last } : {}) },
    };
    show("overview", view === "slots");
    if (!(view in queries)) return;
    const course = await source.history(queries[view]).catch((error) => {
      // Without a status the server is gone, which the stream reports.
      if (error.status) on.problem(error.message);
    });
    // A course of many hours takes longer: keep the server busy at most 5 % of the time.
    every = Math.max(COURSE_EVERY_MS, 20 * (performance.now() - drawnAt));
    if (!course || mine !== drawing) return;
    if (view === "slot") drawSlot(slot, course);
    else charts.draw(byId("overview"), course, { most: 2 });
  };
  const drawSlot = (slot, course) => {
    const table = ["slots", "jobs"].map((name) => run.tables[name])
      .find((each) => each?.rows.some(({ key }) => key === slot));
    const row = table?.rows.find(({ key }) => key === slot);
    put(byId("slot"), slot);
    put(byId("slot-reason"), row?.reason || "", row?.tone);
    const facts = (row?.cells || []).map((cell, at) => [table.columns[at], cell])
      .filter(([, [text]]) => text !== "–");
    redraw(byId("facts"), facts, () => facts.map(([{ title, unit }, [text, tone]]) =>
      make("div", {}, make("dt", { textContent: `${title} ${unit}`.trim() }),
        put(make("dd"), text, tone))));
    drawEvents(byId("slot-events"), course.events);
    for (const name of ["printed", "traceback"]) {
      show(`${name}-box`, Boolean(course[name]));
      put(byId(name), course[name]);
    }
    charts.draw(byId("charts"), course, { isFirstLarge: true });
  };

  // ---- Commands: a dialog lists the targets of each command and asks before it is sent.

  const ofJobs = () => state.view === "jobs";
  const targets = () => (state.view === "slot" ? [state.slot]
    : ["slots", "jobs"].includes(state.view) ? [...chosen] : []);
  const drawCommands = () => {
    const canControl = Boolean(run?.control) && ["slots", "jobs", "slot"].includes(state.view);
    document.body.classList.toggle("control", canControl);
    show("slot-words", !ofJobs());
    show("job-words", ofJobs());
    show("commands", canControl && targets().length > 0);
    put(byId("chosen"), targets().join(" "));
  };
  byId("commands").addEventListener("click", ({ target }) => {
    const action = target.dataset.do, names = targets();
    if (!action || !names.length) return;
    put(byId("ask-title"), target.textContent);
    byId("ask-names").replaceChildren(...names.map((name) => make("li", { textContent: name })));
    show("ask-amount", action === "cap");
    byId("ask-yes").onclick = async () => {
      byId("ask").close();
      const amount = action === "cap" ? { amount: byId("amount").value } : {};
      const sent = source.command({ do: action, names, ...amount });
      const answer = await sent.catch((error) => ({ effect: error.message }));
      put(byId("said"), answer.effect);
      show("said", true);
    };
    byId("ask").showModal();
  });

  // ---- Input: forms, buttons and keys.

  byId("filter-form").addEventListener("submit", (event) => event.preventDefault());
  let typing = 0;
  byId("filter").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => apply({ filter: byId("filter").value }), 200);
  });
  byId("ranges").addEventListener("click", ({ target: { dataset } }) => {
    if ("last" in dataset) apply({ last_s: dataset.last });
  });
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  byId("ask-no").addEventListener("click", () => byId("ask").close());

  const step = (by) => {
    const links = [...document.querySelectorAll("#table tbody a")];
    const at = links.indexOf(document.activeElement), last = links.length - 1;
    links[at < 0 ? (by > 0 ? 0 : last) : Math.min(last, Math.max(0, at + by))]?.focus();
  };
  const sortNext = (by) => {
    const names = ["", ...(run.tables[state.view]?.columns || []).map(({ key }) => key)];
    const at = names.indexOf(state.sort.replace(/^-/, ""));
    apply({ sort: names[(at + by + names.length) % names.length] });
  };
  const KEYS = {
    "/": () => byId("filter").focus(), "?": () => byId("help").showModal(),
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    "<": () => sortNext(-1), ">": () => sortNext(1),
    ",": () => sortNext(-1), ".": () => sortNext(1),
    r: () => apply({ sort: state.sort.startsWith("-") ? state.sort.slice(1) : `-${state.sort}` }),
    0: () => apply({ sort: "" }),
    s: () => goTo("slots"), d: () => goTo("cards"), e: () => goTo("events"), J: () => goTo("jobs"),
    Escape: () => (state.view === "slots" ? apply({ filter: "" }) : goTo("slots")),
  };
  document.addEventListener("keydown", (event) => {
    const isTyped = event.target.matches("input:not([type=checkbox])");
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (document.querySelector("dialog[open]")) return;
    if (isTyped && event.key === "Escape") event.target.blur();
    if (isTyped || !KEYS[event.key] || (!run && event.key !== "?")) return;
    if (byId("view-table").hidden && ["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  window.addEventListener("hashchange", () => { if (location.hash !== shownHash) readAddress(); });
  window.addEventListener("resize", () => { drawAll(); drawCourse(true); });
  readAddress();
  source.follow(on);
})();
