// Reads and writes safetensors files: https://huggingface.co/docs/safetensors
const READERS = {
  F32: (view, at) => view.getFloat32(4 * at, true),
  F16: (view, at) => half(view.getUint16(2 * at, true)),
  BF16: (view, at) => fromBits(view.getUint16(2 * at, true) << 16),
};
const scratch = new DataView(new ArrayBuffer(4));

/** `{metadata, tensors}` of a file in an ArrayBuffer. `tensors` is a Map from name to `{shape, values}`, in the order
 * of the names, with `values` a Float32Array. Throws a RangeError for a type that is not F32, F16 or BF16. */
export function read(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const { __metadata__: metadata = {}, ...entries } = header;
  const tensors = new Map();
  for (const name of Object.keys(entries).sort()) tensors.set(name, readTensor(buffer, 8 + length, entries[name]));
  return { metadata, tensors };
}

/** A file with one F32 tensor, as a Uint8Array. `values` is a Float32Array of one dimension. */
export function writeVector(name, values) {
  const entry = { dtype: "F32", shape: [values.length], data_offsets: [0, 4 * values.length] };
  const text = new TextEncoder().encode(JSON.stringify({ [name]: entry }));
  const padded = 8 * Math.ceil(text.length / 8);
  const file = new Uint8Array(8 + padded + 4 * values.length).fill(32);
  file.set(text, 8);
  const view = new DataView(file.buffer);
  view.setBigUint64(0, BigInt(padded), true);
  values.forEach((value, at) => view.setFloat32(8 + padded + 4 * at, value, true));
  return file;
}

function readTensor(buffer, start, { dtype, shape, data_offsets: [first, end] }) {
  const reader = READERS[dtype];
  if (!reader) throw new RangeError(`The file has a tensor of ${dtype}; F32, F16 and BF16 can be read.`);
  const view = new DataView(buffer, start + first, end - first);
  const values = new Float32Array(shape.reduce((count, size) => count * size, 1));
  for (let at = 0; at < values.length; at += 1) values[at] = reader(view, at);
  return { shape, values };
}

function fromBits(bits) {
  scratch.setInt32(0, bits);
  return scratch.getFloat32(0);
}

/** IEEE 754 binary16: 1 bit of sign, 5 of exponent, 10 of fraction. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
