// The places in one lane: a grid of narrow columns and some rows, in which each session holds a rectangle, and keeps it
// while others come and go.

/** Pixels of one column. */
export const COLUMN = 4;

export class Lane {
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
