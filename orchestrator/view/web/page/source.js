"use strict";
// Where the data come from: a server that tells the document once a second, or, in a report, what
// is frozen in the file. Both give the same object: `follow` calls back with each document, and
// `history` gives the course of a slot or of all.
const openSource = () => {
  const RETRY_MS = 1000;

  const ask = async (path, query, body) => {
    const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const answer = await fetch(`api/v1/${path}?${new URLSearchParams(query)}`, options);
    const told = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(told.error), { status: answer.status });
    return told;
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
        const heard = (name, tell) =>
          stream.addEventListener(name, (event) => tell(JSON.parse(event.data)));
        heard("document", on.document);
        heard("problem", (told) => on.problem(told.error));
        stream.onerror = async () => {
          close();
          // A stream does not say why it failed; another request does.
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
    command: (told) => {
      const id = crypto.getRandomValues(new Uint32Array(4)).join("-");
      return ask("commands", {}, { id, ...told });
    },
  });

  // A report has the courses of the whole run: `last_s` only chooses what is shown of them.
  const frozen = (data) => ({
    follow: (on) => on.document(data.document),
    history: async ({ slot, last_s: last }) => {
      const course = slot ? data.slots[slot] : data.all;
      if (!course) throw new Error(`this file has no course of ${slot}`);
      const from = last ? Math.max(course.from, course.to - last) : course.from;
      return { ...course, from };
    },
  });

  const told = document.getElementById("frozen");
  return told ? frozen(JSON.parse(told.textContent)) : live();
};
