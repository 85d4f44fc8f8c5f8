// Keeps what the server said of one position.

/** Put an answer into `columns`. It adds to what is known there, unless another token stands there now. `asked` and
 * `best` say in which round this position was asked for, and for how much. */
export function storeColumn(columns, fresh, { count }, round) {
  const known = columns.get(fresh.position);
  const isSame = known?.tokenId === fresh.tokenId;
  const rows = isSame ? new Map(known.rows) : new Map();
  for (const [layer, top] of fresh.rows) if ((rows.get(layer)?.length ?? 0) <= top.length) rows.set(layer, top);
  const best = count > 1 ? round : isSame ? known.best : null;
  columns.set(fresh.position, { ...fresh, rows, asked: round, best });
}
