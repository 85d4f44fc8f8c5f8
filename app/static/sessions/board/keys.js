// The arrow keys on the board: to the nearest cell that way.

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Move the focus between the cells of `board`. */
export function walk(event, board) {
  const cells = () => [...board.querySelectorAll(".cell:enabled")];
  const next = nextCell(event, board, cells);
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function nextCell(event, board, cells) {
  if (event.ctrlKey || event.altKey || event.metaKey) return null;
  if (event.key === "Home") return cells()[0];
  if (event.key === "End") return cells().at(-1);
  const way = WAYS[event.key];
  if (way === undefined) return null;
  if (event.target === board) return first(cells());
  return nearest(centre(event.target), way, event.target, cells());
}

/** The one at the top left. */
const first = (cells) => cells.map(placed).sort((one, other) => one.y - other.y || one.x - other.x)[0]?.cell;

function nearest(from, [right, down], self, cells) {
  let [best, least] = [null, Infinity];
  for (const cell of cells) {
    if (cell === self) continue;
    const to = centre(cell);
    const ahead = (to.x - from.x) * right + (to.y - from.y) * down;
    if (ahead <= 1) continue;
    const aside = Math.abs((to.x - from.x) * down) + Math.abs((to.y - from.y) * right);
    const distance = ahead + 3 * aside;
    if (distance < least) [best, least] = [cell, distance];
  }
  return best;
}

function centre(cell) {
  const { left, top, width, height } = cell.getBoundingClientRect();
  return { x: left + width / 2, y: top + height / 2 };
}

const placed = (cell) => ({ cell, ...centre(cell) });
