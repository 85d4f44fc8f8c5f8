// The text of one token, so that people see all of it.

const LINE_END = /\r\n|[\r\n]/g;
const CONTROL = /[\x00-\x1f\x7f]/g;

/** Spaces and marks that nobody sees. */
const UNSEEN = /(?! )[\p{Z}\p{Cf}]/gu;

/** Spaces at its ends become "·", line ends "↵", tabs "⇥", other controls their pictures, unseen characters their numbers;
 * a token without text is "∅". */
export function visible(text) {
  if (text === "") return "∅";
  const shown = text.replace(LINE_END, "↵").replaceAll("\t", "⇥").replace(CONTROL, picture).replace(UNSEEN, number);
  return shown.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

const number = (unseen) => `U+${unseen.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** Unicode has pictures of control characters, in their order. */
export const picture = (control) => (control === "\x7f" ? "␡" : String.fromCharCode(0x2400 + control.charCodeAt(0)));
