"use strict";
// Where the data comes from: a server that goes on telling, or, in a file, what is frozen in it. Both give the same object:
// table(query, on) follows a view until the function that it returns is called; slot, history, events and cards are asked.
// charts is how many are drawn of a slot. Only a file has a summary.
const openSource = () => {
  const RETRY_MS = 1000;

  const live = () => {
    let run = "";
    const ask = async (path, options) => {
      const answer = await fetch(path, options);
      const told = await answer.json();
      if (!answer.ok) throw Object.assign(new Error(told.error), { status: answer.status });
      return told;
    };
    const asked = (query) => new URLSearchParams(run ? { ...query, run } : query);
    const get = (path, query = {}) => ask(`api/v1/${path}?${asked(query)}`);
    const post = (path, body) => ask(`api/v1/${path}`, { method: "POST", body: JSON.stringify(body) });
    const table = (query, on) => {
      let stream = null, timer = 0, known = null, over = false;
      const close = () => { clearTimeout(timer); stream?.close(); stream = null; };
      const open = () => {
        close();
        if (over || document.hidden) return;
        stream = new EventSource(`api/v1/stream?${asked(query)}`);
        stream.addEventListener("table", (event) => { known = merged(known, JSON.parse(event.data)); on.table(known); });
        stream.addEventListener("event", (event) => on.events(JSON.parse(event.data).events));
        stream.addEventListener("gone", (event) => on.problem(JSON.parse(event.data).error));
        stream.onerror = async () => {
          close();
          let failure = null;
          await get("table", { ...query, limit: 0 }).catch((error) => { failure = error; });
          if (over) return;
          if (failure?.status === 401) return on.login();
          if (failure?.status) on.problem(failure.message); else if (failure) on.offline();
          if (failure?.status !== 400) timer = setTimeout(open, RETRY_MS);
        };
      };
      document.addEventListener("visibilitychange", open);
      open();
      return () => { over = true; close(); document.removeEventListener("visibilitychange", open); };
    };
    return {
      charts: 4,
      table,
      slot: (name) => get("slot", { name }),
      history: (slot, field, from, to) => get("history", { slot, field, from, to, buckets: 300 }),
      events: async () => (await get("events", { limit: 300 })).events,
      cards: async () => (await get("run")).cards,
      overview: () => get("overview"),
      jobs: () => get("jobs"),
      choose: (name) => { run = name; },
      runs: async () => (await ask("api/v1/runs")).runs,
      login: (code) => post("login", { code }),
      command: (told) => post(`${told.jobs ? "words" : "commands"}${run ? `?${asked({})}` : ""}`, { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), ...told }),
    };
  };

  const merged = (known, told) => {
    if (told.all) {
      const rows = new Map(told.all.rows.map((row) => [row.slot, [...row.cells]]));
      return { ...told.all, rows, order: [...rows.keys()] };
    }
    for (const [slot, cells] of Object.entries(told.rows || {})) {
      const line = known.rows.get(slot) || [];
      for (const at of Object.keys(cells)) line[at] = cells[at];
      known.rows.set(slot, line);
    }
    const { rows, all, head, ...others } = told;
    return { ...known, ...others, head: { ...known.head, ...head } };
  };

  const frozen = (data) => {
    const text = (cell) => (Array.isArray(cell) ? cell[0] : cell).toLowerCase();
    const names = data.table.columns.map((column) => column.name);
    const matches = (row, term) => {
      const wanted = term.replace(/^!/, ""), [name, value] = wanted.split(/:(.*)/s);
      const cells = names.includes(name) && value ? [row.cells[names.indexOf(name)]] : row.cells;
      return cells.some((cell) => text(cell).includes(cells === row.cells ? wanted : value)) !== term.startsWith("!");
    };
    const table = (query, on) => {
      const terms = query.filter.toLowerCase().split(/\s+/).filter(Boolean), name = query.sort.replace(/^-/, "");
      const { rows: order, known } = data.orders[name] || { rows: [...data.table.rows.keys()], known: data.table.rows.length };
      const first = order.slice(0, known), turned = query.sort.startsWith("-") ? first.reverse() : first;
      const found = [...turned, ...order.slice(known)].map((at) => data.table.rows[at])
        .filter((row) => terms.every((term) => matches(row, term)));
      const rows = found.slice(query.offset, Number(query.offset) + query.limit);
      on.table(merged(null, { all: { ...data.table, rows, matched: found.length } }));
      return () => {};
    };
    return {
      charts: 12,
      hint: "filter, as in: state:backoff !pc1",
      table,
      slot: async (name) => {
        const drawn = data.history[name] || {}, cells = data.table.rows.find((row) => row.slot === name)?.cells || [];
        const facts = data.table.columns.slice(0, -1).map(({ title }, at) => [title.join(" ").trim(), cells[at]]);
        return data.slots[name] && {
          slot: name, ...data.every_slot, ...data.slots[name],
          facts: [...facts.filter(([, cell]) => cell !== data.missing), ...data.slots[name].more],
          charts: data.charts.filter((key) => key in drawn), fields: Object.keys(drawn).map((key) => [key, data.labels[key]]),
        };
      },
      history: async (slot, field) => {
        const drawn = data.history[slot]?.[field], [key, label] = data.beside[field] || [], beside = data.history[slot]?.[key]?.mean;
        return drawn && { t: data.times, label: data.labels[field], ...drawn, beside, beside_label: beside && label };
      },
      events: async () => data.events,
      cards: async () => data.cards,
      jobs: data.jobs && (async () => data.jobs),
      overview: data.summary && (async () => data.summary),
      summary: data.summary && (async () => data.summary),
    };
  };

  const told = document.getElementById("frozen");
  return told ? frozen(JSON.parse(told.textContent)) : live();
};
