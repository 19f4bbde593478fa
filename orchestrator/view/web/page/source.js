"use strict";
// Returns the source of the data: a server that sends the document once a second, or the data that
// a report file contains. Both have the same methods: `follow` calls back with each document, and
// `history` returns the course of a slot or of all slots.
const openSource = () => {
  const RETRY_MS = 1000;

  const ask = async (path, query, body) => {
    const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const answer = await fetch(`api/v1/${path}?${new URLSearchParams(query)}`, options);
    const data = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(data.error), { status: answer.status });
    return data;
  };

  const live = () => ({
    follow: (on) => {
      let stream = null, timer = 0;
      const close = () => {
        clearTimeout(timer);
        stream?.close();
        stream = null;
      };
      const open = () => {
        close();
        if (document.hidden) return;
        stream = new EventSource("api/v1/stream");
        const listen = (name, handle) =>
          stream.addEventListener(name, (event) => handle(JSON.parse(event.data)));
        listen("document", on.document);
        listen("problem", (problem) => on.problem(problem.error));
        stream.onerror = async () => {
          close();
          // A stream does not report why it failed; an ordinary request does.
          const failure = await ask("document", {}).then(() => null, (error) => error);
          if (failure?.status) on.problem(failure.message);
          else if (failure) on.offline();
          timer = setTimeout(open, RETRY_MS);
        };
      };
      document.addEventListener("visibilitychange", open);
      open();
    },
    history: (query) => ask("history", query),
    command: (command) => {
      const id = crypto.getRandomValues(new Uint32Array(4)).join("-");
      return ask("commands", {}, { id, ...command });
    },
  });

  // A report has the courses of the whole run: `last_s` only limits the period shown.
  const frozen = (data) => ({
    follow: (on) => on.document(data.document),
    history: async ({ slot, last_s: last }) => {
      const course = slot ? data.slots[slot] : data.all;
      if (!course) throw new Error(`this file has no course of ${slot}`);
      const from = last ? Math.max(course.from, course.to - last) : course.from;
      return { ...course, from };
    },
  });

  const embedded = document.getElementById("frozen");
  return embedded ? frozen(JSON.parse(embedded.textContent)) : live();
};
