// Where each session is drawn. A lane is as large as what its place can hold, and a cell as large as its KV there: a full
// lane is full. Lanes are tiled anew when KV moves, and with each news of memory as KV grows.
import { batch, effect, signal, untracked } from "@preact/signals";
import { memory } from "../../state/memory.js";
import { perSession } from "../../state/per_key.js";
import { all, ids, revision } from "../../state/sessions.js";
import { TIERS, bytesIn, bytesOf } from "../looks.js";

/** Ids of the sessions that have cells. */
export const drawn = signal([]);
/** Pixels from the corner of the board to the corner of each lane's field: `[x, y]`. */
export const corners = signal({ device: [0, 0], host: [0, 0], disk: [0, 0] });
/** How many sessions of each lane found no room in it. */
export const more = signal({});
/** How many sessions of each lane have a cell in it: news of memory may be older. */
export const shown = signal({});
/** How many sessions hold no KV. */
export const without = signal(0);

/** Cells are this much wider than high, about. */
const ASPECT = 3;
/** Least areas of a cell in pixels: the first with room for all is used, so cells have names as long as they can. */
const LEAST = [3000, 2400, 2000, 1600, 1300, 1000, 700, 450, 240];
/** Share of a lane that cells may fill though their KV is less; and how much more than their KV beyond that: others give way. */
const [ROOMY, SLACK] = [0.6, 0.1];
/** Between two tilings, at least: many cells change with each. */
const LEAST_MS = 500;
/** Most cells that glide at once, and for how long: each one is a layer for the browser. Others jump. */
const MOST_GLIDES = 16;
const GLIDE_MS = 450;

let size = { width: 0, height: 0 };
let timer = null;
let tiledAt = 0;
let glides = 0;
/** What was tiled last: the news of memory, who has KV where, and how much of it counts where sessions share KV. */
let [news, held, shares] = [null, "", {}];

/** The signal of where a session is: `spots` has its rectangles by tier, `{device: {x, y, width, height, full}}`, without
 * the tiers that hold none; `full` is the part of it that its KV takes. While it `glides` it is on its way there. */
export const placesOf = perSession({ spots: {}, glides: false });

/** Follow the sessions until the function that this answers is called. */
export function keepPlan() {
  const stop = effect(() => {
    void [revision.value, memory.value];
    updateSoon();
  });
  return () => (stop(), clearTimeout(timer), (timer = news = null));
}

/** The lanes have another size. */
export function resize(width, height) {
  if (size.width === width && size.height === height) return;
  [size, news] = [{ width, height }, null];
  updateSoon();
}

function updateSoon() {
  timer ??= setTimeout(requestAnimationFrame, Math.max(0, tiledAt + LEAST_MS - performance.now()), update);
}

const holders = (views) => views.map((view) => view.id + TIERS.map((tier) => Math.sign(bytesIn(view, tier)))).join();

function update() {
  timer = null;
  const [views, { data } = {}] = [all(), memory.peek() ?? {}];
  const now = holders(views);
  if (!size.width || !data || (news === data && held === now)) return;
  const mayGlide = news !== null;
  const each = (tell) => Object.fromEntries(TIERS.map((tier) => [tier, tell(tier)]));
  if (news !== data) shares = each((tier) => Math.min(1, data[tier].owned_bytes / sum(views.map((view) => bytesIn(view, tier)))) || 1);
  [news, held, tiledAt] = [data, now, performance.now()];
  const lanes = each((tier) => lane(tier, views, data[tier].total_bytes));
  untracked(() => batch(() => {
    publish(views, lanes, mayGlide);
    drawn.value = ids.value;
    without.value = views.filter((view) => bytesOf(view) === 0).length;
    more.value = each((tier) => lanes[tier].missed);
    shown.value = each((tier) => lanes[tier].spots.size);
  }));
}

const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);

/** The rectangles in one lane by session, and how many `missed` have none: those with the least. */
function lane(tier, views, total) {
  const area = size.width * size.height;
  // The largest first, in steps of twice as much: one that grows seldom changes its place.
  const step = (view) => Math.floor(Math.log2(bytesIn(view, tier)));
  const found = views.filter((view) => bytesIn(view, tier)).sort((one, other) => step(other) - step(one));
  const own = found.map((view) => bytesIn(view, tier) * shares[tier]);
  const scale = area / Math.max(total, sum(own));
  const room = Math.max(ROOMY, (scale * sum(own)) / area + SLACK) * area;
  const atLeast = (least) => own.map((bytes) => Math.max(bytes * scale, least));
  const wanted = atLeast(LEAST.find((least) => sum(atLeast(least)) <= room) ?? LEAST.at(-1));
  while (sum(wanted) > (1 + SLACK) * area) wanted.pop();
  const taken = Math.min(area, sum(wanted));
  const areas = wanted.map((each) => (each * taken) / sum(wanted));
  const height = Math.min(size.height, Math.max(taken / size.width, Math.sqrt(areas[0] / ASPECT)));
  const tiles = tile(areas, size.width / ASPECT, height, true) ?? tile(areas, taken / height / ASPECT, height);
  const spots = tiles.map(([left, top, right, bottom]) => {
    const [x, y] = [Math.round(left * ASPECT), Math.round(top)];
    return { x, y, width: Math.max(4, Math.round(right * ASPECT) - x - 2), height: Math.max(4, Math.round(bottom) - y - 2) };
  });
  const full = (index) => Math.min(100, Math.round((100 * own[index] * scale) / areas[index]));
  return { spots: new Map(spots.map((spot, index) => [found[index].id, { ...spot, full: full(index) }])), missed: found.length - spots.length };
}

/** Rectangles of these areas (in units that make a good cell a square) that fill `width` by `height`: `[left, top, right,
 * bottom]`. They stand in strips along the shorter side of what is free, as many in each as makes them squarest. If they
 * are `few`, a strip with much room leaves some free; null if there is too little room for that. */
function tile(areas, width, height, few = false) {
  const tiles = [];
  let [x, y] = [0, 0];
  while (tiles.length < areas.length) {
    const [isWide, side] = [width - x > height - y, Math.min(width - x, height - y)];
    const [strip, least] = stripOf(areas.slice(tiles.length).map((area) => area / ASPECT), side);
    const thick = few ? Math.max(least, Math.sqrt(strip[0])) : least;
    if (few && thick > (isWide ? width - x : height - y)) return null;
    let along = isWide ? y : x;
    for (const area of strip) {
      const end = along + area / thick;
      tiles.push(isWide ? [x, along, x + thick, end] : [along, y, end, y + thick]);
      along = end;
    }
    if (isWide) x += thick;
    else y += thick;
  }
  return tiles;
}

/** The areas that stand in one strip of this length, and how thick it is. */
function stripOf(areas, side) {
  let [total, worst, count] = [0, Infinity, 0];
  for (const area of areas) {
    const thick = (total + area) / side;
    const next = Math.max(areas[0] / thick ** 2, thick ** 2 / Math.min(area, areas[0]));
    if (next > worst) break;
    [total, worst, count] = [total + area, next, count + 1];
  }
  return [areas.slice(0, count), total / side];
}

/** Tell each session's cells where they are. Those that change lanes glide. */
function publish(views, lanes, mayGlide) {
  for (const { id } of views) {
    const entries = TIERS.flatMap((tier) => (lanes[tier].spots.has(id) ? [[tier, lanes[tier].spots.get(id)]] : []));
    const [place, spots] = [placesOf(id), Object.fromEntries(entries)];
    if (JSON.stringify(place.value.spots) === JSON.stringify(spots)) continue;
    const [[before], [after]] = [place.value.spots, spots].map(Object.keys);
    place.value = { spots, glides: mayGlide && before !== undefined && before !== after && glides < MOST_GLIDES };
    if (place.value.glides) arriveLater(place);
  }
}

function arriveLater(place) {
  glides += 1;
  setTimeout(() => {
    glides -= 1;
    place.value = { ...place.value, glides: false };
  }, GLIDE_MS);
}
