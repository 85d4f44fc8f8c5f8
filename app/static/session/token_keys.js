// How a pointer and the keyboard choose a token.

const FAR = 10;

/** The position of the token of an event, or null. */
export function tokenAt(event) {
  const token = event.target.closest("[data-position]");
  return token === null ? null : Number(token.dataset.position);
}

export const isOfToken = (event) => tokenAt(event) !== null;

/** Where a key leads from a position (null: none is chosen): a position, `use`, `leave`, or null for any other key. */
export function stepOf(event, position, length) {
  if (length === 0 || event.ctrlKey || event.metaKey || event.altKey || event.target !== event.currentTarget) return null;
  const step = event.shiftKey ? FAR : 1;
  const clamp = (to) => Math.min(Math.max(to, 0), length - 1);
  switch (event.key) {
    case "ArrowLeft":
      return clamp((position ?? length) - step);
    case "ArrowRight":
      return clamp((position ?? length - 2) + step);
    case "Home":
      return 0;
    case "End":
      return length - 1;
    case "Enter":
      return position === null ? null : "use";
    case "Escape":
      return position === null ? null : "leave";
    default:
      return null;
  }
}
