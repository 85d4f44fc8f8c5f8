// A chart over the time until now, with its title and figures. It follows the width of its place.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "../../lib/html.js";
import { pathOf } from "../../lib/paths.js";
import { KEPT } from "../../state/memory.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [74, 14, 6, 24];
/** Pixels between two rules, at least. */
const SPACE = 17;
/** Steps of an axis of bytes, and of one of whole numbers. */
export const BINARY = Array.from({ length: 50 }, (_each, power) => 2 ** power);
export const WHOLE = Array.from({ length: 9 }, (_each, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
const MINUTES = [-10, -5, 0].map((minute) => [60 * minute, minute === 0 ? "now" : `${minute} min`]);

/** `data` is a signal of columns: the seconds before now, then a list for each of `series`, `{token, fill, dash,
 * isStepped}`. `format` makes a number of the y axis a text, in one of these `steps`; `most` is a function of the largest
 * value that the axis must show. The time is the last `span` seconds, with `ticks`, `[second, text]`; `marks` are lines
 * at times of their own. */
export function Chart({ data, series, format, steps, most, label, span = KEPT, ticks = MINUTES, marks = [], height = 88 }) {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([{ contentRect }]) => setWidth(contentRect.width));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  const [times, ...columns] = data.value;
  const high = most(peak(...columns));
  const x = (second) => LEFT + (1 + second / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / high) * (height - TOP - BOTTOM);
  const step = steps.find((each) => (each / high) * (height - TOP - BOTTOM) >= SPACE) ?? high;
  const rules = Array.from({ length: Math.floor(high / step) + 1 }, (_each, at) => at * step);
  return html`<div ref=${place} style=${{ height: `${height}px` }}>
    ${width > 0 && html`<svg class="chart" width=${width} height=${height} role="img" aria-label=${label}>
      ${rules.map((value) => html`<path class="rule" d="M${LEFT} ${y(value)}H${width - RIGHT}" />
        <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${format(value)}</text>`)}
      ${ticks.map(([second, text]) => html`<path class="rule" d="M${x(second)} ${TOP}V${y(0)}" />
        <text x=${x(second)} y=${height - 6} text-anchor="middle">${text}</text>`)}
      ${series.map((line, at) => drawn(line, pathOf(columns[at], (index) => x(times[index]), y, line.isStepped), y(0)))}
      ${marks.map(([second, text]) => html`<path class="mark" d="M${x(second)} ${TOP}V${y(0)}"><title>${text}</title></path>`)}
    </svg>`}
  </div>`;
}

/** One line, and the area under it. */
const drawn = ({ token, fill, dash }, path, ground) => html`
  ${fill && path && html`<path d=${areaOf(path, ground)} style=${{ fill: `var(${token})`, fillOpacity: fill / 100 }} />`}
  <path class="line" d=${path} stroke-dasharray=${dash} style=${{ stroke: `var(${token})` }} />
`;

/** Each part of a path that has gaps, down to the ground. */
const areaOf = (path, ground) =>
  path.split(/(?=M)/).map((part) => `${part}V${ground}H${part.slice(1, part.indexOf(" "))}Z`).join("");

/** The largest of some lists of numbers; 0 if there is none. */
export const peak = (...lists) => lists.reduce((most, list) => list.reduce((one, each) => Math.max(one, each ?? 0), most), 0);

/** `lines` are `{token, name, text, about}`: the colour of each line, and what it stands at. `choice` is what can be
 * chosen of it. */
export const ChartPanel = ({ title, unit, choice, lines, children }) => html`<figure class="chart-panel">
  <figcaption>
    <div class="row"><h3>${title} <span class="dim">${unit}</span></h3>${choice}</div>
    <span class="lines">
      ${lines.map(
        ({ token, name, text, about }) => html`<span key=${name} title=${about}><i class="line" style=${{ background: `var(${token})` }}></i>${name} <b>${text}</b></span>`,
      )}
    </span>
  </figcaption>
  ${children}
</figure>`;
