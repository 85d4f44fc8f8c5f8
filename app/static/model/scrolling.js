// Which positions of the heatmap are in sight.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

/** Sizes in CSS pixels: those of model.css. */
export const CELL_WIDTH = 66;
export const CELL_HEIGHT = 22;
export const HEAD_HEIGHT = 40;
export const LADDER_WIDTH = 136;
/** Cells are drawn in steps of so many positions, so that most scrolling draws nothing. */
const STEP = 16;

/** `{box, onScroll, first, end}`: a ref and a listener for the box that scrolls, and the positions to draw. The box
 * stays at its right end as the history grows, unless one has scrolled away. */
export function useWindow(desk) {
  const box = useRef(null);
  const atEnd = useRef(true);
  const total = desk.lens.end.value;
  const [range, setRange] = useState({ first: 0, end: 0 });
  const measure = () => {
    const { scrollLeft, clientWidth, scrollWidth } = box.current;
    atEnd.current = scrollLeft + clientWidth >= scrollWidth - CELL_WIDTH;
    const first = Math.max(0, STEP * Math.floor(scrollLeft / CELL_WIDTH / STEP - 0.5));
    const end = Math.min(total, STEP * Math.ceil((scrollLeft + clientWidth) / CELL_WIDTH / STEP + 0.5));
    setRange((before) => (before.first === first && before.end === end ? before : { first, end }));
  };
  useLayoutEffect(() => {
    if (atEnd.current) box.current.scrollLeft = box.current.scrollWidth;
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, [total]);
  useEffect(() => {
    if (range.end > range.first) desk.lens.want(Math.max(0, Math.min(range.first, total - 64)), range.end);
  }, [range, total]);
  return { box, onScroll: measure, first: range.first, end: Math.min(range.end, total) };
}

/** Scroll the box so far that a cell is in sight, beside the ladder and under the tokens. */
export function reveal(box, { layer, position }) {
  const left = position * CELL_WIDTH;
  const room = box.clientWidth - LADDER_WIDTH - CELL_WIDTH;
  box.scrollLeft = Math.min(left, Math.max(left - room, box.scrollLeft));
  const top = layer * CELL_HEIGHT;
  const height = box.clientHeight - HEAD_HEIGHT - CELL_HEIGHT;
  box.scrollTop = Math.min(top, Math.max(top - height, box.scrollTop));
}
