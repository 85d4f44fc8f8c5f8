// What is known of the tokens of a session: which were generated, and which of the last turn had their KV already.

/** From what has happened: `{generated, cached, recomputed}`, lists of `[first, end]` positions. The last two are those of
 * the last turn that is over. `length` is how many tokens the history has now. */
export function marksOf(happenings, length) {
  const marks = { generated: [], cached: [], recomputed: [] };
  for (const { name, data } of happenings) {
    if (name === "session") cut(marks.generated, data.session.tokens);
    else if (name === "turn" && data.status === "finished") addTurn(marks, data.usage);
  }
  for (const runs of Object.values(marks)) cut(runs, length);
  return marks;
}

function addTurn(marks, { prompt_tokens, cached_tokens, completion_tokens, tokens_recomputed }) {
  cut(marks.generated, prompt_tokens);
  if (completion_tokens) marks.generated.push([prompt_tokens, prompt_tokens + completion_tokens]);
  marks.cached = [[0, cached_tokens]];
  marks.recomputed = [[cached_tokens, Math.min(cached_tokens + tokens_recomputed, prompt_tokens)]];
}

/** Drop what is past the end of a history that has been rewound. */
function cut(runs, length) {
  while (runs.length && runs.at(-1)[0] >= length) runs.pop();
  const last = runs.at(-1);
  if (last && last[1] > length) runs[runs.length - 1] = [last[0], length];
}

export const isIn = (runs, position) => runs.some(([first, end]) => first <= position && position < end);
