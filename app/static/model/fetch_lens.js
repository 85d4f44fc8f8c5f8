// STUB
export async function fetchLens(id, first, end, layers) {
  const words = [" the", " of", " Paris", " France", " city", "\n", " a", " and"];
  const found = new Map();
  for (let position = first; position < end; position += 1) {
    const rows = new Map(layers.map((layer) => {
      const start = (position * 7 + layer * 3) % words.length;
      const p = Math.min(0.95, ((layer + 1) / 30) * (0.3 + ((position * 13) % 7) / 10));
      return [layer, [0, 1, 2, 3].map((at) => ({ tokenId: (start + at) % words.length, text: words[(start + at) % words.length], p: p / (1 + 3 * at) }))];
    }));
    found.set(position, { position, tokenId: position, text: ` token${position}`, rows });
  }
  return found;
}
