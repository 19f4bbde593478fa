"use strict";
// Draws courses with uPlot. Each chart has lines, and a band from minimum to maximum. Events are
// marks at its top, in the colour of their tone. All charts show the same period.
const charts = (() => {
  const FORMS = [
    [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  ];
  const styles = getComputedStyle(document.documentElement);
  const colour = (name) => styles.getPropertyValue(`--${name}`).trim();
  const toneColour = (tone) => colour(["", "plain"].includes(tone) ? "quiet" : tone);

  const marks = (held) => ({ ctx, bbox, valToPos }) => {
    const { events = [], from, to } = held.course;
    for (const { at_unix_s: at, tone } of events) {
      if (!(from <= at && at <= to)) continue;
      ctx.fillStyle = toneColour(tone);
      ctx.fillRect(valToPos(at, "x", true), bbox.top, devicePixelRatio, 10 * devicePixelRatio);
    }
  };

  // Returns the shortest gap of a line, in seconds: 2.5 times the median distance of its samples.
  const gapFrom = (x, values) => {
    const known = x.filter((_, at) => values[at] !== null);
    const apart = known.slice(1).map((at, index) => at - known[index]);
    return 2.5 * (apart.sort((one, other) => one - other)[apart.length >> 1] || 0);
  };

  // `held` has what changes from course to course, so that a chart is created only once.
  const options = (held, chart, width, height) => {
    const axis = {
      stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 },
      ticks: { stroke: colour("rule") }, font: "12px system-ui",
    };
    const range = () => [held.course.from, held.course.to];
    const gaps = (plot, _series, _first, _last, found) => found.filter(([from, to]) =>
      (to - from) / plot.bbox.width * (range()[1] - range()[0]) > held.longest);
    const lines = chart.lines.map(([label], at) => ({
      label, gaps, width: 1.5, dash: at ? [6, 4] : [], stroke: colour(at ? "warn" : "line"),
    }));
    const edges = (chart.band ? ["max", "min"] : []).map((label) => (
      { label, gaps, width: 0, points: { show: false } }));
    return {
      width, height, legend: { show: height > 200 },
      cursor: { sync: { key: "time" } },
      scales: { x: { range } },
      axes: [
        { ...axis, space: 80, values: FORMS },
        { ...axis, size: 64, space: height < 150 ? 20 : 30 },
      ],
      hooks: { drawAxes: [marks(held)] },
      series: [{ value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" }, ...lines, ...edges],
      bands: chart.band
        ? [{ series: [lines.length + 1, lines.length + 2], fill: `${colour("line")}33` }] : [],
    };
  };

  // Draws the first `most` charts of a course into a node.
  const draw = (node, course, { most = 99, isFirstLarge = false } = {}) => {
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
      const { label, average, lines, band } = chart, held = node.charts[at];
      const figure = node.children[at], x = course.times;
      const values = [x, ...lines.map(([, line]) => line), ...(band ? [band[1], band[0]] : [])];
      Object.assign(held, { course, longest: gapFrom(x, lines[0][1]) });
      put(figure.firstChild, average ? `${label} · mean ${average}` : label);
      if (!isNew) return held.plot.setData(values);
      const height = isFirstLarge && at === 0 ? 240 : most < 99 ? 110 : 150;
      const drawn = options(held, chart, figure.clientWidth, height);
      held.plot = new uPlot(drawn, values, figure);
    });
  };
  return { draw };
})();
