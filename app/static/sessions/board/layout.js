// Where each session is drawn in each lane. All lanes have one scale.
import { TIERS, bytesIn } from "../looks.js";

/** Pixels of one column. */
const COLUMN = 4;
/** Heights of a row, and the least width of a cell in it: the first with room for all sessions is used. So cells have
 * names, or initials, as long as there is room, and are filled as far as their bytes go. */
const ROWS = [
  { height: 26, least: 84 },
  { height: 20, least: 76 },
  { height: 20, least: 60 },
  { height: 20, least: 52 },
  { height: 15, least: 48 },
  { height: 15, least: 12 },
  { height: 10, least: 8 },
];
/** Part of a lane that the largest session may take. */
const LARGEST = 1 / 6;
/** Share of a lane that is filled at most: the rest is for sessions that grow. */
const FILLED = 0.65;
/** Cells are this much wider than high, about. */
const ASPECT = 2.5;

export class Layout {
  constructor() {
    this.lanes = {};
    this.row = null;
    this.scale = 0;
    this.crowded = new Set();
  }

  /** Place all sessions anew, in lanes of this size, the largest first. */
  arrange(views, width, height) {
    const area = width * height;
    this.scale = scaleOf(views, area);
    for (this.row of ROWS) {
      if (this.row !== ROWS.at(-1) && !fits(views, this.scale, this.row, area)) continue;
      this.crowded.clear();
      for (const tier of TIERS) {
        this.lanes[tier] = new Lane(width, height, this.row.height);
        const held = views.filter((view) => bytesIn(view, tier) > 0);
        for (const view of held.sort((one, other) => bytesIn(other, tier) - bytesIn(one, tier))) this.#put(view, tier);
      }
      if (this.crowded.size === 0) return;
    }
  }

  /** Whether these sessions ask for another scale than they have, or leave room for larger cells. */
  isOutgrown(views, width, height) {
    const scale = scaleOf(views, width * height);
    if (scale > this.scale || scale < this.scale / 4) return true;
    const larger = ROWS[ROWS.indexOf(this.row) - 1];
    return larger !== undefined && fits(views, this.scale, larger, 0.6 * width * height);
  }

  /** Give a session its places; false if there is no room in a lane. */
  place(view) {
    return TIERS.map((tier) => this.#put(view, tier)).every(Boolean);
  }

  remove(id) {
    for (const tier of TIERS) {
      this.lanes[tier].remove(id);
      this.crowded.delete(`${tier} ${id}`);
    }
  }

  /** The rectangle of a session in a lane, in pixels, and the bytes that fill it; undefined if it has none. */
  spot(id, tier) {
    const spot = this.lanes[tier].spots.get(id);
    const { height } = this.row;
    return spot && {
      holds: spot.columns * COLUMN * spot.rows * height * this.scale,
      x: spot.column * COLUMN,
      y: spot.row * height,
      width: spot.columns * COLUMN - 2,
      height: spot.rows * height - 2,
    };
  }

  #put(view, tier) {
    const bytes = bytesIn(view, tier);
    this.crowded.delete(`${tier} ${view.id}`);
    if (bytes === 0) {
      this.lanes[tier].remove(view.id);
      return true;
    }
    const { columns, rows } = this.#size(bytes / this.scale);
    const done = this.lanes[tier].put(view.id, columns, rows);
    if (!done) this.crowded.add(`${tier} ${view.id}`);
    return done;
  }

  #size(area) {
    const { height, least } = this.row;
    const rows = Math.max(1, Math.floor(Math.sqrt(area / ASPECT) / height));
    const columns = Math.round(Math.max(least, area / (rows * height)) / COLUMN);
    return { columns, rows };
  }
}

/** Bytes of a pixel, in steps of half a power of two so that it seldom changes. */
function scaleOf(views, area) {
  let scale = 1;
  for (const tier of TIERS) {
    let [sum, most] = [0, 0];
    for (const view of views) {
      sum += bytesIn(view, tier);
      most = Math.max(most, bytesIn(view, tier));
    }
    scale = Math.max(scale, sum / (FILLED * area), most / (LARGEST * area));
  }
  return 2 ** (Math.ceil(2 * Math.log2(scale)) / 2);
}

function fits(views, scale, { height, least }, area) {
  return TIERS.every((tier) => {
    let sum = 0;
    for (const view of views) if (bytesIn(view, tier) > 0) sum += Math.max(bytesIn(view, tier) / scale, height * least);
    return sum <= 0.85 * area;
  });
}

/** The places in one lane: a grid of narrow columns and some rows, in which each session holds a rectangle, and keeps it
 * while others come and go. */
class Lane {
  constructor(width, height, rowHeight) {
    this.columns = Math.max(1, Math.floor(width / COLUMN));
    this.rows = Math.max(1, Math.floor(height / rowHeight));
    this.taken = new Uint8Array(this.columns * this.rows);
    this.spots = new Map();
  }

  /** Give `id` a rectangle of this size, where it was if that is free. False if there is no room: it has none then. */
  put(id, columns, rows) {
    const old = this.spots.get(id);
    if (old?.columns === columns && old.rows === rows) return true;
    this.remove(id);
    const spot = (old && this.#fit(old.column, old.row, columns, rows)) || this.#find(columns, rows);
    if (spot === null) return false;
    this.spots.set(id, spot);
    this.#mark(spot, 1);
    return true;
  }

  remove(id) {
    const spot = this.spots.get(id);
    if (spot === undefined) return;
    this.spots.delete(id);
    this.#mark(spot, 0);
  }

  #fit(column, row, columns, rows) {
    if (column + columns > this.columns || row + rows > this.rows) return null;
    return this.#obstacle(column, row, columns, rows) < 0 ? { column, row, columns, rows } : null;
  }

  #find(columns, rows) {
    for (let row = 0; row + rows <= this.rows; row += 1) {
      for (let column = 0; column + columns <= this.columns; ) {
        const obstacle = this.#obstacle(column, row, columns, rows);
        if (obstacle < 0) return { column, row, columns, rows };
        column = obstacle + 1;
      }
    }
    return null;
  }

  /** The last taken column in a rectangle; -1 if it is free. */
  #obstacle(column, row, columns, rows) {
    let last = -1;
    for (let y = row; y < row + rows; y += 1) {
      const start = y * this.columns;
      last = Math.max(last, this.taken.lastIndexOf(1, start + column + columns - 1) - start);
    }
    return last >= column ? last : -1;
  }

  #mark({ column, row, columns, rows }, value) {
    for (let y = row; y < row + rows; y += 1) {
      const start = y * this.columns + column;
      this.taken.fill(value, start, start + columns);
    }
  }
}
