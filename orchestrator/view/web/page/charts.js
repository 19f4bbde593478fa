"use strict";
// Draws courses with uPlot: each chart has lines, and a band from the least to the most. States are
// a coloured strip at the bottom of each chart over time, other events marks at its top. Jobs on
// cards are bars below. All charts over time show the same time.
const charts = (() => {
  const PALETTE = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8a00", "#7d8590",
  ];
  const FORMS = [
    [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  ];
  const styles = getComputedStyle(document.documentElement);
  const colour = (name) => styles.getPropertyValue(`--${name}`).trim();
  const toneColour = (tone) => colour(["", "plain"].includes(tone) ? "quiet" : tone);

  const strip = (held) => (plot) => {
    const { course } = held;
    const { ctx, bbox } = plot, high = 5 * devicePixelRatio, end = bbox.left + bbox.width;
    const x = (at) => Math.min(end, Math.max(bbox.left, plot.valToPos(at, "x", true)));
    for (const { from, to, state } of course.spans || []) {
      ctx.fillStyle = toneColour(state[1]);
      ctx.fillRect(x(from), bbox.top + bbox.height - high, x(to) - x(from), high);
    }
    for (const { event, at_unix_s: at, tone } of course.events || []) {
      if (event === "state" || !(course.from <= at && at <= course.to)) continue;
      ctx.fillStyle = toneColour(tone);
      ctx.fillRect(x(at), bbox.top, devicePixelRatio, 2 * high);
    }
  };

  // Samples may be rarer than points of a chart: a gap is what is missing for longer than that.
  const gapFrom = (x, values) => {
    const known = x.filter((_, at) => values[at] !== null);
    const apart = known.slice(1).map((at, index) => at - known[index]);
    return 2.5 * (apart.sort((one, other) => one - other)[apart.length >> 1] || 0);
  };

  // What changes from course to course is held, so that a chart is made once.
  const options = (held, chart, offset, width, height) => {
    const axis = {
      stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 },
      ticks: { stroke: colour("rule") }, font: "12px system-ui",
    };
    const isTime = !chart.steps, isMany = chart.lines.length > 2;
    const range = () => (isTime ? [held.course.from, held.course.to]
      : [held.x[0], Math.max(held.x[0] + 1, held.x.at(-1))]);
    const gaps = (plot, _series, _first, _last, found) => found.filter(([from, to]) =>
      (to - from) / plot.bbox.width * (range()[1] - range()[0]) > held.longest);
    const lines = chart.lines.map(([label], at) => ({
      label, gaps, width: 1.5, dash: at && !isMany ? [6, 4] : [],
      stroke: isMany ? PALETTE[at % PALETTE.length] : colour(at ? "warn" : "line"),
      spanGaps: !isTime,
    }));
    const edges = (chart.band ? ["max", "min"] : []).map((label) => (
      { label, gaps, width: 0, points: { show: false } }));
    return {
      width, height, legend: { show: height > 200 },
      cursor: isTime ? { sync: { key: "time" } } : {},
      // In the time of the server, as all other texts.
      tzDate: (at) => uPlot.tzDate(new Date((at + offset) * 1000), "Etc/UTC"),
      scales: { x: { time: isTime, range } },
      axes: [
        { ...axis, space: 80, ...(isTime ? { values: FORMS } : {}) },
        { ...axis, size: 64, space: height < 150 ? 20 : 30 },
      ],
      hooks: { drawAxes: isTime ? [strip(held)] : [] },
      series: [isTime ? { value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" } : { label: "step" },
        ...lines, ...edges],
      bands: chart.band
        ? [{ series: [lines.length + 1, lines.length + 2], fill: `${colour("line")}33` }] : [],
    };
  };

  // Jobs that are on a card at once have lanes of their own.
  const bars = (course, now) => {
    const last = Math.max(course.to, now), long = last - course.from || 1, lanes = [];
    const names = [...new Set(course.bars.map(({ job }) => job))];
    const inOrder = [...course.bars].sort((one, other) => one.from - other.from);
    for (const { card, job, from, to } of inOrder) {
      let lane = lanes.find((each) => each.card === card && each.to <= from);
      if (!lane) {
        lane = { card, node: make("div", { className: "lane" }) };
        lanes.push(lane);
      }
      lane.to = to ?? last;
      const bar = make("span", { textContent: job, title: job });
      bar.style.left = `${100 * (from - course.from) / long}%`;
      bar.style.width = `${100 * (lane.to - from) / long}%`;
      bar.style.borderColor = PALETTE[names.indexOf(job) % PALETTE.length];
      lane.node.append(bar);
    }
    lanes.sort((one, other) => one.card.localeCompare(other.card));
    return lanes.map(({ card, node }) => make("div", { className: "lanes" },
      make("span", { textContent: card }), node));
  };

  // Draws at most so many charts of a course into a node: the first one larger, if told so.
  const draw = (node, course, head, { most = 99, isFirstLarge = false } = {}) => {
    const shown = course.charts.slice(0, most);
    const drawn = shown.map(({ label, lines, band }) => [label, lines.map(([to]) => to), !band]);
    const shape = JSON.stringify([node.clientWidth, colour("text"), drawn]);
    const isNew = node.shape !== shape;
    if (isNew) {
      for (const { plot } of node.charts || []) plot.destroy();
      node.classList.toggle("first", isFirstLarge);
      node.replaceChildren(...shown.map(() => make("figure", {}, make("figcaption"))));
      [node.shape, node.charts] = [shape, shown.map(() => ({}))];
    }
    shown.forEach((chart, at) => {
      const { label, average, lines, band, steps } = chart, held = node.charts[at];
      const figure = node.children[at], x = steps || course.times;
      const values = [x, ...lines.map(([, line]) => line), ...(band ? [band[1], band[0]] : [])];
      Object.assign(held, { course, x, longest: steps ? Infinity : gapFrom(x, lines[0][1]) });
      put(figure.firstChild, average ? `${label} · mean ${average}` : label);
      if (!isNew) return held.plot.setData(values);
      const height = steps || (isFirstLarge && at === 0) ? 240 : most < 99 ? 110 : 150;
      const drawn = options(held, chart, head.utc_offset_s, figure.clientWidth, height);
      held.plot = new uPlot(drawn, values, figure);
    });
    while (node.children.length > shown.length) node.lastChild.remove();
    node.append(...(course.bars ? bars(course, head.at_unix_s) : []));
  };
  return { draw };
})();
