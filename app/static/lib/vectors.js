// Arithmetic of vectors: arrays of numbers of one length.

export const norm = (a) => Math.sqrt(a.reduce((sum, value) => sum + value * value, 0));
export const minus = (a, b) => Float32Array.from(a, (value, at) => value - b[at]);

/** Row `at` of a matrix `{shape: [rows, columns], values}`. */
export const row = ({ shape: [, columns], values }, at) => values.subarray(at * columns, (at + 1) * columns);

/** The mean of several vectors. */
export function mean(vectors) {
  const sum = new Float64Array(vectors[0].length);
  for (const vector of vectors) vector.forEach((value, at) => (sum[at] += value));
  return Float32Array.from(sum, (value) => value / vectors.length);
}
