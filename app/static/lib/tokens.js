// The text of one token, so that people see all of it.

/** Spaces at its ends become "·", line ends "↵", tabs "⇥"; a token without text is "∅". */
export function visible(text) {
  if (text === "") return "∅";
  const shown = text.replaceAll("\r\n", "↵").replace(/[\r\n]/g, "↵").replaceAll("\t", "⇥");
  return shown.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}
