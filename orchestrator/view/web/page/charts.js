"use strict";
// Draws the course of sampled values with uPlot: the mean as a line, from the least to the most as a band, another course
// beside it as a dashed line. The states of the slot are a coloured strip below, other events marks above. All charts show
// the same time.
const charts = (() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const strip = (plot) => {
    const { ctx, bbox } = plot, high = 5 * devicePixelRatio, end = bbox.left + bbox.width;
    for (const span of spans) {
      const [left, right] = [span.from, span.to].map((at) => Math.min(end, Math.max(bbox.left, plot.valToPos(at, "x", true))));
      ctx.fillStyle = colour(span.state[1]);
      if (right > left) ctx.fillRect(left, bbox.top + bbox.height - high, right - left, high);
    }
    for (const mark of marks.filter(({ at_unix_s: at }) => between[0] <= at && at <= between[1])) {
      ctx.fillStyle = colour(mark.tone || "quiet");
      ctx.fillRect(plot.valToPos(mark.at_unix_s, "x", true), bbox.top, devicePixelRatio, 2 * high);
    }
  };
  const times = [
    [86400, "{YYYY}-{MM}-{DD}", ...Array(5).fill(null), 1], [3600, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  ];
  // Samples may be rarer than points of the chart: only what is missing for longer than that is a gap.
  const longest = ({ t, mean }) => {
    const known = t.filter((_, at) => mean[at] !== null), apart = known.slice(1).map((at, index) => at - known[index]);
    return 2.5 * (apart.sort((one, other) => one - other)[apart.length >> 1] || 0);
  };
  const options = (width, isFirst, isOverview, beside) => {
    const axis = {
      stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule") }, font: "12px system-ui",
    };
    const gaps = (plot, series, first, last, found) => found.filter(
      ([from, to]) => (to - from) / plot.bbox.width > plot.longest / (between[1] - between[0]));
    const edge = { width: 0, points: { show: false }, gaps };
    return {
      width,
      height: isOverview ? 110 : isFirst ? 240 : 150,
      cursor: { sync: { key: "slot" } },
      legend: { show: isFirst && !isOverview },
      // In the time of the server, as all other texts.
      tzDate: (at) => uPlot.tzDate(new Date((at + offset) * 1000), "Etc/UTC"),
      scales: { x: { range: () => between } },
      axes: [{ ...axis, values: times, space: 80 }, { ...axis, size: 64, space: isOverview ? 20 : 30 }],
      hooks: { drawAxes: [strip] },
      series: [
        { value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" }, { ...edge, label: "max" }, { ...edge, label: "min" }, { stroke: colour("line"), width: 1.5, label: "mean", gaps },
        ...(beside ? [{ stroke: colour("warn"), width: 1.5, dash: [6, 4], label: beside, gaps }] : []),
      ],
      bands: [{ series: [1, 2], fill: `${colour("line")}33` }],
    };
  };

  let plots = [], spans = [], marks = [], between = [0, 1], offset = 0, drawn = "";
  const draw = (node, found, slot, from_to) => {
    [spans, between, offset] = [slot.spans, from_to, slot.utc_offset_s];
    marks = slot.events.filter((event) => event.event !== "state" && event.at_unix_s);
    const shape = JSON.stringify([node.id, found.map((each) => [each.label, each.beside_label]), node.clientWidth, colour("text")]);
    if (drawn !== shape) {
      for (const plot of plots) plot.destroy();
      node.replaceChildren(...found.map((each) => {
        const box = document.createElement("figure"), caption = document.createElement("figcaption");
        caption.textContent = each.label;
        box.append(caption);
        return box;
      }));
      plots = found.map((each, at) => new uPlot(options(node.children[at].clientWidth, at === 0, node.id === "overview", each.beside_label), null, node.children[at]));
      drawn = shape;
    }
    found.forEach((each, at) => {
      plots[at].longest = longest(each);
      plots[at].setData([each.t, each.max || each.mean, each.min || each.mean, each.mean, ...(each.beside ? [each.beside] : [])]);
    });
  };
  return { draw };
})();
