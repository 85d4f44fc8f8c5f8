// The text of one token, so that people see all of it.

const LINE_END = /\r\n|[\r\n]/g;
const CONTROL = /[\x00-\x1f\x7f]/g;

/** Spaces at its ends become "·", line ends "↵", tabs "⇥", other controls their pictures; a token without text is "∅". */
export function visible(text) {
  if (text === "") return "∅";
  const shown = text.replace(LINE_END, "↵").replaceAll("\t", "⇥").replace(CONTROL, picture);
  return shown.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

/** Unicode has pictures of control characters, in their order. */
export const picture = (control) => (control === "\x7f" ? "␡" : String.fromCharCode(0x2400 + control.charCodeAt(0)));
