// A chart over the last minutes, drawn by uPlot, with its title and figures. It follows the theme and the width of its place.
import { useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { colour, themeChanges } from "../../lib/colours.js";
import { html } from "../../lib/html.js";
import { KEPT } from "../../state/memory.js";

const { uPlot } = globalThis; // a script of the page: it has no small build that is a module
const AXIS_WIDTH = 62;
/** Steps of an axis of bytes, and of one of whole numbers. */
export const BINARY = Array.from({ length: 50 }, (_each, power) => 2 ** power);
export const WHOLE = Array.from({ length: 9 }, (_each, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
const X_TICKS = [-600, -480, -360, -240, -120, 0];

/** `data` is a signal of uPlot's columns. `series` has `{token, fill, dash, isStepped}` of each; `format` makes a number
 * of the y axis a text, in one of these `steps`; `most` is a function of the largest value that the axis must show. */
export function Chart({ data, series, format, steps, most, height, label }) {
  const place = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const width = place.current.clientWidth;
    plot.current = new uPlot(options({ series, format, steps, most, width, height }), data.peek(), place.current);
    const observer = new ResizeObserver(([{ contentRect }]) => plot.current.setSize({ width: contentRect.width, height }));
    observer.observe(place.current);
    return () => (observer.disconnect(), plot.current.destroy(), (plot.current = null));
  }, []);
  useSignalEffect(() => {
    const columns = data.value;
    plot.current?.setData(columns);
  });
  useSignalEffect(() => {
    void themeChanges.value;
    plot.current?.redraw(false);
  });
  return html`<div class="chart" ref=${place} style=${{ height: `${height}px` }} role="img" aria-label=${label}></div>`;
}

function options({ series, format, steps, most, width, height }) {
  return {
    width,
    height,
    padding: [6, 14, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false, range: [-KEPT, 0] }, y: { range: (_plot, _min, max) => [0, most(max ?? 0)] } },
    series: [{}, ...series.map(line)],
    axes: [
      { ...axis(), size: 22, splits: () => X_TICKS, values: (_plot, ticks) => ticks.map(minutes) },
      { ...axis(), size: AXIS_WIDTH, space: 22, incrs: steps, values: (_plot, ticks) => ticks.map(format) },
    ],
  };
}

const line = ({ token, fill, dash, isStepped }) => ({
  stroke: () => colour(token),
  fill: fill ? () => `color-mix(in srgb, ${colour(token)} ${fill}%, transparent)` : undefined,
  width: 1.5,
  dash,
  points: { show: false },
  paths: isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
});

const axis = () => ({
  stroke: () => colour("--dim"),
  grid: { stroke: () => colour("--line"), width: 1 },
  ticks: { show: false },
  font: "11px system-ui, sans-serif",
});

const minutes = (second) => (second === 0 ? "now" : `${second / 60} min`);

/** `lines` are `{token, name, text, about}`: the colour of each line, and what it stands at. */
export const ChartPanel = ({ title, unit, lines, children }) => html`<figure class="chart-panel">
  <figcaption>
    <h3>${title} <span class="dim">${unit}</span></h3>
    <span class="lines">
      ${lines.map(
        ({ token, name, text, about }) => html`<span key=${name} title=${about}><i class="line ${token.slice(2)}"></i>${name} <b>${text}</b></span>`,
      )}
    </span>
  </figcaption>
  ${children}
</figure>`;
